"""A worker process: one event loop that sends its share of the requests, then reads the answers.

Load never runs in the process that draws the terminal. Messages over the pipe, worker → parent:
`Ready`, then for each stage `Finished`; parent → worker: `Begin`, `Stop`. A closed pipe ends the
worker, so none outlives a killed parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from multiprocessing.connection import Connection as Pipe
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import uvloop

from servetune.drive.collect import Sent, collect
from servetune.drive.driver import Driver, Progress, StageReport
from servetune.drive.plan import Stage
from servetune.drive.spool import Spool
from servetune.drive.wire import Wire
from servetune.spec import Target

_POOL, _MOST_POOL = 16, 1024
PROGRESS_FIELDS = len(fields(Progress))


@dataclass(frozen=True)
class Job:
    """Everything one worker needs.

    stages     run one after the other; what each sends is described by `prompts[i]`
    counts     the next request number of each stage, shared by the workers
    progress   shared int64s, PROGRESS_FIELDS a worker
    temporary  the folder goes when the parent is gone and can't remove it
    """

    worker: int
    workers: int
    target: Target
    stages: list[Stage]
    prompts: list[list[Sent]]
    counts: list[Synchronized[int]]
    progress: Any
    folder: Path
    tokenizer: str | None
    temporary: bool = False

    def spool(self, stage: int) -> Path:
        return self.folder / f"stage{stage}-worker{self.worker}.raw"

    def events(self, stage: int) -> Path:
        return self.folder / f"stage{stage}-worker{self.worker}.parquet"


@dataclass(frozen=True)
class Ready:
    """Connections are open; waiting for `Begin`."""

    stage: int


@dataclass(frozen=True)
class Begin:
    """Run the stage from this time on (ns)."""

    at: int


@dataclass(frozen=True)
class Stop:
    """End the stage; `why` as in StageReport.stopped."""

    why: str


@dataclass(frozen=True)
class Finished:
    """The stage has ended; its events lie in a file when `collected`."""

    stage: int
    report: StageReport
    collected: bool = False


@dataclass(frozen=True)
class Broken:
    """The worker can't go on."""

    words: str


def load_tokenizer(name: str | None) -> Any:
    """Tokenizer of a `tokenizer.json`, of a folder that has one, or of a hub id; None for None."""
    if name is None:
        return None
    from tokenizers import Tokenizer

    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else Tokenizer.from_pretrained(name)


def main(job: Job, pipe: Pipe) -> None:
    """Entry point of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -5)  # where allowed: stamps before the engine's threads
    try:
        uvloop.run(_Worker(job, pipe).run())
    except (EOFError, BrokenPipeError):
        if job.temporary:
            shutil.rmtree(job.folder, ignore_errors=True)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(Broken(job.target.masked(f"{type(error).__name__}: {error}")))
        if not isinstance(error, OSError):  # such as a full disk: no fault of the program
            raise


class _Worker:
    def __init__(self, job: Job, pipe: Pipe) -> None:
        self._job = job
        self._pipe = pipe
        self._inbox: asyncio.Queue[Begin | Stop | None] = asyncio.Queue()
        self._driver: Driver | None = None
        self._stop_soon = ""

    async def run(self) -> None:
        job = self._job
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._receive)
        wire = Wire(job.target)
        for number, stage in enumerate(job.stages):
            if not await self._stage(wire, number, stage.share(job.worker, job.workers)):
                break
        loop.remove_reader(self._pipe.fileno())

    def _receive(self) -> None:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            message = None
        if isinstance(message, Stop) and self._driver is not None:
            self._driver.stop(message.why)
        elif message is None and self._driver is not None:
            self._driver.stop("interrupted")
        elif isinstance(message, Begin):
            self._stop_soon = ""
        elif isinstance(message, Stop):  # came with the begin; one for the stage before is forgotten by it
            self._stop_soon = message.why
        if not isinstance(message, Stop):
            self._inbox.put_nowait(message)

    async def _stage(self, wire: Wire, number: int, stage: Stage) -> bool:
        """Run and collect one stage; False when there is no point in going on."""
        job = self._job
        spool = Spool(job.spool(number))
        driver = Driver(wire, spool.add, self._take(number), job.worker, job.workers, self._show)
        await driver.open_pool(min(_POOL if stage.slots is None else stage.slots, _MOST_POOL))
        self._pipe.send(Ready(number))
        begin = await self._inbox.get()
        if not isinstance(begin, Begin):
            raise EOFError
        self._driver = driver
        if self._stop_soon:
            asyncio.get_running_loop().call_soon(driver.stop, self._stop_soon)
        try:
            report = await driver.run(stage, begin.at)
        finally:
            self._driver = None
            driver.close()
            spool.close()
        self._pipe.send(Finished(number, report))
        events = collect(
            job.spool(number),
            job.prompts[number],
            phase=stage.phase,
            target=job.target,
            tokenizer=load_tokenizer(job.tokenizer),
        )
        events.write(job.events(number))
        self._pipe.send(Finished(number, report, collected=True))
        return not report.stopped

    def _take(self, number: int) -> Callable[[], int]:
        counter = self._job.counts[number]

        def take() -> int:
            with counter.get_lock():
                counter.value += 1
                return counter.value - 1

        return take

    def _show(self, progress: Progress) -> None:
        start = self._job.worker * PROGRESS_FIELDS
        self._job.progress[start : start + PROGRESS_FIELDS] = astuple(progress)


def context() -> multiprocessing.context.SpawnContext:
    """Workers are spawned: a fork would copy the parent's threads' locks and its event loop."""
    return multiprocessing.get_context("spawn")
