"""Raw reads of one answer → status, headers and the data of its events, each with its arrival."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import httptools

from servetune.drive.sse import EventStream, simple_events


class StreamError(ValueError):
    """The answer can't be read; the message is the proof."""


class Answered:
    """An HTTP answer taken apart.

    status     of the final answer (interim ones are passed over), -1 when no head arrived
    headers    lower-case names
    pieces     body bytes after transfer decoding, in order
    owner      position of the read that each piece arrived in
    complete   the message ended as HTTP says
    """

    def __init__(self, reads: Sequence[bytes]) -> None:
        """Take the reads of one exchange apart. Raises StreamError."""
        self.status = -1
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.owner: list[int] = []
        self.complete = False
        # httptools looks its callbacks up once: the body goes straight into the list
        self.on_body = self.pieces.append
        parser = self._parser = httptools.HttpResponseParser(self)
        feed, pieces, owner = parser.feed_data, self.pieces, self.owner
        known = 0
        try:
            for position, read in enumerate(reads):
                feed(read)
                if len(pieces) != known:
                    owner.extend([position] * (len(pieces) - known))
                    known = len(pieces)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise StreamError(f"not HTTP: {str(error) or type(error).__name__}") from None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:
            self.headers.clear()

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200

    def decoded(self) -> list[bytes]:
        """Pieces after content decoding, one for each of `pieces`. Raises StreamError."""
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding in ("", "identity"):
            return self.pieces
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise StreamError(f"content-encoding '{coding}' was not asked for and is not known")
        inflate = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by its header
        try:
            return [inflate.decompress(piece) for piece in self.pieces]
        except zlib.error as error:
            raise StreamError(f"{coding} body: {error}") from None


def events_of(pieces: list[bytes], owner: list[int], *, complete: bool) -> tuple[list[bytes], list[int]]:
    """Data of each event of a body and the position of the read that completed it.

    complete   the body ended properly, so an event without its final empty line counts too
    """
    data = simple_events(b"".join(pieces))
    if data is None:
        return _by_standard(pieces, owner, complete=complete)
    # an event is complete with the last byte of its empty line; mostly it came in a piece of its own
    ends = list(accumulate([len(text) + 8 for text in data]))
    piece_ends = list(accumulate(map(len, pieces)))
    same = next((i for i, (a, b) in enumerate(zip(ends, piece_ends, strict=False)) if a != b), len(ends))
    rest = [owner[bisect_left(piece_ends, end)] for end in ends[same:]]
    return data, owner[:same] + rest


def _by_standard(pieces: list[bytes], owner: list[int], *, complete: bool) -> tuple[list[bytes], list[int]]:
    stream = EventStream()
    data: list[bytes] = []
    reads: list[int] = []
    for piece, position in zip(pieces, owner, strict=True):
        events = stream.feed(piece)
        data += events
        reads += [position] * len(events)
    if complete:
        events = stream.rest()
        data += events
        reads += [owner[-1] if owner else 0] * len(events)
    return data, reads
