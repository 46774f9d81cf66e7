"""From a stream's events to the socket writes of its body: event framing, coalescing, splitting."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from servetune.sim.frames import Ask, Event, events, whole_body
from servetune.sim.script import Kind, Piece, Reply, Stream


class Arrival(Struct, frozen=True, gc=False):
    """An event as an ideal client sees it: complete at `at_ms`, with the last byte of piece `piece`."""

    at_ms: float
    tokens: int
    kind: Kind
    piece: int


class Layout(Struct, frozen=True):
    """The pieces of a stream's body and where its events end; comments and the sentinel are no arrivals."""

    reply: Reply
    arrivals: tuple[Arrival, ...]
    done_ms: float | None


class _Write(Struct):
    """Events that share one write; `ends` has the byte offset after each event."""

    at_ms: float
    data: bytearray
    ends: list[tuple[int, Event]]


def lay_out(stream: Stream, ask: Ask) -> Layout:
    """The writes of one answer. A request that asked for no stream gets one JSON body."""
    if not ask.stream:
        at, body = whole_body(stream, ask)
        headers = {**stream.headers, "content-type": "application/json"}
        reply = Reply(headers=headers, pieces=(Piece(at, body),), transfer="length")
        return Layout(reply, (), at)
    pieces: list[Piece] = []
    arrivals: list[Arrival] = []
    done_ms: float | None = None
    for write in _writes(stream, ask):
        begin = len(pieces)
        size = stream.split or max(1, len(write.data))
        at = max(write.at_ms, pieces[-1].at_ms if pieces else 0.0)
        for count, start in enumerate(range(0, len(write.data), size)):
            data = bytes(write.data[start : start + size])
            pieces.append(Piece(at + count * stream.split_gap_ms, data))
        for end, event in write.ends:
            piece = begin + (end - 1) // size
            if event.payload == b"[DONE]":
                done_ms = pieces[piece].at_ms
            else:
                arrivals.append(Arrival(pieces[piece].at_ms, event.tokens, event.kind, piece))
    return Layout(_reply(stream, tuple(pieces)), tuple(arrivals), done_ms)


def _reply(stream: Stream, pieces: tuple[Piece, ...]) -> Reply:
    last = pieces[-1].at_ms if pieces else stream.head_at_ms or 0.0
    return Reply(
        status=stream.status,
        headers=stream.headers,
        pieces=pieces,
        transfer=stream.transfer,
        gzip=stream.gzip,
        end=stream.end,
        end_ms=last + stream.end_gap_ms if stream.end_gap_ms else None,
        head_at_ms=stream.head_at_ms,
        accept_delay_ms=stream.accept_delay_ms,
    )


def _writes(stream: Stream, ask: Ask) -> list[_Write]:
    out: list[_Write] = []
    comment = f": keep-alive{stream.eol}{stream.eol}".encode()
    if stream.comments:
        out.append(_Write(stream.head_at_ms or 0.0, bytearray(comment), []))
    for number, event in enumerate(events(stream, ask)):
        if not (event.joined and out):
            out.append(_Write(event.at_ms, bytearray(), []))
        data = out[-1].data
        if stream.comments and number:
            data += comment
        data += frame(stream, event.payload, number)
        out[-1].ends.append((len(data), event))
    if stream.bom and out:
        out[0].data[:0] = b"\xef\xbb\xbf"
        out[0].ends = [(end + 3, event) for end, event in out[0].ends]
    return out


def frame(stream: Stream, payload: bytes, number: int) -> bytes:
    """One server-sent event: `payload` in `data:` lines, with the stream's line ends and fields."""
    colon = ": " if stream.space_after_colon else ":"
    if not stream.event_field and not stream.multiline_data:
        return b"data%b%b%b" % (colon.encode(), payload, stream.eol.encode() * 2)
    lines: list[str] = []
    if stream.event_field:
        lines += [f"event{colon}message", f"id{colon}{number}"]
    if stream.multiline_data and payload != b"[DONE]":
        payload = msgspec.json.format(payload, indent=2)
    lines += [f"data{colon}{line}" for line in payload.decode().split("\n")]
    return (stream.eol.join(lines) + stream.eol * 2).encode()
