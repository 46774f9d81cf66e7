"""The pages beside generation: models, health, version, metrics."""

from __future__ import annotations

from msgspec import Struct

import servetune
from servetune.sim.frames import CREATED
from servetune.sim.script import Piece, Reply, Script, json_reply


class Counters(Struct):
    """Totals of what was received and streamed; `running` and `waiting` are current."""

    requests: int = 0
    generation_tokens: int = 0
    prompt_tokens: int = 0
    draft_steps: int = 0
    accepted_drafts: int = 0
    proposed_drafts: int = 0
    running: int = 0
    waiting: int = 0


def page(path: str, script: Script, counters: Counters) -> Reply | None:
    """The answer to GET `path`, None when there is no such page."""
    if path == "/v1/models":
        model = {"id": script.model, "object": "model", "created": CREATED, "owned_by": script.owned_by}
        return json_reply({"object": "list", "data": [model]})
    if path == "/health":
        return Reply()
    if path == "/version":
        return json_reply({"version": servetune.__version__})
    if path == "/metrics":
        text = script.metrics_text if script.metrics_text is not None else metrics(script, counters)
        headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        return Reply(headers=headers, pieces=(Piece(0.0, text.encode()),))
    return None


def metrics(script: Script, counters: Counters) -> str:
    """Prometheus text of the counters, in vLLM's names if the script says so."""
    if script.metrics_vllm:
        label = f'{{engine="0",model_name="{script.model}"}}'
        rows = [
            ("vllm:num_requests_running", "gauge", counters.running),
            ("vllm:num_requests_waiting", "gauge", counters.waiting),
            ("vllm:prompt_tokens_total", "counter", counters.prompt_tokens),
            ("vllm:generation_tokens_total", "counter", counters.generation_tokens),
            ("vllm:spec_decode_num_drafts_total", "counter", counters.draft_steps),
            ("vllm:spec_decode_num_draft_tokens_total", "counter", counters.proposed_drafts),
            ("vllm:spec_decode_num_accepted_tokens_total", "counter", counters.accepted_drafts),
        ]
    else:
        label = ""
        rows = [
            ("servetune_sim:requests_total", "counter", counters.requests),
            ("servetune_sim:generation_tokens_total", "counter", counters.generation_tokens),
            ("servetune_sim:prompt_tokens_total", "counter", counters.prompt_tokens),
            ("servetune_sim:requests_running", "gauge", counters.running),
        ]
    lines: list[str] = []
    for name, kind, value in rows:
        # Prometheus' own clients name the family without the suffix.
        lines += [f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{label} {value}"]
    return "\n".join(lines) + "\n"
