"""Schedules of open loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.clock import SECOND
from servetune.spec import Load
from servetune.traffic import offsets


def gaps(text: str, n: int = 20_000, seed: int = 1) -> np.ndarray:
    return np.diff(offsets(Load.parse(text), requests=n, seconds=None, seed=seed)) / SECOND


def test_constant_arrivals_are_exact_and_start_at_once() -> None:
    due = offsets(Load.parse("rate=8,arrivals=constant"), requests=9000, seconds=None, seed=0)
    assert due[0] == 0
    assert abs(due - np.arange(9000) * SECOND // 8).max() <= 10  # ns, over 18 minutes


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_gaps_have_the_asked_mean_and_spread(burstiness: float, cv: float) -> None:
    found = gaps(f"rate=50,burstiness={burstiness}")
    assert abs(found.mean() * 50 - 1) < 5 * cv / len(found) ** 0.5
    assert abs(found.std() / found.mean() / cv - 1) < 0.06


def test_poisson_gaps_are_exponential() -> None:
    found = np.sort(gaps("rate=50")) * 50
    steps = np.arange(1, len(found) + 1) / len(found)
    assert abs(steps - (1 - np.exp(-found))).max() < 1.95 / len(found) ** 0.5  # Kolmogorov-Smirnov, 0.1 %


@given(
    st.sampled_from(["rate=20", "rate=20,burstiness=0.3", "rate=20,arrivals=constant", "rate=3000"]),
    st.integers(1, 6000) | st.none(),
    st.floats(0.01, 400) | st.none(),
    st.integers(0, 5),
)
def test_limits_hold_and_a_longer_schedule_begins_with_the_shorter(
    text: str, requests: int | None, seconds: float | None, seed: int
) -> None:
    if requests is None and seconds is None:
        return
    if requests is None and text == "rate=3000":
        seconds = min(seconds or 1.0, 5.0)
    load = Load.parse(text)
    due = offsets(load, requests=requests, seconds=seconds, seed=seed)
    assert due.dtype == np.int64
    assert (np.diff(due) >= 0).all()
    assert (due >= 0).all()
    if requests is not None:
        assert len(due) <= requests
    if seconds is not None:
        assert (due < seconds * SECOND + 1).all()
    more = offsets(load, requests=None if requests is None else requests + 10, seconds=seconds, seed=seed)
    assert (more[: len(due)] == due).all()


def test_seeds_differ_and_repeat() -> None:
    load = Load.parse("rate=20")
    first, again, other = (offsets(load, requests=50, seconds=None, seed=seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_what_has_no_schedule() -> None:
    with pytest.raises(ValueError, match="closed loop"):
        offsets(Load.parse("serial"), requests=1, seconds=None, seed=0)
    with pytest.raises(ValueError, match="needs"):
        offsets(Load.parse("rate=1"), requests=None, seconds=None, seed=0)
