"""Percentiles against the two tables of the definitions, and what is printed when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom

from servetune.measure import SHOWN, Distribution, distribution, least_n, rank_bounds
from servetune.measure.quantiles import effective_n

LEAST = {0.5: (5, 6), 0.9: (29, 36), 0.95: (59, 72), 0.97: (99, 122), 0.99: (299, 368), 0.999: (2995, 3688)}

RANKS = {
    60: [(22, 39), (49, 59), (53, None), (None, None)],
    100: [(40, 61), (84, 96), (90, 100), (97, None)],
    200: [(86, 115), (171, 189), (184, 197), (195, None)],
    500: [(228, 273), (436, 464), (465, 485), (490, 500)],
    1000: [(469, 532), (881, 919), (936, 964), (983, 997)],
    2000: [(956, 1045), (1773, 1827), (1880, 1920), (1971, 1989)],
    10000: [(4902, 5099), (8941, 9059), (9457, 9543), (9880, 9920)],
}
TABLE = [(n, p, *bounds) for n, row in RANKS.items() for p, bounds in zip(SHOWN, row, strict=True)]


@pytest.mark.parametrize(("p", "one_sided", "two_sided"), [(p, *ns) for p, ns in LEAST.items()])
def test_least_n_for_a_bound_that_exists(p: float, one_sided: int, two_sided: int) -> None:
    assert least_n(p) == one_sided
    assert least_n(p, 0.975) == two_sided


@pytest.mark.parametrize("p", LEAST)
def test_least_n_is_where_a_bound_by_ranks_begins(p: float) -> None:
    n = least_n(p, 0.975)
    assert rank_bounds(n, p)[1] == n
    assert rank_bounds(n - 1, p)[1] is None


@pytest.mark.parametrize(("n", "p", "low", "high"), TABLE)
def test_ranks_of_the_95_percent_interval(n: int, p: float, low: int | None, high: int | None) -> None:
    found_low, found_high = rank_bounds(n, p)
    assert found_high == high
    if low is not None:  # "none" in the table means that the interval as a whole is none
        assert found_low == low


@given(st.integers(1, 3000), st.sampled_from(SHOWN))
def test_the_interval_covers_by_the_binomial_and_no_tighter_one_does(n: int, p: float) -> None:
    low, high = rank_bounds(n, p)
    if low is not None:
        assert binom.cdf(low - 1, n, p) <= 0.025 + 1e-12
        assert binom.cdf(low, n, p) > 0.025 - 1e-12
    if high is not None:
        assert binom.cdf(high - 1, n, p) >= 0.975 - 1e-12
        assert binom.cdf(high - 2, n, p) < 0.975 + 1e-12
    else:
        assert p**n > 0.025 - 1e-12


def _shown(found: Distribution) -> list[float]:
    return [quantile.p for quantile in found.quantiles]


def _independent(n: int, **options: object) -> Distribution:
    values = np.random.default_rng(7).permutation(np.arange(1.0, n + 1))
    return distribution(values, "ms", units_of_noise=n, **options)  # type: ignore[arg-type]


def test_p103_a_hundred_values_have_no_p99() -> None:
    found = _independent(100)
    assert _shown(found) == [0.5, 0.9, 0.95]
    assert found.needs == {"p99": 299}
    assert (found.min, found.max, found.mean) == (1.0, 100.0, 50.5)


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, 0), (4, 0), (5, 1), (28, 1), (29, 2), (58, 2), (59, 3), (298, 3), (299, 4), (400, 4)],
)
def test_a_percentile_is_shown_from_the_least_n_on(n: int, shown: int) -> None:
    found = _independent(n)
    assert _shown(found) == list(SHOWN[:shown])
    assert list(found.needs) == [f"p{100 * p:g}" for p in SHOWN[shown:]]


def test_p99_has_an_interval_from_368_on() -> None:
    assert _independent(367).quantiles[3].high is None
    assert _independent(368).quantiles[3].high == 368.0


@pytest.mark.parametrize(("n", "p", "low", "high"), [row for row in TABLE if row[0] >= 100])
def test_bounds_are_the_values_at_those_ranks(n: int, p: float, low: int, high: int | None) -> None:
    found = {quantile.p: quantile for quantile in _independent(n).quantiles}
    if p not in found:
        assert n < least_n(p)
        return
    assert (found[p].low, found[p].high) == (low, high)
    assert found[p].value == pytest.approx(np.ceil(p * n))


def test_values_that_do_not_exist_are_left_out() -> None:
    found = distribution(np.array([np.nan, 3.0, 1.0, np.nan, 2.0, 5.0, 4.0]), "ms", units_of_noise=5)
    assert (found.n, found.mean, found.quantiles[0].value) == (5, 3.0, 3.0)
    nothing = distribution(np.full(3, np.nan), "ms")
    assert (nothing.n, nothing.mean, nothing.min, nothing.max, nothing.quantiles) == (0, None, None, None, [])


def test_failed_requests_count_as_infinite() -> None:
    values = np.random.default_rng(1).permutation(np.arange(1.0, 91))
    found = distribution(values, "ms", failed=10)
    assert (found.n, found.failed) == (100, 10)
    assert (found.mean, found.max) == (45.5, 90.0)
    quantiles = {quantile.p: quantile for quantile in found.quantiles}
    assert quantiles[0.5].value == 50.0
    assert quantiles[0.9].value == 90.0
    assert quantiles[0.9].high is None
    assert quantiles[0.95].value is None, "one in ten failed, so the 95th of 100 is a failure"


def test_when_most_fail_the_median_is_a_failure() -> None:
    found = distribution(np.arange(1.0, 41), "ms", failed=60, units_of_noise=100)
    assert found.quantiles[0].value is None
    assert found.max == 40.0


def test_weights_make_quantiles_of_tokens() -> None:
    # one gap of 10 ms for 1 token, one of 3 ms a token for 9 tokens
    found = distribution(np.array([10.0, 3.0]), "ms/token", weights=np.array([1.0, 9.0]), units_of_noise=40)
    assert found.mean == pytest.approx(3.7)
    quantiles = {quantile.p: quantile.value for quantile in found.quantiles}
    assert quantiles == {0.5: 3.0, 0.9: 3.0}
    heavier = distribution(np.array([10.0, 3.0]), "ms/token", weights=np.array([2.0, 8.0]), units_of_noise=40)
    assert heavier.quantiles[1].value == 10.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=60))
def test_weighted_is_the_same_as_repeated(pairs: list[tuple[int, int]]) -> None:
    values, weights = (np.array(column, float) for column in zip(*pairs, strict=True))
    weighted = distribution(values, "ms", weights=weights, units_of_noise=400)
    repeated = distribution(np.repeat(values, weights.astype(int)), "ms", units_of_noise=400)
    assert weighted.quantiles == repeated.quantiles
    assert weighted.mean == pytest.approx(repeated.mean)


def test_few_requests_with_many_tokens_have_no_p99() -> None:
    found = distribution(np.ones(10_000), "ms/token", weights=np.ones(10_000), units_of_noise=11)
    assert _shown(found) == [0.5]
    assert found.n == 10_000


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=5, max_size=80))
def test_quantiles_are_values_and_rise(values: list[float]) -> None:
    found = distribution(np.array(values), "ms", units_of_noise=len(values))
    shown = [quantile.value for quantile in found.quantiles]
    assert set(shown) <= {float(v) for v in values}
    assert shown == sorted(shown)  # type: ignore[type-var]
    for quantile in found.quantiles:
        assert quantile.value is not None
        assert quantile.low is None or quantile.low <= quantile.value
        assert quantile.high is None or quantile.high >= quantile.value


def test_effective_n_of_independent_and_of_dependent_values() -> None:
    rng = np.random.default_rng(3)
    noise = rng.normal(size=4000)
    assert effective_n(noise) > 3000
    walk = np.zeros(4000)
    for i in range(1, 4000):
        walk[i] = 0.8 * walk[i - 1] + noise[i]
    # AR(1) with 0.8: 1 + 2 Σ 0.8^k = 9
    assert effective_n(walk) == pytest.approx(4000 / 9, rel=0.3)
    assert effective_n(np.ones(50)) == 50
    assert effective_n(np.zeros(0)) == 0


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=100))
def test_effective_n_is_between_one_and_n(values: list[float]) -> None:
    assume(all(np.isfinite(values)))
    assert 1 <= effective_n(np.array(values)) <= len(values)
