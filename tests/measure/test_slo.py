"""Promises: what they limit, and who keeps them."""

from __future__ import annotations

import pytest

from servetune.clock import MS
from servetune.events import EventsBuilder, Phase, Status
from servetune.measure import Client, Server, measure
from servetune.spec import Load, Slo, SpecError


def test_limits_are_read_with_their_units() -> None:
    assert Slo.parse("ttft=500ms, tpot=0.03s") == Slo(ttft=500, tpot=30)
    assert str(Slo.parse("e2e=2s,ttft=1.5s")) == "ttft=1500ms,e2e=2000ms"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "tftt=5ms", "ttft=5ms,ttft=6ms", "ttft=-5ms"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Slo.parse(text)


def test_goodput_counts_requests_that_met_every_limit() -> None:
    """10 requests, one a 100 ms, each 100 ms long; one is late, one slow, one failed: 7 of 10 met."""
    builder = EventsBuilder()
    for i in range(10):
        start = i * 100 * MS
        first = start + (60 if i == 2 else 20) * MS
        step = (20 if i == 5 else 5) * MS
        builder.add(
            times=[first, first + step],
            tokens=[1, 1],
            kinds=[1, 1],
            request=i,
            prompt=i,
            scheduled=start,
            sent=start,
            connect=0,
            done=start + 100 * MS,
            completion_tokens=2,
            exact_tokens=0,
            status=Status.FAILED if i == 7 else Status.OK,
            error="timeout: x" if i == 7 else "",
            phase=Phase.MEASURED,
            token_source="ids",
            chunk_source="ids",
        )
    events = builder.build()
    window = measure(events, Load(slots=1), Client(), Server(), Slo(ttft=50, tpot=10))
    assert window.figures["slo_attainment"].value == pytest.approx(0.7)
    assert window.figures["goodput"].value == pytest.approx(7 / 1.0)
