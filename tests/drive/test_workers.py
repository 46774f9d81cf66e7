"""Several client processes: one event log, exact totals; and how they end when something is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from pitfalls.running import PRELUDE, prompts_of, run_script, scripted
from servetune.clock import MS, now
from servetune.drive import (
    Driven,
    Limits,
    Sent,
    Session,
    Stage,
    StageReport,
    Wire,
    WorkerError,
    request_bytes,
)
from servetune.drive.connection import Exchange
from servetune.drive.driver import Driver
from servetune.engines import Ask, Dialect, body
from servetune.events import Events, Phase
from servetune.sim import Script, ServerProcess, serve_process, uniform
from servetune.spec import Target

COMMAND = [sys.executable, "-c", "from servetune.cli import main; main()"]
STREAM = uniform(6, 20, 10)


def stage_of(target: Target, *, slots: int = 4, requests: int = 20, prompts: int = 5) -> Stage:
    dialect, ask = Dialect("endpoint"), Ask(model="scripted")
    payloads = [request_bytes(target, "POST", *body(p, ask, dialect)) for p in prompts_of(prompts)]
    return Stage(Phase.MEASURED, payloads, slots=slots, requests=requests, limits=Limits(20.0, 10.0))


@pytest.mark.parametrize(
    ("load", "workers"), [("concurrency=7", 2), ("concurrency=5", 3), ("concurrency=2", 3)]
)
def test_one_log_and_an_exact_total(load: str, workers: int) -> None:
    slots = int(load.split("=")[1])
    run = run_script(scripted(STREAM, requests=60), load, requests=60, prompts=11, workers=workers)
    events = run.events
    assert sorted(events.request) == list(range(60))
    assert (np.diff(events.scheduled) >= 0).all()
    assert events.prompt.tolist() == [number % 11 for number in events.request]
    assert run.window.requests.ok == 60
    assert run.log.requests == PRELUDE + 60
    assert max(record.in_flight for record in run.log.records[PRELUDE:]) == slots
    assert run.window.client.workers == workers
    assert run.listener.last.done == run.listener.last.sent == 60


def test_an_open_loop_is_dealt_out_in_turn() -> None:
    load = "rate=200,arrivals=constant"
    run = run_script(scripted(STREAM, requests=50), load, requests=50, prompts=50, workers=3)
    assert run.events.request.tolist() == list(range(50))
    steps = np.diff(run.events.scheduled)
    assert (abs(steps - 5 * MS) <= 2).all()  # one schedule, of one clock
    assert run.window.requests.ok == 50


def test_stages_follow_each_other_on_the_same_workers(tmp_path: Path) -> None:
    with serve_process(Script((STREAM,))) as server:
        target = Target.parse(server.url)
        stages = [stage_of(target, requests=8), stage_of(target, slots=2, requests=6)]
        with Session(target, stages, [[Sent()] * 5] * 2, workers=2, folder=tmp_path) as session:
            first, second = session.run(0), session.run(1)
            assert session.progress().done == 6
        assert server.log().requests == 14
    assert [len(first.events), len(second.events)] == [8, 6]
    assert len(first.reports) == 2
    assert list(tmp_path.glob("stage1-worker0*"))  # a folder that was given is kept


def workers_now() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_killed_worker_is_an_error_and_leaves_nothing(temporary: Path) -> None:
    before = workers_now()
    mine: set[int] = set()

    def kill_one(progress: object) -> None:
        if not mine and getattr(progress, "done", 0) >= 2:
            mine.update(workers_now() - before)
            os.kill(min(mine), signal.SIGKILL)

    with serve_process(Script((STREAM,))) as server:
        target = Target.parse(server.url)
        stage = stage_of(target, requests=2000)
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="ended with exit code -9"):  # noqa: SIM117
            with Session(target, [stage], [[Sent()] * 5], workers=2) as session:
                session.run(0, kill_one)
        assert time.monotonic() - begun < 15
        until(lambda: server.log().in_flight == 0)
    assert len(mine) == 2
    assert not any(alive(pid) for pid in mine)
    assert list(temporary.glob("servetune-*")) == []


def test_leaving_a_session_early_ends_its_workers(temporary: Path) -> None:
    before = workers_now()
    target = Target.parse("http://127.0.0.1:9")
    with Session(target, [stage_of(target)], [[Sent()] * 5], workers=2):
        mine = workers_now() - before
    assert len(mine) == 2
    until(lambda: not any(alive(pid) for pid in mine))
    assert list(temporary.glob("servetune-*")) == []


def test_a_worker_that_cannot_start_says_why() -> None:
    target = Target.parse("https://127.0.0.1:9", ca_file="/no/such/file.pem")
    with pytest.raises(WorkerError, match="No such file"):  # noqa: SIM117
        with Session(target, [stage_of(target)], [[Sent()] * 5]) as session:
            session.run(0)


def test_stop_keeps_what_was_measured() -> None:
    with serve_process(Script((STREAM,))) as server:
        target = Target.parse(server.url)
        stage = stage_of(target, requests=2000)
        with Session(target, [stage], [[Sent()] * 5], workers=2) as session:
            driven: Driven = session.run(0, lambda p: session.stop("interrupted") if p.done >= 10 else None)
    assert {report.stopped for report in driven.reports} == {"interrupted"}
    errors = list(zip(driven.events.phase, driven.events.error, strict=True))
    ended = [error for phase, error in errors if phase == "measured"]
    assert len(ended) >= 10
    assert set(ended) == {""}
    cut = [error for phase, error in errors if phase == "drain"]
    assert all(error.startswith("interrupted") for error in cut)
    assert len(cut) <= 4


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that nothing else uses."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@contextlib.contextmanager
def command(server: ServerProcess, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`servetune bench` in a process group of its own, with more requests than it will ever send."""
    traffic = folder / "prompts.jsonl"
    traffic.write_text("".join(json.dumps({"prompt": f"{n} little words"}) + "\n" for n in range(50)))
    arguments = ["bench", "--endpoint", server.url, "--traffic", str(traffic), "--out", str(folder / "out")]
    arguments += ["--requests", "5000", "--workers", "2", *more]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def children(pid: int) -> set[int]:
    """Children of a process, and their children."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found |= {int(path.parent.name)} | children(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_keeps_what_was_measured(
    number: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    with (
        serve_process(Script((STREAM,))) as server,
        command(server, tmp_path, "--load", "concurrency=4") as process,
    ):
        until(lambda: server.log().requests > 40, 30)
        left = children(process.pid)
        os.killpg(process.pid, number)
        output, said = process.communicate(timeout=20)
    assert process.returncode in (0, 1), said
    assert "Traceback" not in said
    assert "concurrency=4" in output
    (window,) = json.loads((tmp_path / "out" / "bench.json").read_bytes())["windows"]
    counts = window["requests"]
    assert counts["ok"] >= 20
    assert counts["failed"] == counts["unsent"] == 0
    assert counts["interrupted"] <= 4
    assert window["client"]["stopped"] == "interrupted"
    events = Events.read(tmp_path / "out" / "events-concurrency-4.parquet")
    assert events.phase.count("measured") == counts["ok"]
    assert list(temporary.glob("servetune-*")) == []
    until(lambda: not any(alive(pid) for pid in left))


def test_ctrl_c_keeps_the_load_points_before(tmp_path: Path, temporary: Path) -> None:
    loads = ["--load", "concurrency=2", "--load", "serial", "--seconds", "0.5"]
    with serve_process(Script((STREAM,))) as server, command(server, tmp_path, *loads) as process:
        until((tmp_path / "out" / "bench.json").exists, 30)
        requests = server.log().requests
        until(lambda: server.log().requests > requests)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode in (0, 1), said
    windows = json.loads((tmp_path / "out" / "bench.json").read_bytes())["windows"]
    assert windows[0]["load"] == "concurrency=2"
    assert windows[0]["client"]["stopped"] == ""
    assert list(temporary.glob("servetune-*")) == []


def test_ctrl_c_before_anything_was_measured(tmp_path: Path, temporary: Path) -> None:
    slow = Script((uniform(2, 60_000, 1),))
    with serve_process(slow) as server, command(server, tmp_path) as process:
        until(lambda: server.log().requests > 0, 30)
        os.killpg(process.pid, signal.SIGINT)
        output, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert output == ""
    assert said == "servetune: interrupted before anything was measured\n"
    assert list(temporary.glob("servetune-*")) == []


def test_workers_end_when_their_parent_is_killed(tmp_path: Path, temporary: Path) -> None:
    with (
        serve_process(Script((STREAM,))) as server,
        command(server, tmp_path, "--load", "concurrency=4") as process,
    ):
        until(lambda: server.log().requests > 40, 30)
        left = children(process.pid)
        assert len(left) >= 2
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in left), 5)
        until(lambda: server.log().in_flight == 0, 5)


def test_nothing_is_left_after_a_normal_end(tmp_path: Path, temporary: Path) -> None:
    with (
        serve_process(Script((STREAM,))) as server,
        command(server, tmp_path, "--load", "concurrency=4", "--seconds", "0.3") as process,
    ):
        output, said = process.communicate(timeout=30)
    assert process.returncode in (0, 1), said
    assert "Traceback" not in said
    assert output
    assert list(temporary.glob("servetune-*")) == []
    assert (tmp_path / "out" / "bench.json").exists()
    assert not (tmp_path / "out" / "bench.json.part").exists()


@pytest.mark.parametrize(("requests", "slots", "workers"), [(1, 4, 2), (2, 7, 3), (1, 2, 1)])
def test_a_worker_that_gets_no_request_ends_too(requests: int, slots: int, workers: int) -> None:
    load = f"concurrency={slots}"
    run = run_script(scripted(STREAM), load, requests=requests, prompts=3, workers=workers)
    assert run.window.requests.ok == requests
    assert run.log.requests == PRELUDE + requests


def test_a_stage_that_is_stopped_before_its_first_request_ends() -> None:
    target = Target.parse("http://127.0.0.1:9")
    sent: list[Exchange] = []

    async def main() -> StageReport:
        driver = Driver(Wire(target), sent.append, itertools.count().__next__)
        running = asyncio.create_task(driver.run(stage_of(target), now() + 50 * MS))
        await asyncio.sleep(0)
        driver.stop("interrupted")
        return await asyncio.wait_for(running, 10)

    assert uvloop.run(main()).stopped == "interrupted"
    assert sent == []
