"""From a reply to the bytes and times of its socket writes: HTTP head, transfer encoding, gzip."""

from __future__ import annotations

import zlib
from http import HTTPStatus

from msgspec import Struct

from servetune.clock import MS
from servetune.sim.script import End, Piece, Reply


class Write(Struct, frozen=True, gc=False):
    """One socket write, `at_ns` after the start of service; `piece` is the piece in it that it carries."""

    at_ns: int
    data: bytes
    piece: int | None = None


class Wire(Struct, frozen=True):
    """All writes of a reply and what follows them; `close`: the connection ends after a normal end."""

    status: int
    writes: tuple[Write, ...]
    end: End
    end_ns: int
    close: bool


def encode(reply: Reply, *, keep_alive: bool = True, http10: bool = False) -> Wire:
    """The writes of `reply` for one request; HTTP/1.0 clients get identity in place of chunked."""
    transfer = "identity" if http10 and reply.transfer == "chunked" else reply.transfer
    close = reply.raw or transfer == "identity" or not keep_alive
    body = list(reply.pieces)
    if not reply.raw:
        if reply.gzip:
            body = _gzipped(reply)
        head = _head(reply, transfer, sum(len(piece.data) for piece in body), close)
        if transfer == "chunked":
            body = [Piece(piece.at_ms, _chunk(piece.data)) for piece in body]
    else:
        head = b""
    writes = [Write(_ns(piece.at_ms), piece.data, number) for number, piece in enumerate(body)]
    if head and (reply.head_at_ms is not None or not writes):
        writes.insert(0, Write(_ns(reply.head_at_ms or 0.0), head))
    elif head:
        writes[0] = Write(writes[0].at_ns, head + writes[0].data, writes[0].piece)
    if transfer == "chunked" and reply.end == "normal" and not reply.raw:
        _terminate(writes, reply.end_ms)
    last = writes[-1].at_ns if writes else 0
    end = last if reply.end_ms is None else _ns(reply.end_ms)
    return Wire(reply.status, tuple(writes), reply.end, end, close)


def _ns(at_ms: float) -> int:
    return round(at_ms * MS)


def _chunk(data: bytes) -> bytes:
    # An empty piece must not become the terminal chunk.
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _terminate(writes: list[Write], end_ms: float | None) -> None:
    """Add the terminal chunk: to the last write, or as a write of its own at `end_ms`."""
    terminal = b"0\r\n\r\n"
    if end_ms is None:
        last = writes[-1]
        writes[-1] = Write(last.at_ns, last.data + terminal, last.piece)
    else:
        writes.append(Write(_ns(end_ms), terminal))


def _gzipped(reply: Reply) -> list[Piece]:
    """The pieces as one gzip stream, flushed after each so that every piece can be read on arrival."""
    packer = zlib.compressobj(wbits=31)
    out: list[Piece] = []
    for number, piece in enumerate(reply.pieces):
        last = number == len(reply.pieces) - 1 and reply.end == "normal"
        data = packer.compress(piece.data) + packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
        out.append(Piece(piece.at_ms, data))
    return out


def _head(reply: Reply, transfer: str, size: int, close: bool) -> bytes:
    try:
        phrase = HTTPStatus(reply.status).phrase
    except ValueError:
        phrase = "Scripted"
    lines = [f"HTTP/1.1 {reply.status} {phrase}"]
    headers = {name.lower(): value for name, value in reply.headers.items()}
    if reply.gzip:
        headers["content-encoding"] = "gzip"
    if transfer == "chunked":
        headers["transfer-encoding"] = "chunked"
    elif transfer == "length":
        headers.setdefault("content-length", str(size if reply.end == "normal" else size + 1))
    if close:
        headers["connection"] = "close"
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
