"""When requests leave. Knows nothing of HTTP: it is given a function that sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from servetune.clock import SECOND, Alarm, now
from servetune.drive.plan import Stage

Send = Callable[[int, int], None]
"""Send request `index` that was due at `scheduled` (ns)."""

Take = Callable[[], int]
"""The next request number of a closed loop; shared by all workers, so each is taken once."""


class Pacing(Protocol):
    @property
    def exhausted(self) -> bool:
        """True when no more requests will leave."""
        ...

    def start(self, at: int) -> None: ...

    def finished(self) -> None:
        """A request ended, well or badly."""
        ...

    def stop(self) -> None:
        """Send no more."""
        ...

    def unsent(self) -> Iterator[tuple[int, int]]:
        """Number and due time (ns) of the planned requests that will not leave."""
        ...


class ClosedLoop:
    """Keeps `slots` requests in flight: one that ends is followed at once by the next.

    `between(go_on)`, if given, is called before each request and after the last one that ends; it
    calls `go_on()` when it is done.
    """

    def __init__(
        self,
        stage: Stage,
        alarm: Alarm,
        send: Send,
        take: Take,
        between: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        self._slots = stage.slots or 0
        self._limit = stage.requests
        self._seconds = stage.seconds
        self._alarm = alarm
        self._send = send
        self._take = take
        self._between = between
        self._resting = 0
        self._until: int | None = None
        self._stopped = False

    @property
    def exhausted(self) -> bool:
        return self._resting >= self._slots

    def start(self, at: int) -> None:
        self._until = None if self._seconds is None else at + round(self._seconds * SECOND)
        self._alarm.at(at, self._fill)

    def _fill(self) -> None:
        for _ in range(self._slots):
            self.finished()

    def finished(self) -> None:
        if self._between is not None:
            self._between(self._next)
        else:
            self._next()

    def _next(self) -> None:
        free = now()
        if self._stopped or (self._until is not None and free >= self._until):
            self._resting += 1
            return
        index = self._take()
        if self._limit is not None and index >= self._limit:
            self._resting += 1
            return
        self._send(index, free)

    def stop(self) -> None:
        self._stopped = True

    def unsent(self) -> Iterator[tuple[int, int]]:
        """Requests that were planned by number; each is taken from the shared count."""
        if self._limit is not None:
            while (index := self._take()) < self._limit:
                yield index, now()


class OpenLoop:
    """Sends each request at its due time, however the server does.

    The due times are absolute, so a late one delays no other.
    """

    def __init__(self, stage: Stage, alarm: Alarm, send: Send, worker: int, workers: int) -> None:
        assert stage.due is not None
        self._numbers = np.arange(worker, len(stage.due), workers).tolist()
        self._offsets: list[int] = stage.due[worker::workers].tolist()
        self._alarm = alarm
        self._send = send
        self._position = 0
        self._start = 0
        self._stopped = False

    @property
    def exhausted(self) -> bool:
        return self._stopped or self._position >= len(self._offsets)

    def start(self, at: int) -> None:
        self._start = at
        if self._offsets:
            self._alarm.at(at + self._offsets[0], self._due)

    def _due(self) -> None:
        offsets, numbers, start = self._offsets, self._numbers, self._start
        while not self._stopped and self._position < len(offsets):
            due = start + offsets[self._position]
            if due > now():
                self._alarm.at(due, self._due)
                return
            self._position += 1
            self._send(numbers[self._position - 1], due)

    def finished(self) -> None:
        return

    def stop(self) -> None:
        self._stopped = True

    def unsent(self) -> Iterator[tuple[int, int]]:
        for position in range(self._position, len(self._offsets)):
            yield self._numbers[position], self._start + self._offsets[position]
