"""What follows from the event columns for each request. Definitions: docs/metrics.md.

All times here are float ms; NaN where a value does not exist (never 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servetune.clock import MS, SECOND
from servetune.events import MISSING, UNKNOWN_TOKENS, Events, Kind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Arrival groups: chunks with tokens that one read of the socket completed, shape (groups,).

    owner   row of the request
    time    arrival, ns
    tokens  tokens of the group, -1 when one of its chunks is not known
    first   True for the first group of its request
    """

    owner: Ints
    time: Ints
    tokens: Ints
    first: npt.NDArray[np.bool_]

    @property
    def gap(self) -> Floats:
        """Chunk gap before each group, ms; NaN for the first of a request."""
        gap = np.full(len(self.time), np.nan)
        gap[1:] = np.diff(self.time) / MS
        gap[self.first] = np.nan
        return gap


def groups_of(events: Events) -> Groups:
    """Arrival groups of all requests, in order of request and time.

    Role, keep-alive, usage and finish frames carry no token and belong to no group.
    """
    carries = _carries(events)
    owner = events.chunk_owner()[carries]
    time = events.chunk_time[carries]
    tokens = events.chunk_tokens[carries].astype(np.int64)
    if not len(owner):
        empty = np.zeros(0, np.int64)
        return Groups(empty, empty, empty, np.zeros(0, bool))
    new_owner = np.r_[True, np.diff(owner) != 0]
    starts = np.flatnonzero(new_owner | np.r_[True, np.diff(time) != 0])
    unknown = np.add.reduceat(tokens == UNKNOWN_TOKENS, starts) > 0
    sums = np.where(unknown, UNKNOWN_TOKENS, np.add.reduceat(tokens, starts))
    return Groups(owner[starts], time[starts], sums, new_owner[starts])


@dataclass(frozen=True)
class Derived:
    """One value a request, shape (n,); ms unless said otherwise.

    ttft          to the first token of any kind, from `scheduled` (open loop) or `sent`
    ttfa          to the first token of the answer proper (text, tool call), from the same start
    tpot          (t_last - t_first) / (n_out - n_1)
    decode        t_last - t_first
    decode_tokens n_out - n_1, the tokens that arrived during `decode`
    approximate   n_1 was not known and taken as 1, so tpot is approximate
    e2e           to the end of the stream, from the same start
    service       t_done - t_sent
    lag           client lag: t_sent - t_scheduled without the time to open a connection
    worst_stall   largest chunk gap
    n_groups      arrival groups
    steps         decode steps after the first token; NaN where they can't be known
    """

    events: Events
    groups: Groups
    ttft: Floats
    ttfa: Floats
    tpot: Floats
    decode: Floats
    decode_tokens: Floats
    approximate: npt.NDArray[np.bool_]
    e2e: Floats
    service: Floats
    lag: Floats
    worst_stall: Floats
    n_groups: Ints
    steps: Floats


def derive(events: Events, *, open_loop: bool, chunk_is_step: bool = False) -> Derived:
    """Derive all per-request values.

    `open_loop` decides where latency starts; `chunk_is_step`: the server streams one chunk a step.
    """
    n = len(events)
    groups = groups_of(events)
    start = events.scheduled if open_loop else events.sent
    n_groups = np.bincount(groups.owner, minlength=n)
    has = n_groups > 0
    first = np.full(n, MISSING, np.int64)
    last = np.full(n, MISSING, np.int64)
    n_first = np.zeros(n, np.int64)
    first[groups.owner[groups.first]] = groups.time[groups.first]
    n_first[groups.owner[groups.first]] = groups.tokens[groups.first]
    final = np.r_[groups.first[1:], True] if len(groups.first) else groups.first
    last[groups.owner[final]] = groups.time[final]

    unknown = np.zeros(n, bool)
    unknown[groups.owner[groups.tokens == UNKNOWN_TOKENS]] = True
    n_first = np.where(unknown & has, 1, n_first)
    decode = np.where(has, (last - first) / MS, np.nan)
    decode_tokens = np.where(has, events.completion_tokens - n_first, 0).astype(float)
    usable = (n_groups > 1) & (decode_tokens > 0)
    tpot = np.full(n, np.nan)
    np.divide(decode, decode_tokens, out=tpot, where=usable)
    worst = np.full(n, np.nan)
    gap = groups.gap
    inner = ~groups.first
    if inner.any():
        largest = np.zeros(n)
        np.maximum.at(largest, groups.owner[inner], gap[inner])
        worst = np.where(n_groups > 1, largest, np.nan)
    return Derived(
        events=events,
        groups=groups,
        ttft=_since(first, start),
        ttfa=_since(_first_answer(events), start),
        tpot=tpot,
        decode=np.where(usable, decode, 0.0),
        decode_tokens=np.where(usable, decode_tokens, 0.0),
        approximate=unknown,
        e2e=_since(events.done, start),
        service=_since(events.done, events.sent),
        lag=_since(events.sent, events.scheduled) - events.connect / MS,
        worst_stall=worst,
        n_groups=n_groups,
        steps=_steps(events, chunk_is_step=chunk_is_step),
    )


def _steps(events: Events, *, chunk_is_step: bool) -> Floats:
    """Decode steps of each request.

    A step gives one token beside its accepted drafts, so there are n_out - 1 - accepted of them (the
    first token is prefill's), or more: an engine may count drafts accepted beyond the last token asked
    for. Where each chunk is a step, chunks count them, or fewer: several may be merged in one.
    """
    by_counts = np.where(events.accepted >= 0, events.completion_tokens - 1.0 - events.accepted, np.nan)
    if not chunk_is_step:
        return by_counts
    carrying = events.chunk_owner()[_carries(events)]
    by_chunks = np.bincount(carrying, minlength=len(events)) - 1.0
    return np.fmax(by_counts, np.where(by_chunks >= 0, by_chunks, np.nan))


def _carries(events: Events) -> npt.NDArray[np.bool_]:
    """Which chunks carry tokens, known or not."""
    unknown = (events.chunk_tokens == UNKNOWN_TOKENS) & (events.chunk_kind != Kind.EMPTY)
    carries: npt.NDArray[np.bool_] = (events.chunk_tokens > 0) | unknown
    return carries


def _since(moment: Ints, start: Ints) -> Floats:
    """`moment - start` in ms, NaN where either is missing."""
    return np.where((moment >= 0) & (start >= 0), (moment - start) / MS, np.nan)


def _first_answer(events: Events) -> Ints:
    """Arrival of the first chunk of text or tool call that carries a token, ns."""
    kinds = events.chunk_kind
    proper = ((kinds == Kind.TEXT) | (kinds == Kind.TOOL_CALL)) & (events.chunk_tokens != 0)
    owner, first = np.unique(events.chunk_owner()[proper], return_index=True)
    moments = np.full(len(events), MISSING, np.int64)
    moments[owner] = events.chunk_time[proper][first]
    return moments


def token_gaps(derived: Derived) -> tuple[Floats, Floats]:
    """ITL samples of the successful requests as (value ms, weight in tokens).

    A gap g before a group of k tokens gives k samples of g / k; the first group of a request gives
    none. A request in which the tokens of some chunk are not known gives none (P-14).
    """
    groups = derived.groups
    owner_ok = derived.events.ok & ~derived.approximate
    counts = ~groups.first & owner_ok[groups.owner]
    tokens = groups.tokens[counts].astype(float)
    return groups.gap[counts] / tokens, tokens


def output_rate(events: Events, start: int, end: int, bins: int) -> Floats:
    """Output tokens per second by arrival time in equal bins of [start, end) ns, shape (bins,).

    Chunks of unknown tokens share what their request has left.
    """
    tokens = chunk_shares(events)
    inside = (events.chunk_time >= start) & (events.chunk_time < end)
    place = (events.chunk_time[inside] - start) * bins // (end - start)
    counted = np.bincount(place, weights=tokens[inside], minlength=bins)
    rate: Floats = counted / ((end - start) / SECOND / bins)
    return rate


def chunk_shares(events: Events) -> Floats:
    """Tokens of each chunk; where the split is not known, an equal share of the request's tokens."""
    tokens = events.chunk_tokens.astype(float)
    unknown = (events.chunk_tokens == UNKNOWN_TOKENS) & (events.chunk_kind != Kind.EMPTY)
    if unknown.any():
        owner = events.chunk_owner()[unknown]
        many = np.bincount(owner, minlength=len(events))
        tokens[unknown] = events.completion_tokens[owner] / many[owner]
    shares: Floats = np.maximum(tokens, 0.0)
    return shares
