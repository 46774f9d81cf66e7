"""Checks that decide whether a window may be used. Void is not slow: it says why."""

from __future__ import annotations

from collections import Counter

import numpy as np

from servetune.events import MISSING, UNKNOWN_TOKENS, Failure, TokenSource
from servetune.measure.derive import Derived
from servetune.measure.measurement import Client, Gate, Server, Verdict
from servetune.measure.window import Window, in_flight

LAG_MS = 1.0
LAG_SHARE = 0.05
STALL_MS = 25.0
BUSY = 0.70
RATE_SHARE = 0.01
IN_FLIGHT_SHARE = 0.95
FAILED_SHARE = 0.01
LENGTH_SHARE = 0.02
INPUT_SHARE = 0.01
BUFFERED_TOKENS = 16
LEAST_TPOT_MS = 0.02
"""50,000 tok/s in one stream, beyond any engine there is; the floor of model and device will be sharper."""
COUNTER_SHARE = 0.01


def gates(
    derived: Derived, window: Window, client: Client, server: Server, *, slots: int | None
) -> list[Gate]:
    """All gates of a window, each with its evidence."""
    return [
        _lag(derived),
        _stall(client),
        _busy(client),
        _rate(derived) if slots is None else _in_flight(derived, window, slots),
        _died(client),
        _interrupted(client),
        _client_failures(derived),
        _failures(derived),
        _counts(derived),
        _input_length(derived),
        _output_length(derived),
        _buffered(derived),
        _few_chunks(derived),
        _sources(derived),
        _restarted(server),
        _server_counts(derived, server),
        _repeats(derived),
    ]


def _gate(
    name: str, bad: bool, limit: str, reason: str, evidence: str, verdict: Verdict = Verdict.VOID
) -> Gate:
    return Gate(name, verdict if bad else Verdict.PASS, limit, reason, evidence)


def _skipped(name: str, limit: str, reason: str, why: str) -> Gate:
    return Gate(name, Verdict.SKIPPED, limit, reason, why)


def _lag(derived: Derived) -> Gate:
    lag = derived.lag[~np.isnan(derived.lag)]
    reason = "a request that leaves late measures the client"
    typical = np.nanmedian(derived.ttft) if not np.isnan(derived.ttft).all() else 0.0
    allowed = max(LAG_MS, LAG_SHARE * float(typical))
    limit = f"p99 at most max({LAG_MS:g} ms, {LAG_SHARE:.0%} of the median TTFT) = {allowed:.2f} ms"
    if not len(lag):
        return _skipped("client lag", limit, reason, "nothing was sent")
    p99 = float(np.quantile(lag, 0.99, method="inverted_cdf"))
    return _gate("client lag", p99 > allowed, limit, reason, f"p99 {p99:.2f} ms, worst {lag.max():.2f} ms")


def _stall(client: Client) -> Gate:
    return _gate(
        "client stall",
        client.worst_stall_ms > STALL_MS,
        f"at most {STALL_MS:g} ms",
        "while the event loop stands still, arrivals are stamped late",
        f"worst {client.worst_stall_ms:.1f} ms",
    )


def _busy(client: Client) -> Gate:
    return _gate(
        "client load",
        client.busy > BUSY,
        f"at most {BUSY:.0%} of a core in any second",
        "a busy client queues arrivals; give it more workers (--workers)",
        f"{client.busy:.0%} of a core at worst, {client.workers} worker{'s' * (client.workers > 1)}",
    )


def _rate(derived: Derived) -> Gate:
    events = derived.events
    limit = f"within {RATE_SHARE:.0%} of the schedule"
    reason = "an open loop that does not keep its schedule is a closed one"
    sent = events.sent >= 0
    span = int(np.ptp(events.scheduled[sent])) if sent.sum() > 1 else 0
    if not span:
        return _skipped("rate kept", limit, reason, "fewer than two requests were sent")
    reached = int(np.ptp(events.sent[sent] - events.connect[sent])) / span
    # a late connection is the server's affair, a late start the client's; so connect is taken out
    return _gate(
        "rate kept", abs(reached - 1) > RATE_SHARE, limit, reason, f"{1 / reached:.4f} of the schedule"
    )


def _in_flight(derived: Derived, window: Window, slots: int) -> Gate:
    limit = f"mean at least {IN_FLIGHT_SHARE:.0%} of {slots}, never above"
    reason = "the load point is this number of requests in flight"
    if slots == 1 or not window.seconds:
        return _skipped("in flight", limit, reason, "serial, or fewer requests than slots")
    mean, most = in_flight(derived.events, window)
    bad = most > slots or mean < IN_FLIGHT_SHARE * slots
    return _gate("in flight", bad, limit, reason, f"mean {mean:.2f}, most {most}")


def _died(client: Client) -> Gate:
    return _gate(
        "endpoint alive",
        client.stopped == "died under load",
        "answers connections to the end",
        "after the endpoint died nothing else can be learned",
        client.stopped or "alive",
    )


def _interrupted(client: Client) -> Gate:
    return _gate(
        "not interrupted",
        client.stopped == "interrupted",
        "runs to its planned end",
        "fewer requests than planned; what ended before the interrupt counts",
        client.stopped or "ran to its end",
        Verdict.FLAG,
    )


def _client_failures(derived: Derived) -> Gate:
    ours = [error for error in derived.events.error if error.startswith(Failure.CLIENT)]
    return _gate(
        "client resources",
        bool(ours),
        "no request fails for want of files or ports",
        "such a failure says nothing of the server",
        f"{len(ours)} requests: {ours[0]}" if ours else "none",
    )


def _failures(derived: Derived) -> Gate:
    events = derived.events
    n, failed = len(events), int((~events.ok).sum())
    kinds = Counter(error.split(":")[0] for error in events.error if error)
    words = ", ".join(f"{kind} × {count}" for kind, count in kinds.most_common(3)) or "none"
    return _gate(
        "failures",
        not n or failed / n > FAILED_SHARE,
        f"at most {FAILED_SHARE:.0%} of the requests",
        "the survivors of an overloaded server look fast",
        f"{failed} of {n}: {words}",
    )


def _rows(bad: np.ndarray) -> str:
    numbers = np.flatnonzero(bad)
    shown = ", ".join(str(i) for i in numbers[:5])
    return f"{len(numbers)} requests (rows {shown}{', …' if len(numbers) > 5 else ''})"


def _counts(derived: Derived) -> Gate:
    events = derived.events
    ok = events.ok
    owner = events.chunk_owner()
    n = len(events)
    known = np.bincount(owner[events.chunk_tokens == UNKNOWN_TOKENS], minlength=n) == 0
    sums = np.bincount(owner, weights=np.maximum(events.chunk_tokens, 0), minlength=n)
    many = np.bincount(owner, minlength=n)
    split_exact = np.array([s in (TokenSource.IDS, TokenSource.USAGE) for s in events.chunk_source], bool)
    # an end token may be counted in the total and shown in no chunk
    off = ok & known & split_exact & (many > 0) & ~np.isin(events.completion_tokens - sums, (0, 1))
    thoughts = ok & (events.reasoning_tokens > events.completion_tokens)
    over = ok & (events.asked_tokens != MISSING) & (events.completion_tokens > events.asked_tokens)
    found = []
    if off.any():
        found.append(f"chunks and total differ in {_rows(off)}")
    if thoughts.any():
        found.append(f"more reasoning than output tokens in {_rows(thoughts)}")
    if over.any():
        found.append(f"more tokens than asked for in {_rows(over)}")
    return _gate(
        "token counts",
        bool(found),
        "sources agree; reasoning and asked tokens are not exceeded",
        "a wrong count bends every figure per token",
        "; ".join(found) or "agree",
    )


def _input_length(derived: Derived) -> Gate:
    events = derived.events
    known = events.ok & (events.input_tokens > 0) & (events.prompt_tokens >= 0)
    limit = f"the server's count within {INPUT_SHARE:.0%} (or 1 token) of what was sent"
    reason = "a shortened prompt is another, easier request"
    if not known.any():
        return _skipped("input length", limit, reason, "input lengths not known on both sides")
    sent, got = events.input_tokens[known], events.prompt_tokens[known]
    off = np.abs(got - sent) > np.maximum(1, INPUT_SHARE * sent)
    worst = int(np.argmax(np.abs(got - sent)))
    evidence = f"{int(off.sum())} of {len(off)} off; sent {sent[worst]}, counted {got[worst]} at worst"
    return _gate("input length", bool(off.any()), limit, reason, evidence)


def _output_length(derived: Derived) -> Gate:
    events = derived.events
    fixed = events.ok & (events.exact_tokens == 1)
    limit = f"total within {LENGTH_SHARE:.0%} of what was asked for"
    reason = "shorter answers look faster; use --max-output-tokens where the server can't be told"
    if not fixed.any():
        return _skipped("output length", limit, reason, "natural lengths were asked for")
    asked, got = int(events.asked_tokens[fixed].sum()), int(events.completion_tokens[fixed].sum())
    bad = abs(got - asked) > LENGTH_SHARE * asked
    return _gate("output length", bad, limit, reason, f"{got} of {asked} tokens")


def _buffered(derived: Derived) -> Gate:
    ok = derived.events.ok
    long = ok & (derived.events.completion_tokens >= BUFFERED_TOKENS)
    at_once = long & ((derived.n_groups <= 1) | (derived.tpot < LEAST_TPOT_MS))
    bad = ok.any() and at_once.sum() / ok.sum() > FAILED_SHARE
    return _gate(
        "not buffered",
        bool(bad),
        f"answers of {BUFFERED_TOKENS} tokens and more take more than {LEAST_TPOT_MS:g} ms a token",
        "a server that keeps its answer back shows no TTFT and no decode time",
        _rows(at_once) if at_once.any() else "streamed",
    )


def _few_chunks(derived: Derived) -> Gate:
    ok = derived.events.ok & (derived.n_groups > 1)
    groups = int(derived.n_groups[ok].sum())
    tokens = int(derived.events.completion_tokens[ok].sum())
    each = tokens / groups if groups else 0.0
    return _gate(
        "chunk size",
        each > BUFFERED_TOKENS,
        f"at most {BUFFERED_TOKENS} tokens an arrival on average",
        "most tokens arrived inside few chunks (such as a buffered tool call): no ITL from this",
        f"{each:.2f} tokens an arrival",
        Verdict.FLAG,
    )


def token_sources(derived: Derived) -> dict[str, float]:
    """Share of the successful requests by the source of their token counts."""
    sources = Counter(s for s, ok in zip(derived.events.token_source, derived.events.ok, strict=True) if ok)
    return {source: count / sources.total() for source, count in sources.most_common()}


def _sources(derived: Derived) -> Gate:
    shares = token_sources(derived)
    guessed = {TokenSource.CHUNKS, TokenSource.TOKENIZER} & shares.keys()
    return _gate(
        "token source",
        len(shares) > 1 or bool(guessed),
        "one source, and the server's own",
        "counts of unlike sources differ, and chunks are not tokens",
        ", ".join(f"{source} {share:.0%}" for source, share in shares.items()) or "none",
        Verdict.FLAG,
    )


def _restarted(server: Server) -> Gate:
    limit, reason = "counters never fall", "a server that restarted is another launch"
    if not server.counters and not server.restarted:
        return _skipped("server restarted", limit, reason, "no counters")
    return _gate("server restarted", server.restarted, limit, reason, "fell" if server.restarted else "rose")


def _server_counts(derived: Derived, server: Server) -> Gate:
    limit = f"within {COUNTER_SHARE:.0%} of the server's own counter"
    reason = "another client shares the server, or one of the two counts is wrong"
    told = server.counters.get("generated_tokens")
    ours = int(np.maximum(derived.events.completion_tokens[derived.events.ok], 0).sum())
    if told is None or not derived.events.ok.all():
        return _skipped("server counters", limit, reason, "no counter, or failed requests")
    bad = abs(told - ours) > COUNTER_SHARE * max(ours, 1)
    return _gate(
        "server counters", bad, limit, reason, f"server {told:.0f}, here {ours} tokens", Verdict.FLAG
    )


def _repeats(derived: Derived) -> Gate:
    prompts = derived.events.prompt
    repeated = len(prompts) - len(np.unique(prompts))
    hit = derived.events.cached_tokens[derived.events.cached_tokens >= 0].sum()
    return _gate(
        "prompts differ",
        bool(repeated),
        "each prompt is sent once",
        "a repeated prompt may be answered from the prefix cache",
        f"{repeated} of {len(prompts)} requests repeat a prompt; {hit} prompt tokens were cached",
        Verdict.FLAG,
    )
