"""Pitfalls P-59 to P-72 of the load generator, each on the real path; P-62 and P-64 are in other files."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import uvloop
from running import PRELUDE, Run, gate, prompts_of, run_script, scripted

from servetune.clock import MS, now
from servetune.drive import Limits, Sent, Stage, StageReport, Wire, request_bytes
from servetune.drive.collect import collect
from servetune.drive.driver import Driver
from servetune.drive.spool import Spool
from servetune.engines import Ask, Dialect, body
from servetune.events import Events, EventsBuilder, Phase
from servetune.measure import Client, Measurement, Server, Verdict, attainment, derive, measure
from servetune.sim import Script, error_reply, serve_process, uniform
from servetune.spec import Load, Slo, Target

OF_THE_CLIENT = {"client lag", "client stall", "client load", "in flight", "rate kept"}
"""Gates that a loaded test machine can fail; what they say is tested by itself."""

FLAT_OUT = "rate=1000000,arrivals=constant"
"""All requests due at once."""

STANDARD = ("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "temperature", "seed")


def faults(window: Measurement) -> list[str]:
    return [gate.name for gate in window.void if gate.name not in OF_THE_CLIENT]


def adds_up(run: Run, scheduled: int) -> None:
    """Nothing that was scheduled is lost, and the server saw what the events call sent."""
    counts = run.window.requests
    assert counts.scheduled == len(run.events) == scheduled
    assert counts.ok + counts.failed + counts.unsent == scheduled
    assert counts.interrupted == 0
    assert sorted(run.events.request) == list(range(scheduled))


def test_p59_latency_starts_when_the_request_was_due() -> None:
    run = run_script(Script((uniform(1, 100, 0),), slots=1), FLAT_OUT, requests=10, prompts=10, workers=1)
    latencies = sorted(row.e2e_ms for row in run.rows if row.e2e_ms is not None)
    assert len(latencies) == 10
    for place, latency in enumerate(latencies, 1):
        assert 100 * place - 2 < latency < 100 * place + 90
    service = sorted((run.events.done - run.events.sent) / MS)
    assert service[-1] > 900  # all left at once: none waited for a slot of the client's
    assert run.window.loop == "open"


def blocked_for(seconds: float, folder: Path) -> tuple[StageReport, Measurement]:
    """Drive two streams in this process while something blocks its event loop."""
    target_of = Ask(model="scripted")
    with serve_process(Script((uniform(20, 10, 10),))) as server:
        target = Target.parse(server.url)
        dialect = Dialect("endpoint")
        payloads = [request_bytes(target, "POST", *body(p, target_of, dialect)) for p in prompts_of(6)]
        stage = Stage(Phase.MEASURED, payloads, slots=2, requests=6, limits=Limits(20.0, 10.0))

        async def block() -> None:
            await asyncio.sleep(0.15)
            time.sleep(seconds)  # noqa: ASYNC251

        async def run() -> StageReport:
            spool = Spool(folder / "stage.raw")
            driver = Driver(Wire(target), spool.add, itertools.count().__next__)
            await driver.open_pool(2)
            blocking = asyncio.create_task(block())
            try:
                return await driver.run(stage, now() + 20 * MS)
            finally:
                await blocking
                driver.close()
                spool.close()

        report = uvloop.run(run())
    events = collect(folder / "stage.raw", [Sent()] * 6, phase=Phase.MEASURED, target=target)
    client = Client(worst_stall_ms=report.watch.worst_stall / MS)
    return report, measure(events, Load(slots=2), client, Server(engine="endpoint"))


def test_p60_a_blocked_client_voids_the_window(tmp_path: Path) -> None:
    report, window = blocked_for(0.2, tmp_path)
    assert report.watch.worst_stall >= 185 * MS
    assert gate(window, "client stall").verdict is Verdict.VOID
    assert window.requests.ok == 6


def test_p65_a_stall_of_50_ms_is_recorded_and_the_gate_stands_at_25(tmp_path: Path) -> None:
    report, window = blocked_for(0.05, tmp_path)
    assert any(late >= 38 * MS for _, late in report.watch.stalls)
    assert gate(window, "client stall").verdict is Verdict.VOID
    for stall, verdict in ((24.9, Verdict.PASS), (25.1, Verdict.VOID)):
        events = EventsBuilder().build()
        small = measure(events, Load(slots=1), Client(worst_stall_ms=stall), Server())
        assert gate(small, "client stall").verdict is verdict


def test_p61_overload_counts_every_scheduled_request() -> None:
    script = Script((uniform(1, 100, 0),), slots=1)
    run = run_script(script, "rate=100,arrivals=constant", requests=40, prompts=40, limits=Limits(1.0, 30.0))
    adds_up(run, 40)
    assert run.log.requests == PRELUDE + 40  # an open loop keeps its schedule, however the server does
    counts = run.window.requests
    assert 0 < counts.ok < 15
    assert counts.errors == {"timeout": counts.failed}
    met = attainment(derive(run.events, open_loop=True), Slo(e2e=500))
    assert met.shape == (40,)
    assert 1 <= met.sum() <= 5
    assert "failures" in faults(run.window)


def test_p61_what_a_dead_endpoint_never_got_is_a_miss() -> None:
    script = scripted(uniform(2, 5, 5), requests=60, die_at_request=PRELUDE + 11)
    run = run_script(script, "rate=50,arrivals=constant", requests=60, prompts=60)
    adds_up(run, 60)
    sent = run.events.sent >= 0
    assert run.window.requests.unsent >= 30
    assert run.window.requests.ok <= 10
    assert not any(np.array(run.events.status)[sent] == "unsent")
    assert run.window.figures["success_rate"].value == run.window.requests.ok / 60
    assert attainment(derive(run.events, open_loop=True), Slo(e2e=60_000)).sum() == run.window.requests.ok


def test_p63_streams_that_never_end_fail_and_the_window_closes() -> None:
    good = uniform(3, 5, 5)
    for_ever = uniform(3, 5, 5, stop_after=2, end="hang")
    replies = [for_ever if n in (11, 30) else good for n in range(50)]
    begun = time.monotonic()
    script = scripted(*replies)
    run = run_script(script, "concurrency=5", requests=50, prompts=50, limits=Limits(1.0, 30.0))
    assert time.monotonic() - begun < 20
    adds_up(run, 50)
    assert run.window.requests.errors == {"timeout": 2}
    assert run.window.requests.ok == 48
    assert faults(run.window) == ["failures"]


def test_p63_a_stream_that_falls_silent_is_stalled() -> None:
    replies = (uniform(3, 5, 5), uniform(3, 5, 5, stop_after=1, end="hang"))
    run = run_script(scripted(*replies), "concurrency=2", requests=2, prompts=2, limits=Limits(30.0, 0.5))
    assert run.window.requests.errors == {"stalled": 1}


def test_p66_a_refusal_is_never_sent_again() -> None:
    script = scripted(uniform(3, 2, 2), error_reply(503, "busy", retry_after_s=1), requests=40)
    run = run_script(script, "concurrency=4", requests=40, prompts=40)
    adds_up(run, 40)
    assert run.log.requests == PRELUDE + 40
    assert [record.status for record in run.log.records[PRELUDE:]].count(503) == 20
    assert run.window.requests.ok == 20
    assert run.window.requests.errors == {"http status": 20}
    assert run.window.figures["success_rate"].value == 0.5
    assert faults(run.window) == ["failures"]
    assert not run.bench.valid


def survivors(ok: int, of: int) -> Events:
    """A window of quick survivors among requests that timed out."""
    builder = EventsBuilder()
    for n in range(of):
        sent = n * 10 * MS
        alive = n * ok // of != (n + 1) * ok // of
        builder.add(
            times=[sent + 5 * MS, sent + 9 * MS] if alive else [],
            tokens=[1, 1] if alive else [],
            kinds=[1, 1] if alive else [],
            request=n,
            prompt=n,
            phase=Phase.MEASURED,
            scheduled=sent,
            sent=sent,
            completion_tokens=2 if alive else -1,
            token_source="usage",
            chunk_source="usage",
            done=sent + 9 * MS if alive else -1,
            status="ok" if alive else "failed",
            error="" if alive else "timeout: no end after 600 s",
        )
    return builder.build()


@pytest.mark.parametrize(("ok", "of"), [(516, 1000), (1648, 3000), (989, 1000)])
def test_p67_survivors_do_not_make_a_window(ok: int, of: int) -> None:
    window = measure(survivors(ok, of), Load(slots=1), Client(), Server())
    assert window.requests.ok == ok
    assert window.figures["success_rate"].value == ok / of
    assert gate(window, "failures").verdict is Verdict.VOID
    assert f"{of - ok} of {of}" in gate(window, "failures").evidence
    assert window.distributions["e2e"].n == of  # the failed ones stand at infinity


def test_p67_one_in_a_hundred_is_the_limit() -> None:
    window = measure(survivors(990, 1000), Load(slots=1), Client(), Server())
    assert gate(window, "failures").verdict is Verdict.PASS


@pytest.mark.parametrize("load", ["serial", "concurrency=8", "rate=200,arrivals=constant"])
def test_p68_a_dead_endpoint_is_left_alone(load: str) -> None:
    script = scripted(uniform(4, 5, 5), requests=500, die_at_request=PRELUDE + 50)
    run = run_script(script, load, requests=500, prompts=500)
    adds_up(run, 500)
    died = max(record.ended_ns or 0 for record in run.log.records)
    # in flight for the client is also what had left and not reached the server when it died
    in_flight = max(run.log.records[-1].in_flight, Load.parse(load).slots or 0)
    started = run.events.scheduled[np.array(run.events.status) != "unsent"]
    assert (started > died).sum() <= in_flight + 3
    assert run.window.client.stopped == "died under load"
    assert run.window.requests.unsent >= 500 - 50 - in_flight - 3
    assert {"endpoint alive", "failures"} <= set(faults(run.window))
    assert not run.bench.valid


@pytest.mark.parametrize("warm_up", [0, None, 30])
def test_p69_lower_load_points_are_kept_and_the_edge_is_reported(warm_up: int | None) -> None:
    script = Script((uniform(4, 10, 10),), die_above_in_flight=4)
    loads = ["concurrency=2", "concurrency=4", "concurrency=6", "concurrency=8"]
    run = run_script(script, loads, requests=24, prompts=24, warm_up=warm_up)
    assert [window.load for window in run.bench.windows] == loads[:3]
    low, high, edge = run.bench.windows
    assert faults(low) == faults(high) == []
    assert low.requests.ok == high.requests.ok == 24
    assert edge.client.stopped == "died under load"
    assert "endpoint alive" in faults(edge)
    assert edge.requests.ok < edge.requests.scheduled
    assert not run.bench.valid
    assert len(run.listener.windows) == 3


def test_p70_a_strict_server_refuses_nothing_in_a_window() -> None:
    script = Script((uniform(4, 2, 2),), known_fields=STANDARD, honour_max_tokens=True)
    ask = {"output_tokens": 4, "exact": True, "temperature": 0.0, "seed": 7}
    run = run_script(script, "concurrency=2", requests=12, prompts=12, warm_up=None, ask=ask)
    refused = [record.n for record in run.log.records if record.status == 400]
    assert len(refused) < 6  # of the probe, which finds out what the server takes
    assert max(refused, default=0) < run.log.requests - 12
    assert run.window.requests.ok == 12
    assert faults(run.window) == []
