"""Percentiles with bounds from order statistics, no distribution assumed.

A percentile is shown only when enough values exist for a bound on it; otherwise the least number
that would do is told.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHOWN = (0.50, 0.90, 0.95, 0.99)
_ONE_SIDED = 0.95
_TWO_SIDED = 0.975


class Quantile(msgspec.Struct, frozen=True):
    """p: 0.5 = median; value, low, high: in the unit of the distribution.

    null in `value` means infinite: so many requests failed that this percentile is a failure. null
    in `low` or `high` means that no bound exists for so few values.
    """

    p: float
    value: float | None
    low: float | None
    high: float | None


class Distribution(msgspec.Struct, frozen=True):
    """A metric with one value a request (or a token).

    n         values, failed requests included
    failed    of them failed: they count as infinite in the quantiles, not in mean, min, max
    needs     "p99" -> the least number of values for a percentile that is not shown
    """

    unit: str
    n: int
    failed: int
    mean: float | None
    min: float | None
    max: float | None
    quantiles: list[Quantile]
    needs: dict[str, int]


def least_n(p: float, confidence: float = _ONE_SIDED) -> int:
    """Least number of values for which an upper bound on percentile p exists: p^n <= 1 - confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(p) - 1e-9)


def rank_bounds(n: int, p: float) -> tuple[int | None, int | None]:
    """1-based ranks of a two-sided 95 % interval of percentile p among n values; None: no bound."""
    from scipy.stats import binom

    low = int(binom.ppf(1 - _TWO_SIDED, n, p))
    while low > 0 and binom.cdf(low - 1, n, p) > 1 - _TWO_SIDED:
        low -= 1
    high = int(binom.ppf(_TWO_SIDED, n, p)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def effective_n(values: Floats) -> int:
    """Independent values that a dependent series is worth: n / (1 + 2 Σρ_k), rounded down.

    The sum of autocorrelations ends before the first that is not positive.
    """
    n = len(values)
    centred = values - values.mean() if n else values
    variance = float(centred @ centred)
    if n < 3 or variance <= 1e-12 * max(1.0, float(np.max(np.abs(values))) ** 2):
        return n
    total = 0.0
    for lag in range(1, n // 2):
        rho = float(centred[:-lag] @ centred[lag:]) / variance
        if rho <= 0:
            break
        total += rho
    return max(1, math.floor(n / (1 + 2 * total)))


def distribution(
    values: Floats,
    unit: str,
    *,
    failed: int = 0,
    weights: Floats | None = None,
    units_of_noise: int | None = None,
) -> Distribution:
    """Distribution of one value a request, in the order the requests were sent.

    NaN values do not exist and are left out. `failed` requests count as infinite. With `weights`
    (tokens), quantiles are weighted and their bounds rest on `units_of_noise` requests.
    """
    keep = ~np.isnan(values)
    values = values[keep]
    weights = np.ones(len(values)) if weights is None else weights[keep]
    independent = effective_n(values) + failed if units_of_noise is None else units_of_noise
    ordered = np.argsort(values, kind="stable")
    values, weights = values[ordered], weights[ordered]
    padded = np.r_[values, np.full(failed, np.inf)]
    shares = np.cumsum(np.r_[weights, np.ones(failed)])
    quantiles, needs = [], {}
    for p in SHOWN:
        if independent < least_n(p):
            needs[f"p{100 * p:g}"] = least_n(p)
            continue
        low, high = rank_bounds(independent, p)
        quantiles.append(
            Quantile(
                p,
                _at(padded, shares, p),
                None if low is None else _at(padded, shares, low / independent),
                None if high is None else _at(padded, shares, high / independent),
            )
        )
    some = len(values) > 0
    return Distribution(
        unit=unit,
        n=len(padded),
        failed=failed,
        mean=float(np.average(values, weights=weights)) if some else None,
        min=float(values[0]) if some else None,
        max=float(values[-1]) if some else None,
        quantiles=quantiles,
        needs=needs,
    )


def _at(values: Floats, shares: Floats, p: float) -> float | None:
    """Smallest value with at least a share p of the weight at or below it."""
    place = int(np.searchsorted(shares, p * shares[-1] * (1 - 1e-12)))
    value = float(values[min(place, len(values) - 1)])
    return value if math.isfinite(value) else None
