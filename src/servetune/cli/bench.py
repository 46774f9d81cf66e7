"""`servetune bench`: measure an endpoint that already runs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

from servetune.spec import Load, Slo, SpecError, Target, duration


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """A whole number as it stands: 2.5 is refused, not cut to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"'{tokens[0].value}' is not a whole number") from None


_MOST_TOKENS = 2**31
_MOST_WORKERS = 256

Whole = Annotated[int, Parameter(converter=_whole)]


@Parameter(name="*")
@dataclass(frozen=True)
class Connecting:
    """How to reach the endpoint."""

    api_key: Annotated[str | None, Parameter(env_var="SERVETUNE_API_KEY", show_env_var=True)] = None
    """Bearer key; never shown or stored. Better given by the environment."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    insecure: Annotated[bool, Parameter(negative="")] = False
    """Accept any TLS certificate."""
    proxy: str | None = None
    """`http://HOST:PORT` of a proxy; the environment's proxies are never used."""
    timeout: str = "10m"
    """Longest time for one request."""
    stall_timeout: str = "2m"
    """Longest time without a byte of an answer."""


@Parameter(name="*")
@dataclass(frozen=True)
class Asking:
    """What each request asks for."""

    output_tokens: Whole | None = None
    """Exactly so many output tokens; end tokens are ignored where the engine can."""
    max_output_tokens: Whole | None = None
    """At most so many; answers end where the model ends them."""
    temperature: float | None = None
    """Sampling temperature; the server's default if not given."""
    seed: Whole | None = None
    """Sampling seed."""
    api: Literal["chat", "completions"] | None = None
    """API to use; by default chat for rows with `messages`, completions for rows with `prompt`."""
    extra_body: str | None = None
    """JSON object of fields to add to each request."""


def bench(
    *,
    endpoint: str,
    traffic: Path,
    model: str | None = None,
    load: Annotated[list[str] | None, Parameter(negative="")] = None,
    requests: Whole | None = None,
    seconds: float | None = None,
    warm_up: Whole | None = None,
    workers: Whole | None = None,
    arrival_seed: Whole = 0,
    slo: str | None = None,
    tokenizer: str | None = None,
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    out: Path | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
    connecting: Connecting = Connecting(),
    asking: Asking = Asking(),
) -> int:
    """Measure an OpenAI-compatible endpoint that already runs.

    Parameters
    ----------
    endpoint
        URL such as `http://127.0.0.1:8000`.
    traffic
        Prompts: JSON lines with `messages` or `prompt`, or a `.txt` file with one prompt a line.
    model
        Model name; the first one listed by the endpoint if not given.
    load
        `serial` (default), `concurrency=N` or `rate=R[,arrivals=poisson|gamma|constant][,burstiness=B]`.
        Given several times, one window each.
    requests
        Requests in each window.
    seconds
        Seconds during which each window sends requests.
    warm_up
        Requests before each window, with other prompts of the same lengths.
    workers
        Client processes.
    arrival_seed
        Seed of the arrival times of an open loop.
    slo
        Limits of each request, such as `ttft=500ms,tpot=30ms`: adds SLO attainment and goodput.
    tokenizer
        `tokenizer.json`, folder or hub id, to count tokens where the server does not.
    json
        File for the result as JSON; `-` for standard output.
    out
        Folder for `bench.json` and the events (Parquet), from which `servetune report` recomputes all.
    quiet
        No live line.
    """
    from servetune.cli.live import Live
    from servetune.drive import Limits, WorkerError
    from servetune.report import bench_tables
    from servetune.study import BenchSpec, EndpointError
    from servetune.study import bench as run
    from servetune.study.results import encode_bench
    from servetune.traffic import read_prompts

    loads = _loads(load or ["serial"])
    for name, value in (("requests", requests), ("seconds", seconds), ("workers", workers)):
        if value is not None and not 0 < value < math.inf:
            raise SpecError(f"--{name} must be a number above zero")
    if warm_up is not None and warm_up < 0:
        raise SpecError("--warm-up must not be negative")
    if json is not None and json != "-" and json.startswith("-"):
        raise SpecError(f"--json needs a file, or - for standard output, not {json}")
    if json is not None and json != "-" and not os.access(Path(json).parent, os.W_OK):
        raise SpecError(f"--json {json}: no such folder, or not writable")
    if json is not None and Path(json).is_dir():
        raise SpecError(f"--json {json}: is a folder")
    if workers is not None and workers > _MOST_WORKERS:
        raise SpecError(f"--workers must be at most {_MOST_WORKERS}")
    if arrival_seed < 0:
        raise SpecError("--arrival-seed must not be negative")
    _check_tokenizer(tokenizer)
    target = Target.parse(
        endpoint,
        key=connecting.api_key,
        ca_file=_file(connecting.ca_file),
        insecure=connecting.insecure,
        proxy=connecting.proxy,
    )
    prompts = read_prompts(traffic)
    spec = BenchSpec(
        target=target,
        prompts=prompts,
        loads=loads,
        traffic=traffic.name,
        model=model,
        ask=_ask(asking),
        requests=requests,
        seconds=seconds,
        warm_up=warm_up,
        workers=workers,
        tokenizer=tokenizer,
        limits=Limits(duration(connecting.timeout), duration(connecting.stall_timeout)),
        out=out,
        seed=arrival_seed,
        slo=Slo.parse(slo) if slo is not None else Slo(),
    )
    try:
        with Live(quiet=quiet) as live:
            result = run(spec, live)
    except (EndpointError, WorkerError) as error:
        print(f"servetune: {error}", file=sys.stderr)
        return 3
    from rich.console import Console

    Console(stderr=json == "-").print(bench_tables(result, [prompt.label for prompt in prompts]))
    if json == "-":
        sys.stdout.write(encode_bench(result).decode())
    elif json is not None:
        Path(json).write_bytes(encode_bench(result))
    return 0 if result.valid else 1


def _check_tokenizer(name: str | None) -> None:
    """Raise SpecError now rather than after the first window."""
    from servetune.drive.worker import load_tokenizer

    if name is None:
        return
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.endswith(".json")):
        raise SpecError(f"--tokenizer {name}: no such file or folder")
    try:
        load_tokenizer(name)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise SpecError(f"--tokenizer {name}: {error}") from None


def _loads(texts: list[str]) -> list[Load]:
    loads = [Load.parse(text) for text in texts]
    if len({str(load) for load in loads}) < len(loads):  # its name is also that of its files
        raise SpecError("each load point can be given once")
    return loads


def _file(path: Path | None) -> str | None:
    if path is not None and not path.is_file():
        raise SpecError(f"{path}: no such file")
    return None if path is None else str(path)


def _ask(asking: Asking) -> dict[str, Any]:
    """Fields of `engines.Ask` except the model."""
    import msgspec

    if asking.output_tokens is not None and asking.max_output_tokens is not None:
        raise SpecError("give either --output-tokens (exactly) or --max-output-tokens (at most)")
    tokens = asking.output_tokens if asking.output_tokens is not None else asking.max_output_tokens
    if tokens is not None and not 1 <= tokens < _MOST_TOKENS:
        raise SpecError(
            "output tokens must be at least 1" if tokens < 1 else "so many output tokens are absurd"
        )
    if asking.temperature is not None and not 0 <= asking.temperature < math.inf:
        raise SpecError("--temperature must be a number of at least 0")
    extra: dict[str, Any] = {}
    if asking.extra_body is not None:
        try:
            extra = msgspec.json.decode(asking.extra_body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise SpecError(f"--extra-body is not a JSON object: {error}") from None
    return {
        "output_tokens": tokens,
        "exact": asking.output_tokens is not None,
        "temperature": asking.temperature,
        "seed": asking.seed,
        "api": asking.api,
        "extra": extra,
    }
