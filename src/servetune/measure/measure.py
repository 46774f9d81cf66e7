"""Event columns of one window → its measurement. A pure function: same events, same figures."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from servetune.events import Events, Failure, Phase, Status
from servetune.measure.derive import Derived, derive
from servetune.measure.figures import distributions, figures
from servetune.measure.gates import gates, token_sources
from servetune.measure.measurement import Client, Measurement, Requests, Row, Server
from servetune.measure.window import window_of
from servetune.spec import Load, Slo

NO_SLO = Slo()


def measure(events: Events, load: Load, client: Client, server: Server, slo: Slo = NO_SLO) -> Measurement:
    """Measure the requests of phase `measured`."""
    interrupted = sum(error.startswith(Failure.INTERRUPTED) for error in events.error)
    events = events.take(np.array([phase == Phase.MEASURED for phase in events.phase], dtype=bool))
    derived = derive(events, open_loop=load.is_open, chunk_is_step=server.chunk_is_step)
    window = window_of(events, slots=load.slots)
    return Measurement(
        load=str(load),
        slo=str(slo),
        loop="open" if load.is_open else "closed",
        seconds=window.seconds,
        requests=_requests(events, interrupted),
        figures=figures(derived, window, slots=load.slots, slo=slo),
        distributions=distributions(derived, open_loop=load.is_open),
        token_sources=token_sources(derived),
        gates=gates(derived, window, client, server, slots=load.slots),
        client=client,
        server=server,
        rows=[_row(derived, i) for i in range(len(events))],
    )


def _requests(events: Events, interrupted: int) -> Requests:
    states = Counter(events.status)
    return Requests(
        scheduled=len(events),
        ok=states[Status.OK],
        failed=states[Status.FAILED],
        unsent=states[Status.UNSENT],
        interrupted=interrupted,
        errors=dict(Counter(error.split(":")[0] for error in events.error if error).most_common()),
    )


def _row(derived: Derived, i: int) -> Row:
    events = derived.events
    ok = events.status[i] == Status.OK
    tokens = int(events.completion_tokens[i])
    drafts, accepted = int(events.drafts[i]), int(events.accepted[i])
    steps = float(derived.steps[i])
    return Row(
        request=int(events.request[i]),
        prompt=int(events.prompt[i]),
        bucket=events.bucket[i],
        status=events.status[i],
        error=events.error[i],
        finish_reason=events.finish_reason[i],
        prompt_tokens=_count(events.prompt_tokens[i]),
        cached_tokens=_count(events.cached_tokens[i]),
        output_tokens=_count(events.completion_tokens[i]),
        reasoning_tokens=_count(events.reasoning_tokens[i]),
        ttft_ms=_number(derived.ttft[i]),
        ttfa_ms=_number(derived.ttfa[i]),
        tpot_ms=_number(derived.tpot[i]) if ok else None,
        e2e_ms=_number(derived.e2e[i]),
        decode_tok_s=_number(1000.0 / derived.tpot[i]) if ok and derived.tpot[i] > 0 else None,
        end_to_end_tok_s=_number(1000.0 * tokens / derived.service[i]) if ok else None,
        worst_stall_ms=_number(derived.worst_stall[i]),
        client_lag_ms=_number(derived.lag[i]),
        acceptance_length=1 + accepted / drafts if ok and drafts > 0 and accepted >= 0 else None,
        step_ms=float(derived.decode[i]) / steps if ok and steps > 0 and derived.decode[i] > 0 else None,
    )


def _count(value: np.int64) -> int | None:
    return int(value) if value >= 0 else None


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
