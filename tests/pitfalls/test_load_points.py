"""Pitfalls of exact load and exact requests: P-33 to P-35, P-42, P-56, P-62, P-64, P-66, P-71."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import PRELUDE, Silent, gate, run_script, scripted

from raw_server import EVENTS, Asked, Step, serving_raw, whole
from servetune.clock import SECOND
from servetune.measure import Verdict, attainment, derive
from servetune.measure.window import window_of
from servetune.sim import Record, Script, ServerProcess, error_reply, serve_process, uniform
from servetune.spec import Load, Slo, Target
from servetune.study import BenchSpec, bench
from servetune.traffic import Prompt, offsets

COMMAND = [sys.executable, "-c", "from servetune.cli import main; main()"]


def mean_in_flight(records: list[Record], start: int, end: int) -> float:
    """Time-weighted mean of the requests that the server had between two times (ns)."""
    spans = [(r.received_ns, r.ended_ns if r.ended_ns is not None else end) for r in records]
    return sum(max(0, min(b, end) - max(a, start)) for a, b in spans) / (end - start)


def exact_concurrency(slots: int, workers: int, mean_ms: float) -> None:
    # Streams of different lengths, so that they do not all end at the same moment.
    lengths = [mean_ms * (0.6 + 0.8 * (7 * n % 11) / 10) for n in range(11)]
    replies = [uniform(3, length / 2, length / 4) for length in lengths]
    load = "serial" if slots == 1 else f"concurrency={slots}"
    count = max(20, 4 * slots)
    run = run_script(scripted(*replies, requests=count), load, requests=count, prompts=7, workers=workers)
    assert run.window.requests.ok == count
    records = run.log.records[PRELUDE:]
    assert max(record.in_flight for record in records) == slots
    window = window_of(run.events, slots=slots)
    # The server has a request a little later than the client: over a second that does not matter.
    assert mean_in_flight(records, window.start, window.end) >= 0.98 * slots
    if slots > 1:
        value = run.window.figures["in_flight"].value
        assert value is not None
        assert 0.99 * slots <= value <= slots
        assert gate(run.window, "in flight").verdict is Verdict.PASS


@pytest.mark.parametrize(("slots", "workers"), [(1, 1), (2, 1), (7, 2), (64, 1)])
def test_p62_just_so_many_requests_are_in_flight(slots: int, workers: int) -> None:
    exact_concurrency(slots, workers, 120.0 if slots < 64 else 300.0)


def test_p62_just_256_requests_are_in_flight() -> None:
    exact_concurrency(256, 1, 1000.0)


@pytest.mark.slow
def test_p62_just_1000_requests_are_in_flight() -> None:
    exact_concurrency(1000, 2, 4000.0)


def limited(files: int) -> Any:
    """To run in a child before its program starts: so many open files and no more."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = ({"prompt": f"{n} words to begin with"} for n in range(40))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_p64_too_few_files_are_named_before_the_run(traffic: Path) -> None:
    arguments = ["bench", "--endpoint", "http://127.0.0.1:9", "--traffic", str(traffic)]
    done = command(*arguments, "--load", "concurrency=500", preexec_fn=limited(256))
    assert done.returncode == 2
    for word in ("nofile", "256", "500", "ulimit -n"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_p64_running_out_of_files_is_the_clients_fault(traffic: Path, tmp_path: Path) -> None:
    with serve_process(scripted(uniform(2, 2500, 5), requests=200)) as server:
        arguments = [
            "bench",
            "--endpoint",
            server.url,
            "--traffic",
            str(traffic),
            "--json",
            "-",
            "--warm-up",
            "0",
        ]
        load = ["--load", "rate=150,arrivals=constant", "--requests", "150"]
        done = command(*arguments, *load, preexec_fn=limited(90))
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    (window,) = json.loads(done.stdout)["windows"]
    assert window["requests"]["errors"].get("client fault", 0) > 20
    (found,) = [gate for gate in window["gates"] if gate["name"] == "client resources"]
    assert found["verdict"] == "void"
    assert "open files" in found["evidence"]


def test_p66_failed_requests_show_in_the_exit_code(traffic: Path) -> None:
    with serve_process(scripted(uniform(3, 2, 2), error_reply(503, "busy"), requests=20)) as server:
        arguments = ["bench", "--endpoint", server.url, "--traffic", str(traffic), "--warm-up", "0"]
        done = command(*arguments, "--requests", "20")
        assert server.log().requests == PRELUDE + 20
    assert done.returncode == 1
    assert "void" in done.stdout.lower()
    assert "503" in done.stdout or "http status" in done.stdout


WRONG = [
    ["--load", "concurency=4"],
    ["--load", "concurrency=0"],
    ["--load", "rate=-1"],
    ["--loud", "serial"],
    ["--requests", "0"],
    ["--requests", "many"],
    ["--seconds", "-1"],
    ["--seconds", "nan"],
    ["--timeout", "soon"],
    ["--output-tokens", "0"],
    ["--extra-body", "{"],
    ["--traffic", "/no/such/file.jsonl"],
    ["--proxy", "socks5://127.0.0.1:1"],
    ["--ca-file", "/no/such/ca.pem"],
    ["--json", "/no/such/folder/result.json"],
    ["--out", "/proc/nothing"],
]


@pytest.fixture(scope="module")
def watched() -> Iterator[ServerProcess]:
    """A server that nobody should ever have talked to; looks when all is done."""
    with serve_process(Script((uniform(1, 1, 1),))) as server:
        yield server
    log = server.log()
    assert log.connections == 0
    assert log.pages == {}


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_p71_a_wrong_wish_is_refused_at_once(wrong: list[str], watched: ServerProcess, traffic: Path) -> None:
    arguments = [] if "--traffic" in wrong else ["--traffic", str(traffic)]
    process = subprocess.Popen(
        [*COMMAND, "bench", "--endpoint", watched.url, *arguments, *wrong],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said, output = process.stderr.read(), process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    assert process.returncode == 2, said
    assert output == ""
    assert said.startswith("servetune: ")
    assert "Traceback" not in said
    assert used.ru_utime + used.ru_stime < 1.0


def test_p33_a_shortened_prompt_voids_the_window() -> None:
    prompts = [Prompt(ids=tuple(range(n, n + 1000))) for n in range(4)]
    shortened = uniform(4, 2, 2, prompt_tokens=582)
    run = run_script(scripted(shortened, requests=4), requests=4, prompts=prompts)
    assert gate(run.window, "input length").verdict is Verdict.VOID
    assert "sent 1000, counted 582" in gate(run.window, "input length").evidence
    nearly = uniform(4, 2, 2, prompt_tokens=991)
    run = run_script(scripted(nearly, requests=4), requests=4, prompts=prompts)
    assert gate(run.window, "input length").verdict is Verdict.PASS


def test_p34_one_token_asked_is_one_token_sent() -> None:
    prompts = [Prompt(ids=(n,)) for n in range(5, 9)]
    one = uniform(1, 2, 2, prompt_tokens=1)
    run = run_script(scripted(one, requests=4), requests=4, prompts=prompts, server={"keep_bodies": True})
    bodies = [json.loads(record.body or "") for record in run.log.records[PRELUDE:]]
    assert [body["prompt"] for body in bodies] == [[5], [6], [7], [8]]
    assert {record.path for record in run.log.records} == {"/v1/completions"}
    assert gate(run.window, "input length").verdict is Verdict.PASS


def test_p34_refused_requests_stand_in_the_headline() -> None:
    replies = [uniform(2, 2, 2)] * 4 + [error_reply(400, "prompt is empty")]
    run = run_script(scripted(*replies, requests=20), requests=20, prompts=20)
    assert run.window.figures["success_rate"].value == 0.8
    assert run.window.requests.errors == {"http status": 4}
    assert {row.error for row in run.rows} == {"", "http status: 400 prompt is empty"}
    assert gate(run.window, "failures").verdict is Verdict.VOID


def test_p35_shorter_answers_than_asked_void_the_window_and_miss_the_slo() -> None:
    ask = {"output_tokens": 512, "exact": True}
    run = run_script(scripted(uniform(43, 2, 1), requests=4), requests=4, prompts=4, ask=ask)
    found = gate(run.window, "output length")
    assert found.verdict is Verdict.VOID
    assert "172 of 2048 tokens" in found.evidence
    assert not attainment(derive(run.events, open_loop=False), Slo(e2e=1e9)).any()


def test_p42_arrivals_keep_their_variance() -> None:
    load = Load.parse("rate=10")
    due = offsets(load, requests=10_000, seconds=None, seed=3)
    counts = np.bincount(due // SECOND)[:-1]
    assert 0.85 < counts.var() / counts.mean() < 1.15
    assert abs(counts.mean() - 10) < 0.35
    assert due[-1] != 1000 * SECOND
    totals = {int(offsets(load, requests=10_000, seconds=None, seed=seed)[-1]) for seed in range(20)}
    assert len(totals) == 20
    # the sum of 10,000 exponential gaps has a deviation of 1 %: not all at 1,000 s
    assert 3 < np.std([total / SECOND for total in totals]) < 25
    assert (offsets(load, requests=10_000, seconds=None, seed=3) == due).all()


def falling(metric: str) -> tuple[Any, list[int]]:
    """A /metrics page that counts up, and restarts from nothing with its third reading."""
    reads: list[int] = []

    def page(asked: Asked) -> bytes | None:
        if asked.path != "/metrics":
            return None
        reads.append(len(reads))
        value = 1000 + len(reads) if len(reads) < 3 else len(reads)
        return f'# TYPE {metric} counter\n{metric}{{engine="0"}} {value}.0\n'.encode()

    return page, reads


@pytest.mark.parametrize("load", ["serial", "concurrency=2"])
def test_p56_a_counter_that_falls_voids_the_window(load: str) -> None:
    def answer(_: Asked) -> Iterable[Step]:
        return (whole(EVENTS),)

    page, reads = falling("vllm:generation_tokens_total")
    with serving_raw(answer, page) as server:
        spec = BenchSpec(
            target=Target.parse(server.url),
            prompts=[Prompt(text=f"{n} bottles") for n in range(4)],
            loads=[Load.parse(load)],
            traffic="test",
            requests=6,
            warm_up=0,
        )
        result = bench(spec, Silent())
    assert len(reads) >= 3
    (window,) = result.windows
    assert window.requests.ok == 6
    assert gate(window, "server restarted").verdict is Verdict.VOID
    assert window.server.restarted
    assert window.server.counters == {}
    assert all(figure.value is None or figure.value >= 0 for figure in window.figures.values())
