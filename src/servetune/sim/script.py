"""What the scripted server sends: replies as socket writes at given times, and streams that render to them.

All times are milliseconds after the request was received in full (with `Script.slots`: after its service
began). Everything is a frozen `msgspec.Struct`, so a script is also a JSON file:
`msgspec.json.decode(data, type=Script)`; bytes are base64 there.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

if TYPE_CHECKING:
    from servetune.sim.frames import Ask
    from servetune.sim.truth import Truth

Transfer = Literal["chunked", "identity", "length"]
End = Literal["normal", "close_early", "reset", "hang", "exit"]
Kind = Literal["text", "reasoning", "tool_call", "empty", "role"]
Eol = Literal["\n", "\r\n", "\r"]

COUNTED: tuple[Kind, ...] = ("text", "reasoning", "tool_call")


class Piece(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One socket write: `data` at `at_ms` (ms after receipt)."""

    at_ms: float
    data: bytes


class Reply(Struct, frozen=True, forbid_unknown_fields=True, tag="reply"):
    """One HTTP answer, write by write.

    `pieces` are body bytes before gzip and transfer encoding; their times must not fall.
    `end` happens at `end_ms`, or right after the last write:
    `normal` ends the body properly (identity: closes), `close_early` closes without the end of the body,
    `reset` sends RST, `hang` leaves the connection open for ever, `exit` stops the whole server.
    `transfer="length"` with another end than `normal` announces one byte more than is ever sent.
    `head_at_ms`: status line and headers as a write of their own; without it they go with the first piece.
    `accept_delay_ms`: if this is the reply that is next in turn when a connection opens, the server does
    not read from that connection for so long.
    `raw`: the pieces are sent verbatim, with no HTTP framing; `normal` then closes.
    Raises ValueError when times fall or the status is no HTTP status.
    """

    status: int = 200
    headers: dict[str, str] = {}
    pieces: tuple[Piece, ...] = ()
    transfer: Transfer = "length"
    gzip: bool = False
    end: End = "normal"
    end_ms: float | None = None
    head_at_ms: float | None = None
    accept_delay_ms: float = 0.0
    raw: bool = False

    def __post_init__(self) -> None:
        if not 100 <= self.status <= 999:
            raise ValueError(f"status {self.status} is not an HTTP status")
        times = [self.head_at_ms or 0.0, *(piece.at_ms for piece in self.pieces)]
        if self.end_ms is not None:
            times.append(self.end_ms)
        _check_order(times, "reply")


class Chunk(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One event of a stream, `gap_ms` after the previous chunk (the first: after receipt).

    `tokens`: None means 1, or 0 for the kinds `empty` and `role`. `text`: None means one word per token.
    `with_previous` puts the event into the same write as the event before it; `gap_ms` must then be 0.
    """

    gap_ms: float = 0.0
    tokens: int | None = None
    text: str | None = None
    kind: Kind = "text"
    with_previous: bool = False

    def __post_init__(self) -> None:
        if self.gap_ms < 0 or (self.tokens or 0) < 0:
            raise ValueError("gap_ms and tokens must not be negative")
        if self.with_previous and self.gap_ms:
            raise ValueError("a chunk in the same write as the previous one has gap_ms 0")

    @property
    def k(self) -> int:
        """Tokens in this chunk."""
        if self.tokens is None:
            return 1 if self.kind in COUNTED else 0
        return self.tokens


class Stream(Struct, frozen=True, forbid_unknown_fields=True, tag="stream", kw_only=True):
    """A streamed completion, described by tokens and times. The request's path picks chat or completions.

    A request without `"stream": true` gets the same text as one JSON body at the time of the end.

    Times (ms). `ttft_ms`, when given, replaces the gap of the first chunk. `role_frame` (chat only) is sent
    at `role_at_ms`. The finish frame comes at `finish_at_ms`, or `finish_gap_ms` after the last chunk;
    `finish_in="last_chunk"` puts the reason into the last chunk (vLLM), `"none"` never sends one. The usage
    frame follows in `usage_gap_ms`, `[DONE]` in `done_gap_ms`. `stall_ms` is added after
    `stall_after` chunks.

    Counts. `ids`: `token_ids` in each choice, `prompt_token_ids` in the first frame (vLLM). `usage`: `last`
    is a frame with no choices, sent when the request asked `include_usage` or `usage_always` is set; `each`
    has cumulative usage in every frame, asked or not, and `last` too. `usage_override` is laid over the final
    usage, so that tests can lie. `timings` are llama.cpp's, in the last frame or cumulative in each.
    `draft_tokens`: drafts per verify step for the counters, by default the largest chunk less one.
    `prompt_tokens`: None counts the words of the prompt.

    Framing. `split` cuts each write into writes of so many bytes (of body, also inside a character),
    `split_gap_ms` apart. `comments`: a comment as first write, and one before every later event.

    Faults. `error_at`: after so many chunks an `{"error": ...}` event, then `[DONE]` if `done`.
    `stop_after`: after so many chunks nothing but `end`, `end_gap_ms` later. Without it `end` comes last.
    Raises ValueError when times fall or a number is negative.
    """

    chunks: tuple[Chunk, ...] = ()
    ttft_ms: float | None = None

    role_frame: bool = False
    role_at_ms: float = 0.0
    finish_reason: str = "stop"
    finish_in: Literal["frame", "last_chunk", "none"] = "frame"
    finish_at_ms: float | None = None
    finish_gap_ms: float = 0.0
    usage_gap_ms: float = 0.0
    done: bool = True
    done_gap_ms: float = 0.0

    ids: bool = False
    usage: Literal["none", "last", "each"] = "last"
    usage_always: bool = False
    usage_override: dict[str, Any] | None = None
    timings: Literal["none", "last", "each"] = "none"
    draft_tokens: int | None = None
    prompt_tokens: int | None = None
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    reasoning_beside: Literal["absent", "null", "empty"] = "absent"

    eol: Eol = "\n"
    comments: bool = False
    multiline_data: bool = False
    space_after_colon: bool = True
    event_field: bool = False
    bom: bool = False
    split: int | None = None
    split_gap_ms: float = 0.0

    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    transfer: Literal["chunked", "identity", "length"] = "chunked"
    gzip: bool = False
    head_at_ms: float | None = None
    accept_delay_ms: float = 0.0

    error_at: int | None = None
    stop_after: int | None = None
    end: End = "normal"
    end_gap_ms: float = 0.0
    stall_after: int | None = None
    stall_ms: float = 0.0

    def __post_init__(self) -> None:
        times = self.chunk_times()
        head = self.head_at_ms or 0.0
        first = self.role_at_ms if self.role_frame else head
        _check_order([head, first, *times], "stream")
        if self.finish_at_ms is not None:
            _check_order([times[-1] if times else first, self.finish_at_ms], "finish frame")
        gaps = (self.finish_gap_ms, self.usage_gap_ms, self.done_gap_ms, self.split_gap_ms, self.stall_ms)
        if min(*gaps, self.end_gap_ms) < 0:
            raise ValueError("gaps must not be negative")
        if self.split is not None and self.split < 1:
            raise ValueError("split must be at least 1 byte")

    def chunk_times(self) -> list[float]:
        """Time of each chunk (ms after receipt)."""
        times: list[float] = []
        at = 0.0
        for index, chunk in enumerate(self.chunks):
            at += self.ttft_ms if index == 0 and self.ttft_ms is not None else chunk.gap_ms
            if index == 0 and chunk.with_previous and self.role_frame:
                at = self.role_at_ms
            if self.stall_after == index:
                at += self.stall_ms
            times.append(at)
        return times

    def limited(self, max_tokens: int) -> Stream:
        """The same stream cut after `max_tokens` tokens, with finish reason `length`."""
        if max_tokens >= sum(chunk.k for chunk in self.chunks):
            return self
        kept: list[Chunk] = []
        left = max_tokens
        for chunk in self.chunks:
            if left <= 0:
                break
            kept.append(chunk if chunk.k <= left else replace(chunk, tokens=left))
            left -= chunk.k
        return replace(self, chunks=tuple(kept), finish_reason="length")

    def truth(self, ask: Ask | None = None) -> Truth:
        """What an ideal client sees: see `servetune.sim.truth.truth`."""
        from servetune.sim.truth import truth

        return truth(self, ask)


def _check_order(times: list[float], what: str) -> None:
    if times and times[0] < 0:
        raise ValueError(f"{what}: a time is negative")
    for before, after in itertools.pairwise(times):
        if after < before:
            raise ValueError(f"{what}: time {after} ms comes after {before} ms")


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole behaviour of a server.

    The n-th accepted generation request gets the n-th reply; after the last one they start again
    (`repeat`) or the last one stays. `slots`: so many requests are served at once, the others wait in
    order; the times of a reply count from the start of its service. `honour_max_tokens` cuts streams at the
    request's `max_completion_tokens` or `max_tokens`. `known_fields`: a request with any other field is
    refused with 400. `die_above_in_flight`, `die_at_request` (from 1): the server exits on receipt.
    `metrics_text` replaces `/metrics`; `metrics_vllm` makes it speak vLLM's names.
    """

    replies: tuple[Stream | Reply, ...]
    repeat: bool = True
    slots: int | None = None
    honour_max_tokens: bool = False
    known_fields: tuple[str, ...] | None = None
    die_above_in_flight: int | None = None
    die_at_request: int | None = None
    model: str = "scripted"
    owned_by: str = "servetune"
    metrics_text: str | None = None
    metrics_vllm: bool = False

    def __post_init__(self) -> None:
        if not self.replies:
            raise ValueError("a script needs at least one reply")
        if self.slots is not None and self.slots < 1:
            raise ValueError("slots must be at least 1")

    def reply(self, index: int) -> Stream | Reply:
        """The reply for the accepted request `index` (from 0)."""
        count = len(self.replies)
        return self.replies[index % count if self.repeat else min(index, count - 1)]


def uniform(tokens: int, ttft_ms: float, gap_ms: float, per_chunk: int = 1, **options: Any) -> Stream:
    """A stream of `tokens` tokens, `per_chunk` at a time, each chunk `gap_ms` after the one before."""
    full, rest = divmod(tokens, per_chunk)
    sizes = [per_chunk] * full + ([rest] if rest else [])
    chunks = tuple(Chunk(gap_ms if index else ttft_ms, size) for index, size in enumerate(sizes))
    return Stream(chunks=chunks, **options)


def json_reply(
    body: Any, at_ms: float = 0.0, status: int = 200, headers: dict[str, str] | None = None
) -> Reply:
    """A plain JSON answer at `at_ms`; `body` is anything msgspec encodes."""
    return Reply(
        status=status,
        headers={"content-type": "application/json", **(headers or {})},
        pieces=(Piece(at_ms, msgspec.json.encode(body)),),
    )


def error_reply(
    status: int,
    message: str = "scripted error",
    *,
    at_ms: float = 0.0,
    retry_after_s: int | None = None,
    param: str | None = None,
) -> Reply:
    """An error answer with OpenAI's JSON body, and `Retry-After` (s) when given."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return json_reply(error_body(status, message, param), at_ms, status, headers)


def error_body(code: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "BadRequestError" if code < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
