"""The metrics: one function each, from derived columns to a figure. Definitions: docs/metrics.md."""

from __future__ import annotations

import math

import numpy as np

from servetune.measure.derive import Derived, Floats, chunk_shares, token_gaps
from servetune.measure.estimates import LEAST_BLOCKS, Estimate, mean, missing, proportion, ratio
from servetune.measure.quantiles import Distribution, distribution
from servetune.measure.slo import attainment
from servetune.measure.window import Window, in_flight
from servetune.spec import Slo

_APPROXIMATE = "approximate: tokens of the first chunk not known, taken as 1"


def figures(derived: Derived, window: Window, *, slots: int | None, slo: Slo) -> dict[str, Estimate]:
    """All single figures by name; those of speculation only where the server tells."""
    block = 1 if slots == 1 else _block(derived, window, slots)
    found = {"success_rate": success_rate(derived)}
    if slots == 1:
        found["serial_tok_s"] = serial_tok_s(derived)
    tpot = tpot_pooled(derived, block)
    found["decode_tok_s"] = tpot.inverse("tok/s", 1000.0)
    found["tpot_pooled"] = tpot
    if slots != 1:
        found["output_throughput"] = output_throughput(derived, window)
        found["total_throughput"] = total_throughput(derived, window)
        found["request_rate"] = request_rate(derived, window)
        found["in_flight"] = Estimate("requests", _finite(in_flight(derived.events, window)[0]))
    if slo != Slo():
        met = attainment(derived, slo)
        found["slo_attainment"] = proportion(int(met.sum()), len(met))
        done = derived.events.done[met]
        found["goodput"] = _per_second(derived, window, done, np.ones(len(done)), "1/s")
    found["tokens_per_chunk"] = tokens_per_chunk(derived, block)
    found["prefix_hit_share"] = prefix_hit_share(derived, block)
    if (derived.events.drafts >= 0).any():
        found["acceptance_length"] = acceptance_length(derived, block)
    if (derived.steps >= 0).any():
        found["tokens_per_step"] = tokens_per_step(derived, block)
        if slots == 1:
            found["step_time"] = step_time(derived)
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _block(derived: Derived, window: Window, slots: int | None) -> int:
    """Requests in a block that lasts at least twice the longest request, so that blocks are independent."""
    if slots is not None:
        return 2 * slots
    longest = np.nanmax(derived.service, initial=0.0) / 1000.0
    rate = len(derived.events) / window.seconds if window.seconds else 0.0
    return max(1, math.ceil(2 * longest * rate))


def success_rate(derived: Derived) -> Estimate:
    """Successful requests ÷ all that were scheduled."""
    ok = derived.events.ok
    return proportion(int(ok.sum()), len(ok))


def serial_tok_s(derived: Derived) -> Estimate:
    """Σ n_out / Σ (t_done - t_sent) at concurrency 1: what one user gets, prefill included."""
    ok = derived.events.ok
    return ratio(derived.events.completion_tokens[ok].astype(float), derived.service[ok] / 1000.0, "tok/s")


def tpot_pooled(derived: Derived, block: int) -> Estimate:
    """Σ (t_last - t_first) / Σ (n_out - n_1): token-weighted, prefill excluded."""
    ok = derived.events.ok
    usable = ok & (derived.decode_tokens > 0)
    approximate = bool((derived.approximate & usable).any())
    if not usable.any():
        return missing("ms/token", "no request has two arrivals of tokens")
    note = _APPROXIMATE if approximate else ""
    return ratio(derived.decode[usable], derived.decode_tokens[usable], "ms/token", block=block, note=note)


def output_throughput(derived: Derived, window: Window) -> Estimate:
    """Output tokens whose arrival lies in the window, per second."""
    return _per_second(derived, window, derived.events.chunk_time, chunk_shares(derived.events), "tok/s")


def total_throughput(derived: Derived, window: Window) -> Estimate:
    """The same, with the prompt tokens of requests whose first token lies in the window."""
    events = derived.events
    known = (events.prompt_tokens >= 0) & ~np.isnan(derived.ttft)
    if (events.ok & ~known).any():
        return missing("tok/s", "prompt tokens not told by the server")
    first = derived.groups.time[derived.groups.first]
    prompts = events.prompt_tokens[derived.groups.owner[derived.groups.first]]
    times = np.r_[events.chunk_time, first]
    tokens = np.r_[chunk_shares(events), np.maximum(prompts, 0).astype(float)]
    return _per_second(derived, window, times, tokens, "tok/s")


def request_rate(derived: Derived, window: Window) -> Estimate:
    """Successful ends in the window, per second."""
    done = derived.events.done[derived.events.ok]
    return _per_second(derived, window, done, np.ones(len(done)), "1/s")


def _per_second(derived: Derived, window: Window, times: np.ndarray, weights: Floats, unit: str) -> Estimate:
    """Weight per second in the window; the interval from blocks of at least twice the longest request."""
    longest = float(np.nanmax(derived.service, initial=0.0)) / 1000.0
    if window.seconds <= longest or not window.seconds:
        return missing(unit, "the window is shorter than one request: send more requests, or for longer")
    inside = (times >= window.start) & (times < window.end)
    blocks = int(window.seconds / (2 * longest)) if longest else 0
    if blocks < LEAST_BLOCKS:
        value = float(weights[inside].sum()) / window.seconds
        why = f"an interval needs a window of {2 * LEAST_BLOCKS * longest:.0f} s"
        return Estimate(unit, value, n=int(inside.sum()), note=why)
    place = (times[inside] - window.start) * blocks // (window.end - window.start)
    sums = np.bincount(place, weights=weights[inside], minlength=blocks)
    return mean(sums / (window.seconds / blocks), unit, "blocks of time")


def tokens_per_chunk(derived: Derived, block: int) -> Estimate:
    """Tokens per arrival group after the first: above 1 when the server sends several at once."""
    counts = derived.events.ok & (derived.n_groups > 1) & ~derived.approximate
    if not counts.any():
        return missing("tokens", "tokens of the chunks are not known")
    return ratio(
        derived.decode_tokens[counts], derived.n_groups[counts].astype(float) - 1, "tokens", block=block
    )


def prefix_hit_share(derived: Derived, block: int) -> Estimate:
    """Σ cached prompt tokens / Σ prompt tokens, where the server tells."""
    events = derived.events
    told = events.ok & (events.cached_tokens >= 0) & (events.prompt_tokens > 0)
    if not told.any():
        return missing("", "the server does not tell cached tokens")
    return ratio(
        events.cached_tokens[told].astype(float), events.prompt_tokens[told].astype(float), "", block=block
    )


def acceptance_length(derived: Derived, block: int) -> Estimate:
    """1 + Σ accepted / Σ verify steps, bonus token included; steps without a draft are not verify steps."""
    events = derived.events
    told = events.ok & (events.drafts > 0) & (events.accepted >= 0)
    if not told.any():
        return missing("tokens/step", "no draft was verified")
    drafts, accepted = events.drafts[told].astype(float), events.accepted[told].astype(float)
    return ratio(drafts + accepted, drafts, "tokens/step", block=block)


def tokens_per_step(derived: Derived, block: int) -> Estimate:
    """Decode tokens ÷ decode steps, steps without a draft included. The first token is prefill's."""
    told = derived.events.ok & (derived.steps > 0)
    if not told.any():
        return missing("tokens/step", "no decode step")
    tokens = (derived.events.completion_tokens[told] - 1).astype(float)
    return ratio(tokens, derived.steps[told], "tokens/step", block=block)


def step_time(derived: Derived) -> Estimate:
    """Decode time ÷ decode steps = tokens per step × TPOT; serial only, where one request is a step."""
    told = derived.events.ok & (derived.steps > 0) & (derived.decode > 0)
    if not told.any():
        return missing("ms", "no decode step")
    return ratio(derived.decode[told], derived.steps[told], "ms")


def distributions(derived: Derived, *, open_loop: bool) -> dict[str, Distribution]:
    """All distributions by name. Failed requests count as infinite in those of latency."""
    events = derived.events
    ok = events.ok
    failed = int((~ok).sum())
    found = {
        "ttft": distribution(derived.ttft[ok], "ms", failed=failed),
        "tpot": distribution(derived.tpot[ok], "ms/token", failed=failed),
        "e2e": distribution(derived.e2e[ok], "ms", failed=failed),
    }
    if (events.reasoning_tokens > 0).any() or (np.nan_to_num(derived.ttfa - derived.ttft) > 0).any():
        found["ttfa"] = distribution(derived.ttfa[ok], "ms", failed=failed)
    if open_loop:
        found["service"] = distribution(derived.service[ok], "ms", failed=failed)
    gaps, weights = token_gaps(derived)
    several = int((ok & (derived.n_groups > 1)).sum())
    if len(gaps):
        found["itl"] = distribution(gaps, "ms/token", weights=weights, units_of_noise=several)
    inner = ok[derived.groups.owner] & ~derived.groups.first
    if inner.any():
        chunk_gaps = derived.groups.gap[inner]
        found["chunk_gap"] = distribution(chunk_gaps, "ms", units_of_noise=several)
        found["worst_stall"] = distribution(derived.worst_stall[ok], "ms")
    known = ok & (events.completion_tokens > 0)
    out = events.completion_tokens[known].astype(float)
    found["normalised_latency"] = distribution(derived.e2e[known] / out, "ms/token", failed=failed)
    found["output_tokens"] = distribution(out, "tokens")
    told = ok & (events.prompt_tokens >= 0)
    if told.any():
        found["prompt_tokens"] = distribution(events.prompt_tokens[told].astype(float), "tokens")
    found["client_lag"] = distribution(derived.lag, "ms")
    return found
