"""When requests of an open loop are due."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from servetune.clock import SECOND
from servetune.spec import Arrivals, Load, SpecError

_MOST = 10_000_000


def offsets(load: Load, *, requests: int | None, seconds: float | None, seed: int) -> npt.NDArray[np.int64]:
    """Due times in ns from the start of the window, ascending, shape (n,).

    At most `requests` of them and all before `seconds`; at least one limit is needed. The gaps are
    used as drawn: rescaling them to hit requests ÷ rate exactly would remove the variance of the
    counts (P-42). Same seed, same schedule; a longer schedule begins with the shorter one. Raises
    SpecError for more requests than a window can hold.
    """
    if load.rate is None:
        raise ValueError("a closed loop has no schedule")
    if requests is None and seconds is None:
        raise ValueError("a schedule needs a number of requests or of seconds")
    expected = min(requests or math.inf, load.rate * (seconds or math.inf))
    if expected > _MOST:
        raise SpecError(f"load '{load}' makes {expected:.3g} requests; at most {_MOST:,} fit one window")
    rng = np.random.default_rng(seed)
    mean = 1.0 / load.rate
    block = 4096
    due: list[npt.NDArray[np.float64]] = []
    total, last = 0, 0.0
    while (requests is None or total < requests) and (seconds is None or last < seconds):
        times = last + np.cumsum(_gaps(load, mean, block, rng))
        due.append(times)
        total, last = total + block, float(times[-1])
    times = np.concatenate(due)
    if load.arrivals is Arrivals.CONSTANT:
        times = times - mean
    if requests is not None:
        times = times[:requests]
    if seconds is not None:
        times = times[times < seconds]
    return np.rint(times * SECOND).astype(np.int64)


def _gaps(load: Load, mean: float, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Seconds between arrivals; a constant schedule is exact because sums of equal gaps are."""
    if load.arrivals is Arrivals.CONSTANT:
        return np.full(n, mean)
    shape = load.burstiness if load.arrivals is Arrivals.GAMMA else 1.0
    return rng.gamma(shape, mean / shape, n)
