"""The events of a stream: JSON payloads with their times and token counts, before any framing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from servetune.sim.script import COUNTED, Chunk, Kind, Stream, error_body

Api = Literal["chat", "completions"]

CREATED = 1_700_000_000
_WORDS = (
    *("the", "river", "runs", "past", "old", "stone", "houses", "while", "a", "quiet", "wind"),
    *("moves", "over", "green", "hills", "and", "far", "fields", "where", "people", "walk", "home"),
)


class Ask(Struct, frozen=True):
    """What matters of a request: `max_tokens` is None when it set no limit."""

    api: Api = "chat"
    model: str = "scripted"
    stream: bool = True
    include_usage: bool = False
    max_tokens: int | None = None
    prompt_tokens: int = 0

    @classmethod
    def of(cls, body: dict[str, Any], api: Api, model: str) -> Ask:
        """Read the fields of a request body; wrong types count as not given."""
        options = body.get("stream_options")
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        return cls(
            api=api,
            model=model,
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            max_tokens=limit if isinstance(limit, int) and not isinstance(limit, bool) else None,
            prompt_tokens=_words(body.get("messages" if api == "chat" else "prompt")),
        )


def _words(prompt: Any) -> int:
    """Words of a prompt or of all messages; a list of token ids counts its ids."""
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, dict):
        return _words(prompt.get("content", prompt.get("text")))
    if isinstance(prompt, list):
        return sum(1 if isinstance(part, int) else _words(part) for part in prompt)
    return 0


class Event(Struct, frozen=True, gc=False):
    """One server-sent event: `payload` at `at_ms`, in the write of the event before it if `joined`."""

    at_ms: float
    payload: bytes
    tokens: int = 0
    kind: Kind = "empty"
    joined: bool = False


class Payloads:
    """Builds the JSON of one stream's frames, in order; keeps the running counts."""

    def __init__(self, stream: Stream, ask: Ask) -> None:
        self._stream = stream
        self._ask = ask
        self._first = True
        self._tool_begun = False
        self._position = 0
        self._reasoning = 0
        self._first_token_ms: float | None = None
        self.prompt_tokens = ask.prompt_tokens if stream.prompt_tokens is None else stream.prompt_tokens

    def chunk(self, chunk: Chunk, at_ms: float, finish_reason: str | None = None) -> bytes:
        """The frame of one chunk."""
        k = chunk.k
        ids = list(range(1000 + self._position, 1000 + self._position + k))
        text = chunk.text
        if text is None:
            text = words(self._position, k) if chunk.kind in COUNTED else ""
        self._position += k
        self._reasoning += k if chunk.kind == "reasoning" else 0
        if k and self._first_token_ms is None:
            self._first_token_ms = at_ms
        choice = self._choice(chunk.kind, text, finish_reason)
        return self._frame(choice, ids, at_ms, finish_reason is not None)

    def role(self, at_ms: float) -> bytes:
        """The frame that only names the role."""
        return self._frame(self._choice("role", "", None), [], at_ms, False)

    def finish(self, at_ms: float, reason: str) -> bytes:
        """The frame that has no text but the reason of the end."""
        return self._frame(self._choice("empty", "", reason), [], at_ms, True)

    def usage(self) -> bytes:
        """The last frame: no choices, final usage."""
        return msgspec.json.encode({**self._head(), "choices": [], "usage": self._usage(final=True)})

    def whole(self, chunks: tuple[Chunk, ...], reason: str) -> bytes:
        """The body of an answer that is not streamed."""
        parts: dict[str, str] = {"text": "", "reasoning": "", "tool_call": ""}
        for chunk in chunks:
            made = words(self._position, chunk.k) if chunk.text is None else chunk.text
            if chunk.kind in parts:
                parts[chunk.kind] += made
            self._position += chunk.k
            self._reasoning += chunk.k if chunk.kind == "reasoning" else 0
        choice: dict[str, Any] = {"index": 0}
        if self._ask.api == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": parts["text"]}
            if parts["reasoning"]:
                message[self._stream.reasoning_field] = parts["reasoning"]
            if parts["tool_call"]:
                message["tool_calls"] = [_tool_call(parts["tool_call"], begin=True)]
            choice["message"] = message
        else:
            choice["text"] = "".join(parts.values())
        choice |= {"logprobs": None, "finish_reason": reason}
        if self._stream.ids:
            choice["token_ids"] = list(range(1000, 1000 + self._position))
        body = {**self._head(), "choices": [choice]}
        body["object"] = str(body["object"]).removesuffix(".chunk")
        if self._stream.usage != "none":
            body["usage"] = self._usage(final=True)
        return msgspec.json.encode(body)

    def _head(self) -> dict[str, Any]:
        chat = self._ask.api == "chat"
        return {
            "id": "chatcmpl-scripted" if chat else "cmpl-scripted",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": CREATED,
            "model": self._ask.model,
        }

    def _choice(self, kind: Kind, text: str, finish_reason: str | None) -> dict[str, Any]:
        if self._ask.api == "completions":
            return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        delta: dict[str, Any] = {"content": text}
        if kind == "role":
            delta = {"role": "assistant", "content": ""}
        elif kind == "reasoning":
            beside: dict[str, dict[str, Any]] = {
                "absent": {},
                "null": {"content": None},
                "empty": {"content": ""},
            }
            delta = beside[self._stream.reasoning_beside] | {self._stream.reasoning_field: text}
        elif kind == "tool_call":
            delta = {"tool_calls": [_tool_call(text, begin=not self._tool_begun)]}
            self._tool_begun = True
        elif kind == "empty":
            delta = {"content": text} if text else {}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _frame(self, choice: dict[str, Any], ids: list[int], at_ms: float, last: bool) -> bytes:
        frame = {**self._head(), "choices": [choice]}
        if self._stream.ids:
            choice["token_ids"] = ids
            if self._first:
                # vLLM: beside the choices in chat, inside the choice in completions.
                holder = frame if self._ask.api == "chat" else choice
                holder["prompt_token_ids"] = list(range(self.prompt_tokens))
        self._first = False
        if self._stream.usage == "each":
            frame["usage"] = self._usage(final=last)
        if self._stream.timings == "each" or (self._stream.timings == "last" and last):
            frame["timings"] = self._timings(at_ms, last)
        return msgspec.json.encode(frame)

    def _usage(self, final: bool) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self._position,
            "completion_tokens": self._position,
        }
        if self._reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning}
        return usage | (self._stream.usage_override or {}) if final else usage

    def _timings(self, at_ms: float, last: bool) -> dict[str, Any]:
        first = at_ms if self._first_token_ms is None else self._first_token_ms
        timings: dict[str, Any] = {"cache_n": 0}
        spans = (("prompt", self.prompt_tokens, first), ("predicted", self._position, at_ms - first))
        for name, count, span in spans:
            timings[f"{name}_n"] = count
            timings[f"{name}_ms"] = span
            timings[f"{name}_per_token_ms"] = span / count if count else 0.0
            timings[f"{name}_per_second"] = 1000 * count / span if span else 0.0
        if last:
            _, accepted, drafted = draft_counts(self._stream)
            if accepted or self._stream.draft_tokens:
                timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
        return timings


def words(start: int, count: int) -> str:
    """`count` words, the first of them number `start`; each begins with a space, as tokens do."""
    return "".join(f" {_WORDS[index % len(_WORDS)]}" for index in range(start, start + count))


def draft_depth(stream: Stream) -> int:
    """Draft tokens per verify step."""
    if stream.draft_tokens is not None:
        return stream.draft_tokens
    return max((chunk.k - 1 for chunk in stream.chunks), default=0)


def draft_counts(stream: Stream) -> tuple[int, int, int]:
    """Verify steps, accepted drafts, proposed drafts: each counted chunk after the first is one step."""
    steps = [chunk.k for chunk in stream.chunks if chunk.k][1:]
    return len(steps), sum(steps) - len(steps), len(steps) * draft_depth(stream)


def _tool_call(arguments: str, begin: bool) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": arguments} if begin else {"arguments": arguments}
    head = {"index": 0, "id": "call-1", "type": "function"} if begin else {"index": 0}
    return {**head, "function": function}


def events(stream: Stream, ask: Ask) -> list[Event]:
    """All events of a stream in order, with the sentinel, as the script wants them."""
    payloads = Payloads(stream, ask)
    out: list[Event] = []
    if stream.role_frame and ask.api == "chat":
        out.append(Event(stream.role_at_ms, payloads.role(stream.role_at_ms), kind="role"))
    times = stream.chunk_times()
    limits = [n for n in (stream.error_at, stream.stop_after) if n is not None]
    sent = min([len(stream.chunks), *limits])
    for index, (chunk, at) in enumerate(zip(stream.chunks[:sent], times[:sent], strict=True)):
        ends = stream.finish_in == "last_chunk" and index == len(stream.chunks) - 1
        payload = payloads.chunk(chunk, at, stream.finish_reason if ends else None)
        out.append(Event(at, payload, chunk.k, chunk.kind, chunk.with_previous and bool(out)))
    if stream.stop_after is not None and stream.stop_after == sent:
        return out
    last = times[sent - 1] if sent else (stream.role_at_ms if stream.role_frame else 0.0)
    if stream.error_at is not None:
        at = times[sent] if sent < len(times) else last
        out.append(Event(at, msgspec.json.encode(error_body(500, "scripted error"))))
    else:
        at = _closing_frames(stream, ask, payloads, last, out)
    if stream.done:
        out.append(Event(at + stream.done_gap_ms, b"[DONE]"))
    return out


def _closing_frames(stream: Stream, ask: Ask, payloads: Payloads, last: float, out: list[Event]) -> float:
    """Append finish and usage frames; the time of the last one."""
    at = last + stream.finish_gap_ms if stream.finish_at_ms is None else stream.finish_at_ms
    if stream.finish_at_ms is None and stream.stall_after == len(stream.chunks):
        at += stream.stall_ms
    if stream.finish_in == "frame":
        out.append(Event(at, payloads.finish(at, stream.finish_reason)))
    if stream.usage != "none" and (ask.include_usage or stream.usage_always):
        at += stream.usage_gap_ms
        out.append(Event(at, payloads.usage()))
    return at


def whole_body(stream: Stream, ask: Ask) -> tuple[float, bytes]:
    """Time (ms) and body of the answer to a request that asked for no stream."""
    end = events(stream, ask)[-1:]
    payload = Payloads(stream, ask).whole(stream.chunks, stream.finish_reason)
    return (end[0].at_ms if end else 0.0), payload
