"""The real path for the pitfalls: scripted server process → bench → events → measurement."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from servetune.clock import MS, now
from servetune.drive import Limits, Progress, Sent, Stage, StageReport, Wire, request_bytes
from servetune.drive.collect import collect
from servetune.drive.driver import Driver
from servetune.drive.spool import Spool
from servetune.engines import Ask, Dialect, body
from servetune.events import Events, Phase
from servetune.measure import Bench, Client, Gate, Measurement, Row, Server, derive, measure
from servetune.sim import Log, Reply, Script, ServerProcess, Stream, serve_process, uniform
from servetune.spec import Load, Target
from servetune.study import BenchSpec, Preflight, bench
from servetune.traffic import Prompt

PRELUDE = 3
"""Generation requests that a bench sends before its first window: one probe, two on one connection."""

_QUICK = uniform(2, 0, 1)


def near(truth: float) -> Any:
    """Equal to a scripted time (ms) within 1 % or 0.3 ms: for several requests, since one may be late."""
    return pytest.approx(truth, rel=0.01, abs=0.3)


class Silent:
    """A listener that says nothing and keeps what it was told."""

    def __init__(self) -> None:
        self.found: Preflight | None = None
        self.stages: list[tuple[str, Phase]] = []
        self.last = Progress()
        self.windows: list[Measurement] = []

    def ready(self, found: Preflight) -> None:
        self.found = found

    def stage(self, load: Load, phase: Phase, planned: int | None, seconds: float | None) -> None:
        self.stages.append((str(load), phase))

    def progress(self, progress: Progress) -> None:
        self.last = replace(progress)

    def measured(self, measurement: Measurement) -> None:
        self.windows.append(measurement)


@dataclass(frozen=True)
class Run:
    """What one bench gave. `events` are those of the first load point, in the order scheduled."""

    bench: Bench
    all_events: list[Events]
    log: Log
    listener: Silent

    @property
    def window(self) -> Measurement:
        return self.bench.windows[0]

    @property
    def events(self) -> Events:
        return self.all_events[0]

    @property
    def rows(self) -> list[Row]:
        return self.window.rows

    def gate(self, name: str) -> Gate:
        return gate(self.window, name)

    def median(self, name: str) -> float:
        """Median of a column of `Row` over the requests of the first window."""
        values = [getattr(row, name) for row in self.rows]
        assert None not in values, f"{name}: {values}"
        return float(np.median(values))


def gate(window: Measurement, name: str) -> Gate:
    (found,) = [gate for gate in window.gates if gate.name == name]
    return found


def before_others(pid: int) -> None:
    """Where allowed, let the server run before what else is busy here: it is the truth of the tests."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, -10)


def prompts_of(count: int, words: int = 8) -> list[Prompt]:
    """Chat prompts that differ from the first word on."""
    texts = (" ".join(f"w{i}x{j}" for j in range(words)) for i in range(count))
    return [Prompt(messages=({"role": "user", "content": text},)) for text in texts]


def scripted(
    *replies: Stream | Reply, requests: int | None = None, warm_up: int = 0, **options: Any
) -> Script:
    """A script whose measured requests get `replies` in turn (each `requests / len` times).

    Quick plain replies come first, for what a bench sends before its window, so that the n-th measured
    request gets the n-th reply. Request numbers of `die_at_request` count those too.
    """
    count = len(replies) if requests is None else requests
    measured = itertools.islice(itertools.cycle(replies), count)
    options.setdefault("repeat", False)
    return Script((_QUICK,) * (PRELUDE + warm_up) + tuple(measured), **options)


def run_script(
    script: Script,
    load: str | list[str] = "serial",
    *,
    prompts: list[Prompt] | int = 1,
    requests: int | None = None,
    warm_up: int | None = 0,
    out: Path | None = None,
    during: Callable[[ServerProcess], None] | None = None,
    server: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Serve `script` in a process of its own and bench it; the events are read back from the files.

    `options` are fields of BenchSpec; `server` are arguments of `serve_process`. `during` is called with
    the server before the bench starts.
    """
    loads = [Load.parse(text) for text in ([load] if isinstance(load, str) else load)]
    listener = Silent()
    with tempfile.TemporaryDirectory(prefix="servetune-test-") as made:
        folder = out or Path(made) / "out"
        with serve_process(script, **(server or {})) as running:
            before_others(running.pid)
            if during is not None:
                during(running)
            spec = BenchSpec(
                target=Target.parse(running.url),
                prompts=prompts_of(prompts) if isinstance(prompts, int) else prompts,
                loads=loads,
                traffic="test",
                requests=requests,
                warm_up=warm_up,
                out=folder,
                **options,
            )
            result = bench(spec, listener)
        events = [Events.read(path) for path in _event_files(folder, result)]
        stored = msgspec.json.decode((folder / "bench.json").read_bytes(), type=Bench)
        assert stored == result
    return Run(result, events, running.log(), listener)


def _event_files(folder: Path, result: Bench) -> list[Path]:
    names = [window.load.replace("=", "-").replace(",", "_") for window in result.windows]
    return [folder / f"events-{name}.parquet" for name in names]


def run_replies(
    *replies: Stream | Reply,
    times: int = 5,
    load: str = "serial",
    script: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Bench `times` rounds of the replies: the short form for most cases."""
    requests = times * len(replies)
    made = scripted(*replies, requests=requests, **(script or {}))
    options.setdefault("prompts", requests)
    return run_script(made, load, requests=requests, **options)


class Part:
    """The requests of one case out of a bench, measured as a serial window of their own."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.window = measure(events, Load(slots=1), Client(), Server())
        self.rows = self.window.rows

    def median(self, name: str) -> float:
        """Median of a column of `Row`."""
        values = [getattr(row, name) for row in self.rows]
        assert None not in values, f"{name}: {values}"
        return float(np.median(values))

    def soonest(self, name: str) -> float:
        """Least of a latency of `Row`: a busy machine makes arrivals late, and nothing makes them early."""
        values = [getattr(row, name) for row in self.rows]
        assert None not in values, f"{name}: {values}"
        return float(min(values))

    def gaps_by(self, groups: int) -> bool:
        """Whether ITL has one sample for each gap between `groups` groups that each request should have.

        A client that was late itself finds two groups in one read: fewer samples then, never more.
        """
        derived = derive(self.events, open_loop=False)
        samples = self.window.distributions["itl"].n
        return int(derived.n_groups.max()) == groups and samples == int((derived.n_groups - 1).sum())

    def all_equal(self, name: str) -> Any:
        """The one value that a column of `Row` has in all requests."""
        values = {getattr(row, name) for row in self.rows}
        assert len(values) == 1, f"{name}: {values}"
        return values.pop()

    def gate(self, name: str) -> Gate:
        return gate(self.window, name)

    def chunks(self, row: int) -> tuple[list[float], list[int]]:
        """Arrivals (ms after the request was sent) and tokens of the chunks of one request."""
        span = slice(self.events.chunk_start[row], self.events.chunk_start[row + 1])
        times = (self.events.chunk_time[span] - self.events.sent[row]) / MS
        return times.tolist(), self.events.chunk_tokens[span].tolist()


class Cases:
    """Replies of many cases, sent in one bench with some streams at a time, to save starting processes.

    Which reply a request got is read from the server's log, so that it is certain.
    """

    def __init__(self, slots: int = 6, **options: Any) -> None:
        """`options` as for `run_script`."""
        self._slots = slots
        self._options = options
        self._replies: list[tuple[Stream | Reply, int]] = []

    def add(self, reply: Stream | Reply, times: int = 5) -> int:
        """A case that is sent so many times; its number for `part`."""
        self._replies.append((reply, times))
        return len(self._replies) - 1

    def part(self, *cases: int) -> Part:
        """All requests of the cases, in the order scheduled."""
        events, case_of = self._run
        mask = np.array([case_of[int(request)] in cases for request in events.request])
        return Part(events.take(mask))

    @cached_property
    def _run(self) -> tuple[Events, dict[int, int]]:
        rounds = max(times for _, times in self._replies)
        order = [case for n in range(rounds) for case, (_, times) in enumerate(self._replies) if n < times]
        script = scripted(*(self._replies[case][0] for case in order))
        load = f"concurrency={self._slots}"
        server = {"keep_bodies": True}
        count = len(order)
        run = run_script(script, load, prompts=count, requests=count, server=server, **self._options)
        case_of = {}
        for case, record in zip(order, run.log.records[PRELUDE:], strict=True):
            match = re.search(r'"w(\d+)x0 ', record.body or "")
            assert match, record.body
            case_of[int(match[1])] = case
        return run.events, case_of


def drive(
    script: Script, folder: Path, requests: int = 5, tick: Callable[[Progress], None] = lambda _: None
) -> tuple[StageReport, Callable[[], Events], Log]:
    """Send `requests` chat requests one after the other from this very process; `tick` gets the progress.

    Gives the driver's report, a function that reads the stored answers into events, and the server's log.
    """
    path = folder / "stage.raw"
    dialect, ask = Dialect("endpoint"), Ask(model=script.model)
    with serve_process(script) as server:
        before_others(server.pid)
        target = Target.parse(server.url)
        payloads = [request_bytes(target, "POST", *body(p, ask, dialect)) for p in prompts_of(requests)]
        stage = Stage(Phase.MEASURED, payloads, slots=1, requests=requests, limits=Limits(20.0, 10.0))

        async def run() -> StageReport:
            spool = Spool(path)
            driver = Driver(Wire(target), spool.add, itertools.count().__next__, tick=tick)
            await driver.open_pool(1)
            try:
                return await driver.run(stage, now() + 20 * MS)
            finally:
                driver.close()
                spool.close()

        report = uvloop.run(run())
    sent = [Sent()] * requests
    return report, lambda: collect(path, sent, phase=Phase.MEASURED, target=target), server.log()
