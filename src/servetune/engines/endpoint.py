"""A running endpoint that servetune did not launch: who is it, and which fields does it take?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Dialect:
    """Request fields beyond the OpenAI standard that a server accepts.

    include_usage   `stream_options.include_usage`: token totals at the end of a stream
    running_usage   `stream_options.continuous_usage_stats`: totals in each chunk
    count_fields    boolean fields that make the server tell tokens per chunk
    metrics_path    where its Prometheus counters are, or None
    chunk_is_step   each decode step of a request is streamed as one chunk
    """

    engine: str
    include_usage: bool = True
    running_usage: bool = False
    ignore_eos: bool = False
    min_tokens: bool = False
    count_fields: tuple[str, ...] = ()
    metrics_path: str | None = "/metrics"
    chunk_is_step: bool = False


_VLLM = Dialect(
    "vllm",
    running_usage=True,
    ignore_eos=True,
    min_tokens=True,
    count_fields=("return_token_ids",),
    chunk_is_step=True,
)
_SGLANG = Dialect("sglang", running_usage=True, ignore_eos=True, min_tokens=True)
_TRTLLM = Dialect(
    "trtllm", running_usage=True, ignore_eos=True, min_tokens=True, metrics_path="/prometheus/metrics"
)
_LLAMACPP = Dialect("llamacpp", ignore_eos=True, count_fields=("timings_per_token",))
_STANDARD = Dialect("endpoint")
_BARE = replace(_STANDARD, include_usage=False)
_ALL = replace(_VLLM, engine="endpoint", chunk_is_step=False)

_KNOWN = {d.engine: d for d in (_VLLM, _SGLANG, _TRTLLM, _LLAMACPP)}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}


def identify(models: Any, headers: Mapping[str, str]) -> str:
    """Engine of a server by its `/v1/models` reply and headers (lower-case names); "endpoint" if unknown."""
    rows = models.get("data", []) if isinstance(models, dict) else []
    owners = [str(r.get("owned_by", "")).lower() for r in rows if isinstance(r, dict)]
    for owner in owners:
        if owner in _OWNERS:
            return _OWNERS[owner]
    server = headers.get("server", "").lower()
    return "llamacpp" if "llama.cpp" in server else "endpoint"


def dialects(engine: str) -> list[Dialect]:
    """Dialects to try in order, richest first; the first that the server accepts is the one to use.

    Extra fields are refused by strict servers and by older versions, so each step asks for less.
    """
    if engine in _KNOWN:
        known = _KNOWN[engine]
        plain = replace(known, count_fields=(), running_usage=False)
        steps = [known, replace(known, count_fields=()), plain]
    else:
        steps = [_ALL, replace(_ALL, count_fields=()), replace(_STANDARD, ignore_eos=True), _STANDARD]
    steps += [replace(_STANDARD, engine=engine), replace(_BARE, engine=engine)]
    return list(dict.fromkeys(steps))
