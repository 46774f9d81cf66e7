"""The client watches itself, so that its own lateness is never taken for the server's."""

from __future__ import annotations

import asyncio
import time

import msgspec

from servetune.clock import MS, SECOND, now

_PERIOD = 10 * MS


class WatchReport(msgspec.Struct):
    """What the client did to itself during a stage.

    worst_stall   longest time the event loop ran late, ns
    stalls        (time, ns late) of each one above 10 ms
    busy          share of one core used by this process, for each full second
    cpu           CPU seconds in all
    """

    worst_stall: int
    stalls: list[tuple[int, int]]
    busy: list[float]
    cpu: float


class Watch:
    """Asks to be called every 10 ms and notes how late the call comes: a stall that begins between two
    calls shows up to 10 ms shorter. Uses the loop's coarse timers, which cost next to nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worst = 0
        self._stalls: list[tuple[int, int]] = []
        self._busy: list[float] = []

    def start(self, at: int) -> None:
        self._cpu = self._second_cpu = time.process_time_ns()
        self._second = at
        self._expected = at
        self._handle = self._loop.call_later(max(0, at - now()) / SECOND, self._tick)

    def _tick(self) -> None:
        moment = now()
        late = moment - self._expected
        self._worst = max(self._worst, late)
        if late > _PERIOD:
            self._stalls.append((moment, late))
        if moment - self._second >= SECOND:
            cpu = time.process_time_ns()
            self._busy.append((cpu - self._second_cpu) / (moment - self._second))
            self._second, self._second_cpu = moment, cpu
        self._expected = moment + _PERIOD
        self._handle = self._loop.call_later(_PERIOD / SECOND, self._tick)

    def stop(self) -> WatchReport:
        self._handle.cancel()
        cpu = (time.process_time_ns() - self._cpu) / SECOND
        return WatchReport(self._worst, self._stalls, self._busy, cpu)
