"""One HTTP connection. Its receive path stamps and stores bytes and does nothing else."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable
from typing import Any, cast

import httptools

from servetune.clock import now
from servetune.events import MISSING, Failure

_END = b"\r\n\r\n"
_NO_PARSER = httptools.HttpResponseParser(object())


def _ignore(_: Any) -> None:
    return


class Exchange:
    """One request and the raw bytes of its answer.

    index       position in the plan
    scheduled, sent, ended   ns; -1 where it did not happen
    connect     ns that opening a connection took; 0 when one was ready
    stamps      arrival of each read, ns
    reads       bytes of each read
    failure     Failure and its proof, or "" when a whole HTTP message arrived
    """

    __slots__ = ("connect", "ended", "failure", "index", "reads", "scheduled", "sent", "stamps")

    def __init__(self, index: int, scheduled: int) -> None:
        self.index = index
        self.scheduled = scheduled
        self.sent = MISSING
        self.connect = 0
        self.ended = MISSING
        self.stamps = array("q")
        self.reads: list[bytes] = []
        self.failure = ""


class Connection(asyncio.Protocol):
    """A keep-alive connection that carries one exchange at a time.

    `finished(connection, exchange)` is called once for each exchange. The HTTP parser only has to
    find the end of a message. A chunked body ends with an empty line after its last chunk, so the
    parser is fed, with all reads it has not seen, only when a read could be that end; framing that
    looks alike (CRLF event streams) merely feeds it sooner. Each byte is parsed once.
    """

    transport: asyncio.Transport

    def __init__(self, finished: Callable[[Connection, Exchange], None]) -> None:
        self.idle_since = 0
        self.usable = False
        self._finished = finished
        self._exchange: Exchange | None = None
        self._rest()

    def _rest(self) -> None:
        self._exchange = None
        self._stamp: Callable[[int], None] = _ignore
        self._store: Callable[[bytes], None] = _ignore
        self._eager = True
        self._parser = _NO_PARSER  # the used one refers back to this object

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of asyncio's
        plain = transport.get_extra_info("ssl_object") is None
        self._fd = transport.get_extra_info("socket").fileno() if plain else -1
        self.usable = True

    def send(self, exchange: Exchange, payload: bytes) -> None:
        """Write a whole request (head and body) and receive its answer into `exchange`."""
        self._exchange = exchange
        self._stamp = exchange.stamps.append
        self._store = exchange.reads.append
        self._parser = httptools.HttpResponseParser(self)
        self._fed = 0
        self._eager = True
        self._complete = self._keep = self._until_close = False
        exchange.sent = now()
        sent = self._write_now(payload)
        if sent < len(payload):
            self.transport.write(payload[sent:])

    def _write_now(self, payload: bytes) -> int:
        """Hand a request to the socket at once and return how many bytes it took.

        A transport would write when the loop's turn ends, after `sent` was stamped and perhaps hundreds
        of other requests were built. Nothing else is ever waiting in the transport here.
        """
        if self._fd < 0:
            return 0
        try:
            return os.write(self._fd, payload)
        except OSError:  # full, or broken: the transport finds out which
            return 0

    def data_received(self, data: bytes) -> None:
        self._stamp(now())
        self._store(data)
        if self._eager or len(data) < 4 or data.rfind(_END) >= 0:  # half the time of `in`
            self._advance()

    def _advance(self) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked: such as a time-out notice on an idle connection
            self.close()
            return
        reads = exchange.reads
        try:
            for i in range(self._fed, len(reads)):
                self._parser.feed_data(reads[i])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Failure.BAD_HTTP, str(error) or type(error).__name__)
            return
        self._fed = len(reads)
        if self._complete:
            self._end("")

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False
        self._chunked = self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"transfer-encoding":
            self._chunked = b"chunked" in value.lower()
        elif name == b"content-length":
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._eager = not self._chunked
            self._until_close = not self._chunked and not self._has_length

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._keep = self._parser.should_keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._exchange is None:
            return
        self._advance()  # bytes that were stored but not parsed may hold the end
        if self._exchange is None:
            return
        if self._until_close and exc is None:
            self._end("")
        elif exc is None:
            self.fail(Failure.CLOSED, "by the server before the answer was complete")
        else:
            self.fail(Failure.RESET, str(exc) or type(exc).__name__)

    def fail(self, failure: Failure, words: str) -> None:
        """End the exchange in flight as failed and close the connection."""
        self._keep = False
        self._end(f"{failure}: {words}")

    def _end(self, failure: str) -> None:
        exchange = self._exchange
        assert exchange is not None
        exchange.ended = exchange.stamps[-1] if exchange.stamps and not failure else now()
        exchange.failure = failure
        keep = self._keep
        self._rest()
        if not keep:
            self.close()
        self._finished(self, exchange)

    def close(self) -> None:
        self.usable = False
        self.transport.abort()
