"""Prometheus counters of the engines under neutral names. Sources: facts of each engine's version."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MOST = 2.0**53  # beyond that a counter cannot count any more
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:token_)?position="(\d+)"')

# wire name (without a trailing _total) -> neutral name
_NAMES = {
    "vllm:generation_tokens": "generated_tokens",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:num_preemptions": "preemptions",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "sglang:generation_tokens": "generated_tokens",
    "sglang:prompt_tokens": "prompt_tokens",
    "sglang:cached_tokens": "cached_tokens",
    "sglang:num_retracted_requests": "preemptions",
    "sglang:spec_verify_calls": "drafts",
    "llamacpp:tokens_predicted": "generated_tokens",
    "llamacpp:prompt_tokens": "prompt_tokens",
    "llamacpp:prompt_tokens_cached": "cached_tokens",
    "llamacpp:spec_decode_num_drafts": "drafts",
    "llamacpp:spec_decode_num_draft_tokens": "draft_tokens",
    "llamacpp:spec_decode_num_accepted_tokens": "accepted_tokens",
    "trtllm_spec_decode_num_draft_tokens": "draft_tokens",
    "trtllm_spec_decode_num_accepted_tokens": "accepted_tokens",
}
_PER_POSITION = {
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "llamacpp:spec_decode_num_accepted_tokens_per_pos",
    "trtllm_spec_decode_accepted_tokens",
}


@dataclass(frozen=True)
class Counters:
    """Counts since the server's start, summed over its engines; only what the server tells.

    totals        neutral name -> count (tokens, verify steps, events)
    per_position  draft position (0 = first) -> accepted tokens
    """

    totals: dict[str, float] = field(default_factory=dict)
    per_position: dict[int, float] = field(default_factory=dict)

    def since(self, before: Counters) -> Counters | None:
        """Counts between two readings; None when a counter fell, that is, the server restarted."""
        names = self.totals.keys() & before.totals.keys()
        totals = {name: self.totals[name] - before.totals[name] for name in sorted(names)}
        places = self.per_position.keys() | before.per_position.keys()
        per = {p: self.per_position.get(p, 0.0) - before.per_position.get(p, 0.0) for p in sorted(places)}
        if any(v < 0 for v in (*totals.values(), *per.values())):
            return None
        return Counters(totals, per)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, bonus token included (P-28); None without verify steps."""
        drafts = self.totals.get("drafts", 0.0)
        if not drafts or "accepted_tokens" not in self.totals:
            return None
        return 1.0 + self.totals["accepted_tokens"] / drafts

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of verify steps that accepted the draft at each position, unconditional."""
        drafts = self.totals.get("drafts", 0.0)
        return [self.per_position[p] / drafts for p in sorted(self.per_position)] if drafts else []


def read_counters(text: str) -> Counters:
    """Counters of a Prometheus text; lines that are not known or not numbers are passed over."""
    totals: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        name = match[1].removesuffix("_total")
        if name not in _NAMES and name not in _PER_POSITION:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not 0 <= value < _MOST:
            continue
        if name in _NAMES:
            totals[_NAMES[name]] = totals.get(_NAMES[name], 0.0) + value
        elif place := _POSITION.search(match[2] or ""):
            per_position[int(place[1])] = per_position.get(int(place[1]), 0.0) + value
    return Counters(totals, per_position)
