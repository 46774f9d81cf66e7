"""Every figure of a bench can be computed again from its files, and is the same to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from servetune.measure import Bench
from servetune.sim import Chunk, Script, Stream, serve_process, uniform
from servetune.spec import SpecError, Target
from servetune.spec.load import Load
from servetune.study import BenchSpec, bench, remeasure
from servetune.traffic import Prompt

LOADS = ["serial", "concurrency=3", "rate=60", "rate=50,arrivals=gamma,burstiness=0.5"]
PRELUDE = 3


class Silent:
    def ready(self, found: Any) -> None: ...
    def stage(self, load: Any, phase: Any, planned: Any, seconds: Any) -> None: ...
    def progress(self, progress: Any) -> None: ...
    def measured(self, measurement: Any) -> None: ...


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bench]:
    """All kinds of load point, on answers of all kinds: counted, guessed, reasoning, one cut short."""
    drafts = Stream(chunks=(Chunk(10), Chunk(3, 4), Chunk(3, 2), Chunk(3, 1)), ids=True)
    thoughts = Stream(chunks=(Chunk(5, kind="reasoning"), Chunk(2, kind="reasoning"), Chunk(2), Chunk(2)))
    odd = uniform(9, 4, 2, per_chunk=2)
    untold = uniform(5, 4, 2, usage="none", role_frame=True)
    cut = uniform(9, 4, 2, stop_after=4, end="close_early")
    plain = uniform(3, 1, 1)
    replies = (plain,) * PRELUDE + (drafts, thoughts, odd, untold, cut, plain, plain) * 20
    folder = tmp_path_factory.mktemp("bench") / "out"
    prompts = [Prompt(messages=({"role": "user", "content": f"number {i} of some"},)) for i in range(12)]
    script = Script(replies, metrics_vllm=True, owned_by="vllm")
    with serve_process(script) as server:
        spec = BenchSpec(
            target=Target.parse(server.url),
            prompts=prompts,
            loads=[Load.parse(text) for text in LOADS],
            traffic="test",
            requests=24,
            warm_up=2,
            out=folder,
        )
        return folder, bench(spec, Silent())


def test_remeasure_equals_the_stored_bench(measured: tuple[Path, Bench]) -> None:
    folder, result = measured
    assert [window.load for window in result.windows] == LOADS
    stored = (folder / "bench.json").read_bytes()
    assert msgspec.json.decode(stored, type=Bench) == result
    again = remeasure(folder)
    assert again == result
    assert msgspec.json.encode(again) == msgspec.json.encode(result)
    assert remeasure(folder) == again
    assert (folder / "bench.json").read_bytes() == stored


def test_what_is_compared_is_not_empty(measured: tuple[Path, Bench]) -> None:
    _, result = measured
    for window in result.windows:
        assert window.requests.scheduled == 24
        assert 0 < window.requests.failed < 24
        assert window.figures["decode_tok_s"].value
        assert window.distributions["ttft"].failed == window.requests.failed
    serial = result.windows[0]
    assert serial.figures["acceptance_length"].value is not None
    assert serial.server.counters["generated_tokens"] > 0
    assert set(serial.token_sources) == {"ids", "usage", "chunks"}


def test_figures_come_from_the_events_and_not_from_the_stored_result(
    measured: tuple[Path, Bench], tmp_path: Path
) -> None:
    folder, result = measured
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stripped = [
        msgspec.structs.replace(window, figures={}, distributions={}, rows=[], gates=[])
        for window in result.windows
    ]
    emptied = msgspec.structs.replace(result, windows=stripped)
    (tmp_path / "bench.json").write_bytes(msgspec.json.encode(emptied))
    assert remeasure(tmp_path) == result


def test_files_that_are_gone_or_in_another_form_are_named(
    measured: tuple[Path, Bench], tmp_path: Path
) -> None:
    folder, result = measured
    with pytest.raises(SpecError, match="not a bench folder"):
        remeasure(tmp_path)
    (tmp_path / "bench.json").write_bytes(msgspec.json.encode(result))
    with pytest.raises(SpecError, match=r"events-serial\.parquet"):
        remeasure(tmp_path)
    events = folder / "events-serial.parquet"
    (tmp_path / events.name).write_bytes(events.read_bytes()[:-100])
    with pytest.raises(SpecError, match=r"events-serial\.parquet"):
        remeasure(tmp_path)
    other = msgspec.structs.replace(result, schema="servetune-bench/0")
    (tmp_path / "bench.json").write_bytes(msgspec.json.encode(other))
    with pytest.raises(SpecError, match="servetune-bench/0"):
        remeasure(tmp_path)
