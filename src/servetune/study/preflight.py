"""Before a window: is the endpoint usable, who is it, which fields does it take?"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from servetune.drive import Answer, UnreachableError, fetch, keeps_alive, request_bytes
from servetune.drive.stream import StreamError, events_of
from servetune.engines import Ask, Counters, Dialect, body, decode, dialects, identify, read_counters
from servetune.engines.openai import error_words
from servetune.spec import Load, SpecError, Target
from servetune.traffic import Prompt, warm_up_prompts

_TRIES = 4
_WAIT_SECONDS = 1.0
_SPARE_FILES = 64
_PROBE_SECONDS = 120.0
_VERSION_AT = {
    "vllm": ("/version", "version"),
    "trtllm": ("/version", "version"),
    "llamacpp": ("/props", "build_info"),
    "sglang": ("/server_info", "version"),
}


class EndpointError(RuntimeError):
    """The endpoint can't be used; the message says why, in its own words where it has any."""


@dataclass(frozen=True)
class Preflight:
    """What is known of the endpoint before the first window.

    target    as given, with `reuse` as found out
    dialects  the fields to send, by API ("chat", "completions")
    """

    target: Target
    model: str
    dialects: dict[str, Dialect]
    version: str
    has_counters: bool

    @property
    def dialect(self) -> Dialect:
        """What holds for the server, whatever the API."""
        return next(iter(self.dialects.values()))


def open_files(loads: list[Load]) -> None:
    """Raise the limit of open files to what the load points need. Raises SpecError when it can't."""
    slots = max((load.slots or 0 for load in loads), default=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        soft = 1 << 20 if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if slots + _SPARE_FILES > soft:
        raise SpecError(
            f"concurrency={slots} needs {slots + _SPARE_FILES} open files, the limit (nofile) is {soft}: "
            "raise it with 'ulimit -n' or in /etc/security/limits.conf"
        )


def preflight(target: Target, model: str | None, prompts: list[Prompt], ask: dict[str, Any]) -> Preflight:
    """Ask the endpoint who it is and get a first token from it, by each API that the prompts use.

    `ask` holds the fields of `engines.Ask` except the model. The probes send other words than the
    prompts, so a prefix cache learns nothing of them. Raises EndpointError.
    """
    try:
        listed = fetch(target, "GET", "/v1/models")
    except (UnreachableError, OSError) as error:
        raise EndpointError(target.masked(str(error))) from None
    if listed.status in (401, 403):
        words = f"{target.url} refused the key ({listed.status}): {error_words(listed.body)}"
        raise EndpointError(target.masked(words))
    models = _json(listed)
    engine = identify(models, listed.headers)
    model = model or _first_model(models, target)
    probe = Ask(model=model, **{**ask, "output_tokens": 4})
    firsts = {probe.api or prompt.api: prompt for prompt in reversed(prompts)}
    found = {api: _negotiate(target, first, probe, dialects(engine)) for api, first in firsts.items()}
    api, dialect = next(iter(found.items()))
    payload = request_bytes(target, "POST", *body(_other(firsts[api]), probe, dialect))
    return Preflight(
        target=replace(target, reuse=keeps_alive(target, payload, _PROBE_SECONDS)),
        model=model,
        dialects=found,
        version=_version(target, engine),
        has_counters=counters(target, dialect) is not None,
    )


def _other(prompt: Prompt) -> Prompt:
    return warm_up_prompts([prompt], 1)[0]


def _first_model(models: Any, target: Target) -> str:
    rows = models.get("data") if isinstance(models, dict) else None
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            return str(row["id"])
    raise EndpointError(f"{target.url}/v1/models lists no model: name one with --model")


def _negotiate(target: Target, prompt: Prompt, ask: Ask, steps: list[Dialect]) -> Dialect:
    """The richest dialect that the server answers with a token. Raises EndpointError."""
    words = ""
    for dialect in steps:
        path, payload = body(_other(prompt), ask, dialect)
        answer = _patient(target, path, payload)
        if answer.status == 200:
            _need_token(target, path, answer)
            return dialect
        words = f"{answer.status} {error_words(answer.body)}"
        if answer.status not in (400, 422):
            break
    raise EndpointError(target.masked(f"POST {target.url}{path}: {words}"))


def _patient(target: Target, path: str, payload: bytes) -> Answer:
    """An answer to the probe; a server that is busy or still loading is asked again a few times."""
    for left in reversed(range(_TRIES)):
        try:
            answer = fetch(target, "POST", path, payload, timeout=_PROBE_SECONDS)
        except (UnreachableError, OSError) as error:
            raise EndpointError(target.masked(str(error))) from None
        if answer.status not in (429, 500, 502, 503, 504) or not left:
            break
        time.sleep(_WAIT_SECONDS)
    return answer


def _need_token(target: Target, path: str, answer: Answer) -> None:
    where = f"POST {target.url}{path}"
    try:
        if "json" in answer.headers.get("content-type", ""):
            data = [answer.body]
        else:
            data, _ = events_of([answer.body], [0], complete=True)
        chunks = [decode(text) for text in data if text.strip() and text != b"[DONE]"]
    except (StreamError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EndpointError(target.masked(f"{where}: not an OpenAI answer: {error}")) from None
    for chunk in chunks:
        if chunk.failure is not None:
            raise EndpointError(target.masked(f"{where}: {chunk.failure}"))
    if not any(chunk.content()[0] or chunk.generated for chunk in chunks):
        raise EndpointError(f"{where}: a 200 without a single token")


def _json(answer: Answer) -> Any:
    try:
        return msgspec.json.decode(answer.body) if answer.status == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _version(target: Target, engine: str) -> str:
    if engine not in _VERSION_AT:
        return ""
    path, name = _VERSION_AT[engine]
    try:
        told = _json(fetch(target, "GET", path))
    except (UnreachableError, OSError):
        return ""
    return str(told.get(name, "")) if isinstance(told, dict) else ""


def counters(target: Target, dialect: Dialect) -> Counters | None:
    """The server's counters now, or None when it has none that are known."""
    if dialect.metrics_path is None:
        return None
    try:
        answer = fetch(target, "GET", dialect.metrics_path)
    except (UnreachableError, OSError):
        return None
    found = read_counters(answer.body.decode("utf-8", "replace")) if answer.status == 200 else Counters()
    return found if found.totals else None
