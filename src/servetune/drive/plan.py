"""What a window sends, worked out before it starts, so that nothing is built while it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from servetune.events import Phase


@dataclass(frozen=True)
class Limits:
    """Deadlines of one request, seconds: in all, and without a byte."""

    timeout: float = 600.0
    stall: float = 120.0


@dataclass(frozen=True)
class Stage:
    """One load point, or the warm-up before it.

    payloads   whole HTTP requests, one a prompt; request i sends `payloads[i % len(payloads)]`
    slots      requests in flight (closed loop), or None
    due        ns after the start at which request i leaves (open loop), or None
    requests   how many at most in a closed loop, or None
    seconds    a closed loop sends none after this, or None
    scrape     whole HTTP request for the server's counters, sent between the requests of a
               serial stage, or None
    """

    phase: Phase
    payloads: list[bytes]
    slots: int | None = None
    due: npt.NDArray[np.int64] | None = None
    requests: int | None = None
    seconds: float | None = None
    scrape: bytes | None = None
    limits: Limits = Limits()

    @property
    def planned(self) -> int | None:
        """Requests that the stage sends if nothing stops it, or None when time decides."""
        return self.requests if self.due is None else len(self.due)

    def share(self, worker: int, workers: int) -> Stage:
        """The part of one worker of several: slots are divided, due times dealt in turn."""
        if self.slots is None:
            return self
        even, over = divmod(self.slots, workers)
        return replace(self, slots=even + (worker < over))
