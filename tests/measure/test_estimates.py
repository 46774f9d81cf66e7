"""Single figures: ratio of sums, their intervals, and figures that can't be given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.measure import Estimate
from servetune.measure.estimates import mean, missing, proportion, ratio

# Seconds and tokens of the EAGLE lines in the first report the project was started from.
EAGLE = [
    (19.69, 1128),
    (24.01, 1469),
    (33.72, 2217),
    (24.19, 1477),
    (21.34, 1268),
    (16.57, 1122),
    (25.77, 1559),
    (35.70, 2051),
    (24.90, 1422),
    (16.43, 855),
    (26.05, 1550),
]


def test_p104_seed_lines_are_summed_before_they_are_divided() -> None:
    seconds, tokens = (np.array(column, float) for column in zip(*EAGLE, strict=True))
    found = ratio(tokens, seconds, "tok/s")
    assert found.value == pytest.approx(60.06, abs=0.005)
    assert np.mean(tokens / seconds) == pytest.approx(59.91, abs=0.005)
    assert (found.n, found.unit) == (11, "tok/s")
    assert found.low is not None
    assert found.high is not None
    assert 52.05 < found.low < 60.06 < found.high < 67.73
    assert found.method == "t over requests"


def test_the_interval_of_a_ratio_covers_as_often_as_it_says() -> None:
    """11 serial requests whose speed has a CV of 14 %, as the acceptance lengths of the seed."""
    rng = np.random.default_rng(20_260_101)
    runs, n = 2000, 11
    sigma = math.sqrt(math.log(1 + 0.14**2))
    tokens = rng.integers(600, 2400, (runs, n)).astype(float)
    speed = np.exp(rng.normal(-(sigma**2) / 2, sigma, (runs, n))) * 60
    seconds = tokens / speed
    # E tokens / E seconds: seconds are tokens times an independent lognormal of mean e^{sigma²}/60
    truth = 60 / math.exp(sigma**2)
    hits = 0
    for t, s in zip(tokens, seconds, strict=True):
        found = ratio(t, s, "tok/s")
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= truth <= found.high
    assert 0.93 <= hits / runs <= 0.97


def test_the_interval_of_a_ratio_is_that_of_cochran_on_the_log_scale() -> None:
    above, below = np.array([40.0, 50, 60, 45, 55]), np.array([10.0, 12, 15, 11, 14])
    value = 250 / 62
    residual = above - value * below
    error = math.sqrt(5 / 4 * (residual**2).sum()) / 62
    factor = math.exp(2.776445 * error / value)
    found = ratio(above, below, "x")
    assert found.value == pytest.approx(value)
    assert (found.low, found.high) == (pytest.approx(value / factor), pytest.approx(value * factor))


def test_blocks_are_summed_so_that_dependent_requests_are_not_taken_for_many() -> None:
    rng = np.random.default_rng(5)
    # ten batches of eight requests that share their speed
    speed = np.repeat(rng.normal(50, 5, 10), 8)
    tokens = np.full(80, 100.0)
    alone, blocked = ratio(tokens, tokens / speed, "tok/s"), ratio(tokens, tokens / speed, "tok/s", block=8)
    assert alone.value == blocked.value
    assert blocked.method == "t over 10 blocks of 8"
    assert alone.low is not None
    assert blocked.low is not None
    assert blocked.low < alone.low


@pytest.mark.parametrize("n", [1, 4])
def test_too_few_requests_give_a_value_without_an_interval(n: int) -> None:
    for found in (ratio(np.full(n, 2.0), np.ones(n), "x"), mean(np.full(n, 2.0), "x", "blocks")):
        assert (found.value, found.low, found.high, found.n) == (2.0, None, None, n)
        assert "an interval needs 5" in found.note


def test_what_can_not_be_given_says_why() -> None:
    empty = np.zeros(0)
    found = [ratio(empty, empty, "x"), ratio(np.ones(3), np.zeros(3), "x"), mean(empty, "x", "y")]
    for estimate in [*found, proportion(0, 0), missing("x", "so")]:
        assert (estimate.value, estimate.low, estimate.high) == (None, None, None)
        assert estimate.note


def test_equal_requests_have_an_interval_of_no_width() -> None:
    found = ratio(np.full(8, 30.0), np.full(8, 2.0), "x")
    assert (found.low, found.value, found.high) == (15.0, 15.0, 15.0)


def test_mean_of_known_values() -> None:
    found = mean(np.array([9.0, 10, 10, 11, 10]), "tok/s", "blocks of time")
    error = math.sqrt(0.5) / math.sqrt(5)
    factor = math.exp(2.776445 * error / 10)
    assert (found.value, found.n, found.method) == (10.0, 5, "t over 5 blocks of time")
    assert (found.low, found.high) == (pytest.approx(10 / factor), pytest.approx(10 * factor))


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # R: prop.test(hits, n, correct = FALSE)
    [
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (5, 10, 0.2365931, 0.7634069),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_intervals_of_known_shares(hits: int, n: int, low: float, high: float) -> None:
    found = proportion(hits, n)
    assert found.value == hits / n
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_inverse_turns_the_interval_over() -> None:
    found = Estimate("ms/token", 20.0, 16.0, 25.0, 11, "t", "note").inverse("tok/s", 1000.0)
    assert (found.value, found.low, found.high) == (50.0, 40.0, 62.5)
    assert (found.unit, found.n, found.note) == ("tok/s", 11, "note")
    assert missing("ms", "why").inverse("tok/s").value is None


PAIRS = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=5, max_size=40)


@given(PAIRS, st.floats(0.01, 100), st.integers(1, 3))
def test_a_ratio_scales_and_lies_in_its_interval(
    pairs: list[tuple[int, int]], scale: float, block: int
) -> None:
    above, below = (np.array(column, float) for column in zip(*pairs, strict=True))
    found, scaled = (ratio(above, below, "x", block=block, scale=s) for s in (1.0, scale))
    assert found.value is not None
    assert scaled.value == pytest.approx(found.value * scale)
    assert (above / below).min() - 1e-9 <= found.value <= (above / below).max() + 1e-9
    if found.low is not None and found.high is not None:
        assert 0 < found.low <= found.value <= found.high
        assert scaled.low == pytest.approx(found.low * scale)
        assert scaled.high == pytest.approx(found.high * scale)


@given(st.integers(0, 500), st.integers(1, 500))
def test_a_share_lies_in_its_interval(hits: int, n: int) -> None:
    found = proportion(min(hits, n), n)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high <= 1
