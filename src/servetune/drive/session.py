"""Starts workers, runs stages on all of them together, gathers one event log a stage."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from servetune.clock import MS, now
from servetune.drive.collect import Sent
from servetune.drive.driver import Progress, StageReport
from servetune.drive.plan import Stage
from servetune.drive.worker import PROGRESS_FIELDS, Begin, Broken, Finished, Job, Ready, Stop, context, main
from servetune.events import Events
from servetune.spec import Target

_LEAD = 20 * MS
_JOIN_SECONDS = 10.0


class WorkerError(RuntimeError):
    """A worker process of the client ended before its stage did."""


@dataclass(frozen=True)
class Driven:
    """A stage that ran: its events, and one report a worker."""

    events: Events
    reports: list[StageReport]


class Session:
    """Worker processes that run the given stages, one after the other, on one target.

    Use as a context manager; leaving it ends the workers and removes their files.
    """

    def __init__(
        self,
        target: Target,
        stages: list[Stage],
        prompts: list[list[Sent]],
        *,
        workers: int = 1,
        tokenizer: str | None = None,
        folder: Path | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`prompts[i]` describes the payloads of `stages[i]`; raw answers go to `folder` (kept) or a
        temporary one (removed). When `interrupted()` turns true, the running stage ends early."""
        spawn = context()
        self._keep = folder is not None
        self._interrupted = interrupted
        self._folder = folder or Path(tempfile.mkdtemp(prefix="servetune-"))
        self._progress = spawn.RawArray("q", PROGRESS_FIELDS * workers)
        counts = [spawn.Value("q", 0) for _ in stages]
        self._workers: list[tuple[BaseProcess, Pipe]] = []
        self._jobs: list[Job] = []
        self._inbox: list[deque[Any]] = [deque() for _ in range(workers)]
        for worker in range(workers):
            here, there = spawn.Pipe()
            job = Job(
                worker,
                workers,
                target,
                stages,
                prompts,
                counts,
                self._progress,
                self._folder,
                tokenizer,
                temporary=not self._keep,
            )
            process: Any = spawn.Process(target=main, args=(job, there), daemon=True)
            allowed = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:  # a worker starts deaf to Ctrl-C: before its first line it could only die of it
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
            there.close()
            self._workers.append((process, here))
            self._jobs.append(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(0.1 if kind else _JOIN_SECONDS)
            if process.is_alive():
                process.join(1.0)
            if process.is_alive():
                process.kill()
        if not self._keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, number: int, show: Callable[[Progress], None] = lambda _: None) -> Driven:
        """Run stage `number` and wait for its events; call them in order.

        `show` gets the progress about ten times a second. An interrupt stops the stage and keeps what
        was measured. Raises WorkerError.
        """
        self._gather(Ready)
        at = now() + _LEAD
        for _, pipe in self._workers:
            pipe.send(Begin(at))
        self._gather(Finished, show)
        reports = [message.report for message in self._gather(Finished)]
        events = Events.joined([Events.read(job.events(number)) for job in self._jobs])
        return Driven(events, reports)

    def stop(self, why: str) -> None:
        """End the running stage early."""
        for _, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(Stop(why))

    def progress(self) -> Progress:
        """Sums over the workers."""
        values = list(self._progress)
        return Progress(*(sum(values[i::PROGRESS_FIELDS]) for i in range(PROGRESS_FIELDS)))

    def _gather(self, kind: type, show: Callable[[Progress], None] = lambda _: None) -> list[Any]:
        """The next message of each worker, all of the kind."""
        stopping = kind is not Finished
        while not all(self._inbox):
            if not stopping and self._interrupted():
                stopping = True
                self.stop("interrupted")
            self._receive()
            show(self.progress())
        messages = [box.popleft() for box in self._inbox]
        for message in messages:
            if not isinstance(message, kind):
                raise WorkerError(message.words if isinstance(message, Broken) else repr(message))
        return messages

    def _receive(self) -> None:
        """Put what workers sent into their boxes; wait at most 0.1 s. Raises WorkerError."""
        pipes = [pipe for _, pipe in self._workers]
        for ready in wait(pipes, timeout=0.1):
            position = pipes.index(ready)  # type: ignore[arg-type]
            try:
                message = pipes[position].recv()
            except (EOFError, ConnectionResetError):
                if self._inbox[position]:
                    continue
                process = self._workers[position][0]
                process.join(1.0)
                raise WorkerError(f"worker {position} ended with exit code {process.exitcode}") from None
            if isinstance(message, Finished) and message.report.stopped and not message.collected:
                self.stop(message.report.stopped)
            self._inbox[position].append(message)
