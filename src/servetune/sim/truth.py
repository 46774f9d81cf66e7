"""What a perfect client must measure for a stream, worked out from the script alone.

Definitions as everywhere in servetune: an arrival group is all events of one write (equal completion
time); TTFT is the first group with a token of any kind; TPOT = (t_last - t_first)/(n_out - n_1).
Times are ms after receipt. On loopback the time from send to receipt is well below 0.1 ms.
"""

from __future__ import annotations

import itertools

from msgspec import Struct

from servetune.sim.frames import Ask
from servetune.sim.layout import lay_out
from servetune.sim.script import Kind, Stream


class Group(Struct, frozen=True):
    """Events completed by one write; `tokens` is their sum, `events` their (tokens, kind)."""

    at_ms: float
    tokens: int
    events: tuple[tuple[int, Kind], ...]


class Truth(Struct, frozen=True):
    """Expected values of one stream (ms after receipt, ms, ms per token); None where there is none.

    `groups` holds every group, `token_groups` those with tokens. `complete`: `[DONE]` or a finish
    reason was sent and no error. `done_ms` is the end of a complete stream: `[DONE]`, or the end of the body.
    """

    first_byte_ms: float | None
    groups: tuple[Group, ...]
    first_ms: float | None
    answer_ms: float | None
    last_ms: float | None
    done_ms: float | None
    complete: bool
    n_out: int
    n_reason: int
    n_1: int

    @property
    def token_groups(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.tokens)

    @property
    def gaps_ms(self) -> list[float]:
        """Chunk gaps between token groups."""
        times = [group.at_ms for group in self.token_groups]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def ttft_ms(self) -> float | None:
        return self.first_ms

    @property
    def ttfa_ms(self) -> float | None:
        """Time to the first text or tool call."""
        return self.answer_ms

    @property
    def tpot_ms(self) -> float | None:
        if self.first_ms is None or self.last_ms is None or self.n_out <= self.n_1:
            return None
        return (self.last_ms - self.first_ms) / (self.n_out - self.n_1)

    @property
    def e2e_ms(self) -> float | None:
        return self.done_ms


def truth(stream: Stream, ask: Ask | None = None) -> Truth:
    """The truth of `stream` for a request like `ask` (default: a chat stream that asks for no usage).

    Pieces written at one time without `with_previous` are one group here, but a fast client may see two.
    """
    layout = lay_out(stream, ask or Ask())
    reply = layout.reply
    groups: list[Group] = []
    for arrival in layout.arrivals:
        event = (arrival.tokens, arrival.kind)
        if groups and groups[-1].at_ms == arrival.at_ms:
            tokens = groups[-1].tokens + arrival.tokens
            groups[-1] = Group(arrival.at_ms, tokens, (*groups[-1].events, event))
        else:
            groups.append(Group(arrival.at_ms, arrival.tokens, (event,)))
    counted = [group for group in groups if group.tokens]
    answers = [a.at_ms for a in layout.arrivals if a.tokens and a.kind in ("text", "tool_call")]
    complete = _complete(stream, layout.done_ms is not None)
    end = layout.done_ms
    if end is None and reply.pieces:
        end = reply.pieces[-1].at_ms if reply.end_ms is None else reply.end_ms
    head = reply.head_at_ms
    if head is None and reply.pieces:
        head = reply.pieces[0].at_ms
    return Truth(
        first_byte_ms=head,
        groups=tuple(groups),
        first_ms=counted[0].at_ms if counted else None,
        answer_ms=answers[0] if answers else None,
        last_ms=counted[-1].at_ms if counted else None,
        done_ms=end if complete else None,
        complete=complete,
        n_out=sum(group.tokens for group in counted),
        n_reason=sum(a.tokens for a in layout.arrivals if a.kind == "reasoning"),
        n_1=counted[0].tokens if counted else 0,
    )


def _complete(stream: Stream, sentinel: bool) -> bool:
    """Whether a client may count the stream as a success."""
    if stream.error_at is not None or stream.status != 200:
        return False
    if stream.stop_after is not None and stream.stop_after <= len(stream.chunks):
        return False
    if stream.end in ("hang", "exit") and not sentinel:
        return False
    return sentinel or stream.finish_in != "none"
