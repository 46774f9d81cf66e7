"""Single figures with intervals from within one launch.

Intervals here say how well one window on one launch is known. They do not cover what another launch
would show, and say so.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_BLOCKS = 5


class Estimate(msgspec.Struct, frozen=True):
    """A figure: value null when it can't be given, `note` then says why.

    low, high   95 % interval, null when there are too few values for one
    n           values (requests, blocks of time) it rests on
    method      how the interval was made
    """

    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    method: str = ""
    note: str = ""

    def inverse(self, unit: str, scale: float = 1.0) -> Estimate:
        """scale / figure, its interval turned over."""
        turned = [None if not x or x < 0 else scale / x for x in (self.value, self.high, self.low)]
        return msgspec.structs.replace(self, unit=unit, value=turned[0], low=turned[1], high=turned[2])


def missing(unit: str, why: str) -> Estimate:
    return Estimate(unit, None, note=why)


def ratio(
    above: Floats, below: Floats, unit: str, *, block: int = 1, scale: float = 1.0, note: str = ""
) -> Estimate:
    """Σ above / Σ below over requests in the order sent, with a t interval over blocks of requests.

    A ratio of sums, never a mean of ratios (P-32, P-104). Consecutive requests share batches, so
    they are summed into blocks of `block` requests, which are taken as independent; the variance is
    that of the ratio estimator (Cochran, Sampling Techniques, 1977, eq. 6.13).
    """
    total = float(below.sum())
    if total <= 0:
        return missing(unit, note or "no values")
    value = float(above.sum()) / total
    blocks = len(above) // max(block, 1)
    method = f"t over {blocks} blocks of {block}" if block > 1 else "t over requests"
    if blocks < LEAST_BLOCKS:
        why = note or f"an interval needs {LEAST_BLOCKS * block} requests"
        return Estimate(unit, value * scale, n=len(above), note=why)
    edges = np.linspace(0, len(above), blocks + 1).astype(int)[:-1]
    a, b = np.add.reduceat(above, edges), np.add.reduceat(below, edges)
    residual = a - value * b
    spread = math.sqrt(blocks / (blocks - 1) * float(residual @ residual)) / total
    low, high = _interval(value * scale, spread * scale, blocks - 1)
    return Estimate(unit, value * scale, low, high, len(above), method, note)


def mean(values: Floats, unit: str, what: str, *, note: str = "") -> Estimate:
    """Mean of values taken as independent, with a t interval."""
    n = len(values)
    if not n:
        return missing(unit, note or "no values")
    value = float(values.mean())
    if n < LEAST_BLOCKS:
        return Estimate(unit, value, n=n, note=note or f"an interval needs {LEAST_BLOCKS} {what}")
    low, high = _interval(value, float(values.std(ddof=1)) / math.sqrt(n), n - 1)
    return Estimate(unit, value, low, high, n, f"t over {n} {what}", note)


def proportion(hits: int, n: int, note: str = "") -> Estimate:
    """Share of n with its Wilson interval."""
    if not n:
        return missing("", note or "no requests")
    z, share = 1.959964, hits / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # despite rounding
    return Estimate("", share, low, high, n, "Wilson", note)


def _interval(value: float, error: float, df: int) -> tuple[float, float]:
    """95 % t interval on the log scale, where speeds and times are nearer to normal; linear at zero."""
    from scipy.stats import t

    half = float(t.ppf(0.975, df)) * error
    if value <= 0:
        return value - half, value + half
    factor = math.exp(half / value)
    return value / factor, value * factor
