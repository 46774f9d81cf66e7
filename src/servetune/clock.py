"""One monotonic clock and timers that fire on time.

Times are integer nanoseconds of `CLOCK_MONOTONIC`, which is system-wide on Linux, so stamps of
different processes can be compared. `asyncio` timers are rounded to milliseconds (both epoll and
libuv), which is too coarse to pace 1,000 requests per second; `Alarm` uses a timerfd instead.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable
from typing import Any

now = time.monotonic_ns

MS = 1_000_000
SECOND = 1_000_000_000

_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("it_interval", _Timespec), ("it_value", _Timespec)]


class _TimerFd:
    """A kernel timer on the event loop; wakes within about 0.1 ms of its time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Itimerspec()
        self._pointer = ctypes.byref(self._spec)
        self._loop = loop
        self._wake = wake
        loop.add_reader(self._fd, self._readable)

    def arm(self, at: int) -> None:
        # A zero time would disarm the timer; any time in the past fires at once.
        self._spec.it_value.tv_sec, self._spec.it_value.tv_nsec = divmod(max(at, 1), SECOND)
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def _readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._wake()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _LoopTimer:
    """For systems without timerfd: a loop timer that aims early and then polls the clock."""

    _EARLY = 2 * MS

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._handle: asyncio.Handle | None = None
        self._at = 0

    def arm(self, at: int) -> None:
        self.close()
        self._at = at
        delay = max(0, at - now() - self._EARLY) / SECOND
        self._handle = self._loop.call_later(delay, self._poll)

    def _poll(self) -> None:
        if now() >= self._at:
            self._wake()
        else:
            self._handle = self._loop.call_soon(self._poll)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class Alarm:
    """Calls functions at absolute times (ns of `now()`) on one event loop, in order of time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, kernel_timer: bool | None = None) -> None:
        self._due: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._armed: int | None = None
        if kernel_timer is None:
            kernel_timer = sys.platform == "linux"
        self._timer = (_TimerFd if kernel_timer else _LoopTimer)(loop, self._fire)

    def at(self, when: int, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` at `when`; a time that has passed is called on the next loop turn."""
        self._sequence += 1
        heapq.heappush(self._due, (when, self._sequence, call, args))
        if self._armed is None or when < self._armed:
            self._arm(when)

    def _arm(self, when: int) -> None:
        self._armed = when
        self._timer.arm(when)

    def _fire(self) -> None:
        self._armed = None
        due = self._due
        while due and due[0][0] <= now():
            _, _, call, args = heapq.heappop(due)
            call(*args)
        if due and (self._armed is None or due[0][0] < self._armed):
            self._arm(due[0][0])

    def close(self) -> None:
        """Forget all calls and free the timer."""
        self._due.clear()
        self._timer.close()
