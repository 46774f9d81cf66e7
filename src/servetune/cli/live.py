"""The line that lives while a window runs; plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from servetune.drive import Progress
from servetune.events import Phase
from servetune.measure import Measurement
from servetune.report import figure, plain
from servetune.spec import Load
from servetune.study import Preflight

_PLAIN_EVERY = 5.0
_RATE_OVER = 2.0


class Live:
    """Shows a bench as it runs, on standard error. A context manager and a study Listener."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("asking the endpoint", refresh_per_second=4)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def ready(self, found: Preflight) -> None:
        who = f"{found.dialect.engine} {found.version}".rstrip()
        self._console.print(plain(f"{who} serves {found.model}"), style="dim", markup=False, highlight=False)

    def stage(self, load: Load, phase: Phase, planned: int | None, seconds: float | None) -> None:
        self._title = f"{load} {phase}" if phase is Phase.WARM_UP else str(load)
        self._planned, self._seconds = planned, seconds
        self._began = self._printed = time.monotonic()
        self._recent: list[tuple[float, float]] = []

    def progress(self, progress: Progress) -> None:
        moment = time.monotonic()
        self._note(progress, moment)
        if self._status is not None:
            self._status.update(self._line(progress, moment))
        elif moment - self._printed >= _PLAIN_EVERY:
            self._printed = moment
            self._console.print(self._line(progress, moment), markup=False, highlight=False)

    def measured(self, measurement: Measurement) -> None:
        name = next(n for n in ("serial_tok_s", "output_throughput") if n in measurement.figures)
        words = f"{measurement.load}: {figure(measurement.figures[name])}"
        self._console.print(words, style="dim", markup=False, highlight=False)

    def _line(self, progress: Progress, moment: float) -> str:
        """Requests done, tokens a second now, time left."""
        of = f"/{self._planned}" if self._planned is not None else ""
        parts = [self._title, f"{progress.done}{of} requests", f"{progress.in_flight} in flight"]
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        parts.append(f"≈ {self._rate():.0f} tok/s now")
        left = self._left(progress, moment)
        if left is not None:
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        return " · ".join(parts)

    def _note(self, progress: Progress, moment: float) -> None:
        """Reads so far, each worth the tokens that a read of the ended answers was."""
        worth = progress.ended_tokens / progress.ended_reads if progress.ended_tokens else 1.0
        self._recent.append((moment, progress.reads * worth))
        while moment - self._recent[0][0] > _RATE_OVER:
            del self._recent[0]

    def _rate(self) -> float:
        """Tokens a second over the last seconds."""
        (before, tokens), (now, more) = self._recent[0], self._recent[-1]
        return max(0.0, more - tokens) / (now - before) if now > before else 0.0

    def _left(self, progress: Progress, moment: float) -> float | None:
        elapsed = moment - self._began
        by_time = None if self._seconds is None else max(0.0, self._seconds - elapsed)
        if self._planned is None or not progress.done:
            return by_time
        by_count = elapsed * max(0, self._planned - progress.done) / progress.done
        return by_count if by_time is None else min(by_time, by_count)
