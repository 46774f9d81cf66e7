"""The client watches itself, so that its own lateness is never taken for the server's."""

from __future__ import annotations

import time

import msgspec

from servetune.clock import MS, SECOND, Alarm, now

_PERIOD = 5 * MS


class WatchReport(msgspec.Struct):
    """What the client did to itself during a stage.

    worst_stall   longest time the event loop ran late, ns
    stalls        (time, ns late) of each one above 5 ms
    busy          share of one core used by this process, for each full second
    cpu           CPU seconds in all
    """

    worst_stall: int
    stalls: list[tuple[int, int]]
    busy: list[float]
    cpu: float


class Watch:
    """Asks to be called every 5 ms and notes how late the call comes."""

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._worst = 0
        self._stalls: list[tuple[int, int]] = []
        self._busy: list[float] = []

    def start(self, at: int) -> None:
        self._cpu = self._second_cpu = time.process_time_ns()
        self._second = at
        self._expected = at
        self._alarm.at(at, self._tick)

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
        self._alarm.at(self._expected, self._tick)

    def stop(self) -> WatchReport:
        cpu = (time.process_time_ns() - self._cpu) / SECOND
        return WatchReport(self._worst, self._stalls, self._busy, cpu)
