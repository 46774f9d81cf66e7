"""Replies ready to send, kept: rendering a long stream takes milliseconds, in which nothing is on time."""

from __future__ import annotations

from msgspec import Struct

from servetune.sim.frames import Ask, draft_depth
from servetune.sim.layout import Arrival, lay_out
from servetune.sim.pages import Counters
from servetune.sim.script import Reply, Script, Stream
from servetune.sim.wire import Wire, encode

_KEPT = 512


class Step(Struct):
    """What the pieces of one write add to the counters."""

    tokens: int = 0
    draft_steps: int = 0
    accepted_drafts: int = 0
    proposed_drafts: int = 0


class Rendered(Struct):
    """A reply as socket writes, and the tokens in each piece by its number."""

    wire: Wire
    steps: dict[int, Step]
    prompt_tokens: int = 0

    def piece_sent(self, counters: Counters, piece: int) -> None:
        """Add the tokens of a piece to the counters."""
        step = self.steps.get(piece)
        if step is not None:
            counters.generation_tokens += step.tokens
            counters.draft_steps += step.draft_steps
            counters.accepted_drafts += step.accepted_drafts
            counters.proposed_drafts += step.proposed_drafts


class Renderer:
    """Renders the replies of one script; the last few hundred are kept."""

    def __init__(self, script: Script) -> None:
        self._limit = script.honour_max_tokens
        # By identity, as streams are not hashable: the script keeps them alive.
        self._kept: dict[tuple[int, Ask, bool, bool], Rendered] = {}

    def render(self, reply: Stream | Reply, ask: Ask, *, keep_alive: bool, http10: bool) -> Rendered:
        """The reply to a request like `ask`; `reply` must belong to the script."""
        key = (id(reply), ask, keep_alive, http10)
        found = self._kept.get(key)
        if found is None:
            found = self._fresh(reply, ask, keep_alive, http10)
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = found
        return found

    def _fresh(self, reply: Stream | Reply, ask: Ask, keep_alive: bool, http10: bool) -> Rendered:
        if isinstance(reply, Reply):
            return Rendered(encode(reply, keep_alive=keep_alive, http10=http10), {})
        stream = reply
        if self._limit and ask.max_tokens is not None:
            stream = stream.limited(ask.max_tokens)
        layout = lay_out(stream, ask)
        wire = encode(layout.reply, keep_alive=keep_alive, http10=http10)
        if ask.stream:
            steps = _steps(layout.arrivals, draft_depth(stream))
        else:
            steps = {0: Step(sum(chunk.k for chunk in stream.chunks))}
        prompt = ask.prompt_tokens if stream.prompt_tokens is None else stream.prompt_tokens
        return Rendered(wire, steps, prompt)


def _steps(arrivals: tuple[Arrival, ...], depth: int) -> dict[int, Step]:
    """A chunk of k tokens is a verify step that accepted k - 1 drafts; the first is the prefill's."""
    steps: dict[int, Step] = {}
    begun = False
    for arrival in arrivals:
        if not arrival.tokens:
            continue
        step = steps.setdefault(arrival.piece, Step())
        step.tokens += arrival.tokens
        if begun and depth:
            step.draft_steps += 1
            step.accepted_drafts += arrival.tokens - 1
            step.proposed_drafts += depth
        begun = True
    return steps
