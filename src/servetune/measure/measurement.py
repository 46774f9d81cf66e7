"""What one window showed, as plain data. `docs/schema/bench.json` is made from these types."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from servetune.measure.estimates import Estimate
from servetune.measure.quantiles import Distribution

SCHEMA = "servetune-bench/1"


class Verdict(StrEnum):
    """pass; flag: valid, but read the reason; void: no figure of this window may be used;
    skipped: what the gate looks at was not there."""

    PASS = "pass"
    FLAG = "flag"
    VOID = "void"
    SKIPPED = "skipped"


class Gate(msgspec.Struct, frozen=True):
    """One check. limit: the threshold in words; reason: why it stands there; evidence: what was seen."""

    name: str
    verdict: Verdict
    limit: str
    reason: str
    evidence: str


class Client(msgspec.Struct, frozen=True):
    """How the client did.

    worst_stall_ms  longest time an event loop ran late
    busy            highest share of one core in any second, of any worker
    cpu_seconds     of all workers
    opened          connections opened during the window
    stopped         "", "interrupted" or "died under load"
    """

    workers: int = 1
    worst_stall_ms: float = 0.0
    busy: float = 0.0
    cpu_seconds: float = 0.0
    opened: int = 0
    stopped: str = ""


class Server(msgspec.Struct, frozen=True):
    """What the server says of itself.

    counters      neutral name -> count during the window, empty when it has none
    acceptance_by_position   share of verify steps that accepted each draft
    restarted     a counter fell during the window
    chunk_is_step each decode step of a request is streamed as one chunk
    """

    engine: str = "endpoint"
    version: str = ""
    model: str = ""
    counters: dict[str, float] = {}
    acceptance_length: float | None = None
    acceptance_by_position: list[float] = []
    restarted: bool = False
    chunk_is_step: bool = False


class Row(msgspec.Struct, frozen=True):
    """One request. ms, tokens, tok/s; null where a value does not exist."""

    request: int
    prompt: int
    bucket: str
    status: str
    error: str
    finish_reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    ttft_ms: float | None
    ttfa_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    decode_tok_s: float | None
    end_to_end_tok_s: float | None
    worst_stall_ms: float | None
    client_lag_ms: float | None
    acceptance_length: float | None
    step_ms: float | None


class Requests(msgspec.Struct, frozen=True):
    """scheduled = ok + failed + unsent. interrupted ones count in no figure."""

    scheduled: int
    ok: int
    failed: int
    unsent: int
    interrupted: int
    errors: dict[str, int]


class Measurement(msgspec.Struct, frozen=True):
    """One window on one launch.

    slo            limits of each request, or ""
    load, loop     load point; "open" (latency from scheduled) or "closed" (latency from sent)
    seconds        length of the window: ramp and drain lie outside
    figures        single figures by name; distributions: one value a request or token, by name
    token_sources  source of the token counts -> share of requests
    gates          all checks; a void one means that no figure of the window may be used
    """

    load: str
    slo: str
    loop: str
    seconds: float
    requests: Requests
    figures: dict[str, Estimate]
    distributions: dict[str, Distribution]
    token_sources: dict[str, float]
    gates: list[Gate]
    client: Client
    server: Server
    rows: list[Row]

    @property
    def void(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.verdict is Verdict.VOID]

    @property
    def flags(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.verdict is Verdict.FLAG]


class Bench(msgspec.Struct, frozen=True):
    """What `servetune bench --json` writes: one window a load point, in the order they ran.

    began       wall clock, ISO 8601, a label only
    valid       no window is void and no request failed
    """

    schema: str
    servetune: str
    began: str
    endpoint: str
    model: str
    traffic: str
    ask: dict[str, str]
    valid: bool
    windows: list[Measurement]
