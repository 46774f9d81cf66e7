"""What the scripted server saw and did: one record a generation request, and requests in flight over time."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

Authorization = Literal["absent", "present", "correct", "wrong", "missing"]

# Never the value of a credential: authorization is recorded as a word
# (`absent`, `present` when no key is expected; else `correct`, `wrong`, `missing`).
KEPT_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "transfer-encoding",
        "user-agent",
        "x-request-id",
    }
)


class Record(Struct):
    """One generation request; times are ns of `servetune.clock.now`, None until they happen.

    `n` counts from 1 in order of receipt; `connection` numbers connections from 1. `in_flight` includes
    this request. `started_ns` is the start of service, the zero of the reply's times. `writes_ns` has the
    time just after each socket write, `worst_late_ns` the largest lateness of a write. `outcome`: `open`
    while unfinished, `done`, or how it ended (`close_early`, `reset`, `exit`); `lost` when the client left
    first, `aborted` when the server stopped.
    """

    n: int
    path: str
    connection: int
    received_ns: int
    body_size: int
    in_flight: int
    headers: dict[str, str]
    authorization: Authorization = "absent"
    body: str | None = None
    status: int = 0
    started_ns: int | None = None
    writes_ns: list[int] = field(default_factory=list)
    worst_late_ns: int = 0
    ended_ns: int | None = None
    outcome: str = "open"


class Log(Struct):
    """Everything since the start: `in_flight_mean` is weighted by time, first receipt to last change."""

    records: list[Record]
    in_flight: int
    in_flight_max: int
    in_flight_mean: float
    connections: int
    pages: dict[str, int]
    requests: int = 0
    generation_tokens: int = 0
    exit_reason: str | None = None


class InFlight:
    """Counts requests between receipt and end; all arguments in ns."""

    def __init__(self) -> None:
        self.current = 0
        self.most = 0
        self._area = 0
        self._began: int | None = None
        self._changed = 0

    def enter(self, at: int) -> int:
        """One more; the count with it."""
        self._advance(at)
        self.current += 1
        self.most = max(self.most, self.current)
        return self.current

    def leave(self, at: int) -> None:
        self._advance(at)
        self.current -= 1

    def mean(self, at: int) -> float:
        """Mean since the first request: to the last end, or to `at` while some are in flight."""
        if self.current:
            self._advance(at)
        if self._began is None or self._changed <= self._began:
            return float(self.current)
        return self._area / (self._changed - self._began)

    def _advance(self, at: int) -> None:
        if self._began is None:
            self._began = at
        else:
            self._area += self.current * max(0, at - self._changed)
        self._changed = max(at, self._changed)
