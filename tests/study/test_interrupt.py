"""Ctrl-C at the worst moments: what was measured stays, and nothing else is claimed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from servetune.drive import Progress
from servetune.events import Phase
from servetune.measure import Measurement
from servetune.sim import Script, serve_process, uniform
from servetune.spec import Load, Target
from servetune.study import BenchSpec, Preflight, bench
from servetune.study.interrupt import Interrupt
from servetune.traffic import Prompt

LOADS = [Load(slots=1), Load(slots=2)]


class At:
    """A listener that interrupts this process when the named thing happens for the first time."""

    def __init__(self, moment: str) -> None:
        self._moment = moment

    def _happened(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            os.kill(os.getpid(), signal.SIGINT)

    def ready(self, found: Preflight) -> None:
        return

    def stage(self, load: Load, phase: Phase, planned: int | None, seconds: float | None) -> None:
        self._happened(f"{phase} of {load}")

    def progress(self, progress: Progress) -> None:
        return

    def measured(self, measurement: Measurement) -> None:
        self._happened("measured")


def windows(moment: str, folder: Path) -> list[str]:
    with serve_process(Script(replies=(uniform(3, ttft_ms=5, gap_ms=2, ids=True),))) as server:
        spec = BenchSpec(
            Target.parse(server.url), [Prompt(text="one"), Prompt(text="two")], LOADS, "t", out=folder
        )
        result = bench(spec, At(moment))
    stored = json.loads((folder / "bench.json").read_text())
    assert [w["load"] for w in stored["windows"]] == [w.load for w in result.windows]
    return [w.load for w in result.windows]


@pytest.mark.parametrize("moment", ["measured", "warm-up of concurrency=2"])
def test_between_windows_the_finished_ones_are_kept(moment: str, tmp_path: Path) -> None:
    assert windows(moment, tmp_path) == ["serial"]


def test_in_the_last_window_all_are_kept(tmp_path: Path) -> None:
    assert windows("measured of concurrency=2", tmp_path) == ["serial", "concurrency=2"]


def test_in_the_first_warm_up_nothing_is_claimed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        windows("warm-up of serial", tmp_path)
    assert not (tmp_path / "bench.json").exists()


def test_the_second_one_is_raised_and_the_handler_goes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
