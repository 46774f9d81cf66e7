"""`servetune bench`: the given load points on an endpoint that already runs, one window each."""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from servetune import __version__
from servetune.clock import MS
from servetune.drive import Driven, Limits, Progress, Sent, Session, Stage, request_bytes
from servetune.engines import Ask, Counters, body
from servetune.events import MISSING, Phase
from servetune.measure import SCHEMA, Bench, Client, Measurement, Server, measure
from servetune.spec import Load, Slo, Target
from servetune.study.interrupt import Interrupt
from servetune.study.preflight import Preflight, counters, open_files, preflight
from servetune.study.results import prepare_folder, save_bench, save_events
from servetune.traffic import Prompt, offsets, warm_up_prompts

_SLOTS_A_WORKER = 512
_RATE_A_WORKER = 1000.0
_WARM_UP_OPEN = 8
_WARM_UP_SERIAL = 2
_LEAST_OPEN = 30


class Listener(Protocol):
    """Told what happens, to show it."""

    def ready(self, found: Preflight) -> None: ...

    def stage(self, load: Load, phase: Phase, planned: int | None, seconds: float | None) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def measured(self, measurement: Measurement) -> None: ...


@dataclass(frozen=True)
class BenchSpec:
    """What to measure.

    model        None: the first that the endpoint lists
    ask          fields of `engines.Ask` except the model
    requests, seconds   limits of each window; without either, each prompt once, and more where the
                 load point needs more
    warm_up      requests before each window, None: as many as the load point needs
    workers      client processes, None: by the load point
    out          folder for bench.json and the events, or None
    seed         of the arrival schedule
    slo          limits of each request
    """

    target: Target
    prompts: list[Prompt]
    loads: list[Load]
    traffic: str
    model: str | None = None
    ask: dict[str, Any] = field(default_factory=dict)
    requests: int | None = None
    seconds: float | None = None
    warm_up: int | None = None
    workers: int | None = None
    tokenizer: str | None = None
    limits: Limits = field(default_factory=Limits)
    out: Path | None = None
    seed: int = 0
    slo: Slo = field(default_factory=Slo)


def bench(spec: BenchSpec, listener: Listener) -> Bench:
    """Measure all load points in order; stops early when interrupted or when the endpoint dies.

    Each finished window is on disk (`spec.out`) before the next starts. Raises SpecError,
    EndpointError, WorkerError, and KeyboardInterrupt when nothing was measured.
    """
    open_files(spec.loads)
    if spec.out is not None:
        prepare_folder(spec.out)
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = preflight(spec.target, spec.model, spec.prompts, spec.ask)
    listener.ready(found)
    stages, sents = _stages(spec, found)
    windows: list[Measurement] = []
    workers = spec.workers or max(_workers(load) for load in spec.loads)
    with (
        Interrupt() as interrupt,
        Session(
            found.target,
            stages,
            sents,
            workers=workers,
            tokenizer=spec.tokenizer,
            interrupted=lambda: interrupt.asked,
        ) as session,
    ):
        for number, stage in enumerate(stages):
            load = spec.loads[number // 2]
            listener.stage(load, stage.phase, stage.planned, spec.seconds)
            before = counters(spec.target, found.dialect) if stage.phase is Phase.MEASURED else None
            driven = session.run(number, listener.progress)
            died = any(report.stopped == "died under load" for report in driven.reports)
            if stage.phase is Phase.WARM_UP and died:
                # the warm-up runs at the load point, so its end is what this load point showed
                driven.events.phase = [Phase.MEASURED] * len(driven.events)
                driven.events.prompt %= len(spec.prompts)
            if stage.phase is Phase.MEASURED or died:
                after = counters(spec.target, found.dialect)
                client = _client(driven, workers)
                measurement = measure(driven.events, load, client, _server(found, before, after), spec.slo)
                windows.append(measurement)
                result = _result(spec, found, began, windows)
                listener.measured(measurement)
                if spec.out is not None:
                    save_events(spec.out, load, driven.events)
                    save_bench(spec.out, result)
            if interrupt.asked or any(report.stopped for report in driven.reports):
                break
    if not windows:
        raise KeyboardInterrupt
    return result


def _result(spec: BenchSpec, found: Preflight, began: str, windows: list[Measurement]) -> Bench:
    asked = {name: str(value) for name, value in spec.ask.items() if value not in (None, {}, False)}
    return Bench(
        schema=SCHEMA,
        servetune=__version__,
        began=began,
        endpoint=spec.target.url,
        model=found.model,
        traffic=spec.traffic,
        ask=asked,
        valid=all(not w.void and w.requests.failed == w.requests.unsent == 0 for w in windows),
        windows=windows,
    )


def _stages(spec: BenchSpec, found: Preflight) -> tuple[list[Stage], list[list[Sent]]]:
    """A warm-up and a measured stage for each load point, and what their requests ask for."""
    ask = Ask(model=found.model, **spec.ask)
    stages, sents = [], []
    for load in spec.loads:
        n = _warm_up(load) if spec.warm_up is None else spec.warm_up
        warm = warm_up_prompts(spec.prompts, max(n, 1))
        slots = min(n, load.slots or _WARM_UP_OPEN)
        stages.append(
            Stage(Phase.WARM_UP, _payloads(warm, ask, found), slots=slots, requests=n, limits=spec.limits)
        )
        sents.append([_sent(prompt, ask) for prompt in warm])
        stages.append(_measured(spec, load, _payloads(spec.prompts, ask, found), found))
        sents.append([_sent(prompt, ask) for prompt in spec.prompts])
    return stages, sents


def _measured(spec: BenchSpec, load: Load, payloads: list[bytes], found: Preflight) -> Stage:
    requests = spec.requests
    if requests is None and spec.seconds is None:
        requests = _enough(load, len(spec.prompts))
    if load.is_open:
        due = offsets(load, requests=requests, seconds=spec.seconds, seed=spec.seed)
        return Stage(Phase.MEASURED, payloads, due=due, limits=spec.limits)
    scrape = None
    if load.is_serial and found.has_counters and found.dialect.metrics_path:
        scrape = request_bytes(found.target, "GET", found.dialect.metrics_path)
    return Stage(
        Phase.MEASURED,
        payloads,
        slots=load.slots,
        requests=requests,
        seconds=spec.seconds,
        scrape=scrape,
        limits=spec.limits,
    )


def _enough(load: Load, prompts: int) -> int:
    """Requests of a window without limits: whole passes over the prompts."""
    least = _LEAST_OPEN if load.slots is None else 1 if load.is_serial else 4 * load.slots
    return prompts * math.ceil(least / prompts)


def _warm_up(load: Load) -> int:
    if load.slots is None:
        return _WARM_UP_OPEN
    return max(load.slots, _WARM_UP_SERIAL)


def _workers(load: Load) -> int:
    """Client processes for a load point; one core handles some hundred streams (docs/results/client.md)."""
    wanted = math.ceil((load.slots or 0) / _SLOTS_A_WORKER) + math.ceil((load.rate or 0) / _RATE_A_WORKER)
    return max(1, min(wanted, os.cpu_count() or 1))


def _payloads(prompts: list[Prompt], ask: Ask, found: Preflight) -> list[bytes]:
    wanted = ((prompt, found.dialects[ask.api or prompt.api]) for prompt in prompts)
    return [request_bytes(found.target, "POST", *body(prompt, ask, dialect)) for prompt, dialect in wanted]


def _sent(prompt: Prompt, ask: Ask) -> Sent:
    asked = ask.output_tokens or prompt.max_tokens or MISSING
    ids = MISSING if prompt.ids is None else len(prompt.ids)
    return Sent(asked, ask.exact and asked > 0, prompt.bucket, ids)


def _client(driven: Driven, workers: int) -> Client:
    watches = [report.watch for report in driven.reports]
    stopped = [report.stopped for report in driven.reports if report.stopped]
    return Client(
        workers=workers,
        worst_stall_ms=max(watch.worst_stall for watch in watches) / MS,
        busy=max((share for watch in watches for share in watch.busy), default=0.0),
        cpu_seconds=sum(watch.cpu for watch in watches),
        opened=sum(report.opened for report in driven.reports),
        stopped=stopped[0] if stopped else "",
    )


def _server(found: Preflight, before: Counters | None, after: Counters | None) -> Server:
    delta = after.since(before) if before and after else None
    return Server(
        engine=found.dialect.engine,
        version=found.version,
        model=found.model,
        counters=delta.totals if delta else {},
        acceptance_length=delta.acceptance_length if delta else None,
        acceptance_by_position=delta.acceptance_by_position if delta else [],
        restarted=bool(before and after and delta is None),
        chunk_is_step=found.dialect.chunk_is_step,
    )
