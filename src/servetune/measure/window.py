"""Which span of time counts, and how many requests were in flight in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servetune.clock import SECOND
from servetune.events import Events


class Window(NamedTuple):
    """[start, end) in ns; empty when the load point was never reached."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        return max(0, self.end - self.start) / SECOND


def window_of(events: Events, *, slots: int | None) -> Window:
    """Span at the load point: ramp and drain stay outside.

    Closed loop: from when all slots are filled until the last request leaves, since after that the
    load falls. Serial: from the first request's start to the last one's end. Open loop: from when the
    longest request could have ended (before that fewer are in flight than the rate makes) to the
    last due time.
    """
    sent = np.sort(events.sent[events.sent >= 0])
    if not len(sent):
        return Window(0, 0)
    if slots is None:
        longest = int((events.done - events.scheduled)[events.done >= 0].max(initial=0))
        end = int(events.scheduled.max())
        return Window(min(int(events.scheduled.min()) + longest, end), end)
    if slots == 1:
        return Window(int(sent[0]), int(max(events.done.max(), sent[-1])) + 1)  # the last end is inside
    if len(sent) <= slots:
        return Window(int(sent[0]), int(sent[0]))
    return Window(int(sent[slots - 1]), int(sent[-1]))


def in_flight(events: Events, window: Window) -> tuple[float, int]:
    """Time-weighted mean of the requests between sent and end inside the window, and their maximum."""
    started = events.sent >= 0
    sent = events.sent[started]
    done = np.where(events.done[started] >= 0, events.done[started], sent)
    if window.end <= window.start or not len(sent):
        return float("nan"), 0
    overlap = np.minimum(done, window.end) - np.maximum(sent, window.start)
    mean = float(np.maximum(overlap, 0).sum()) / (window.end - window.start)
    times = np.r_[sent, done]
    steps = np.r_[np.ones(len(sent), int), -np.ones(len(done), int)]
    order = np.lexsort((steps, times))  # an end at the same instant comes before a start
    return mean, int(np.cumsum(steps[order]).max())
