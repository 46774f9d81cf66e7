"""One client connection: reads requests, plays one reply at a time at its exact times."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools
from msgspec import Struct

from servetune.clock import MS, Alarm, now
from servetune.sim.record import Record
from servetune.sim.script import Reply, error_reply
from servetune.sim.wire import Wire, encode

MAX_HEAD = 64 * 1024
MAX_BODY = 256 * 1024 * 1024
_MAX_PIPELINED = 64


class Request(Struct):
    """A request read in full; `received_ns` is the time of the read that completed it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    received_ns: int
    keep_alive: bool
    http10: bool


class Owner(Protocol):
    """What a connection needs of its server."""

    alarm: Alarm

    def opened(self, connection: Connection) -> float:
        """A connection was made; how long (ms) not to read from it."""

    def closed(self, connection: Connection) -> None:
        """The connection is gone."""

    def answer(self, connection: Connection, request: Request) -> None:
        """Cause `connection.play`, now or later."""

    def exit(self, reason: str) -> None:
        """Stop the whole server."""


class Playing:
    """A reply while it is being sent: writes at `base_ns` plus their offsets, whatever came before."""

    def __init__(self, wire: Wire, base_ns: int, record: Record | None) -> None:
        self.wire = wire
        self.base_ns = base_ns
        self.record = record
        self.index = 0
        self.on_piece: Callable[[int], None] | None = None
        self.on_end: Callable[[Playing, str], None] | None = None


class Connection(asyncio.Protocol):
    """Pipelined requests are answered in order; nothing a client sends raises into the loop."""

    def __init__(self, owner: Owner, number: int) -> None:
        self.number = number
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._fd: int | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._busy = False
        self._playing: Playing | None = None
        self._broken = False
        self._stamp = 0
        self._begin_request()

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        stream = self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if transport.get_extra_info("sslcontext") is None and sock is not None:
            self._fd = sock.fileno()
        delay = self._owner.opened(self)
        if delay > 0:
            stream.pause_reading()
            self._owner.alarm.at(now() + round(delay * MS), self._resume)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone("lost")

    def data_received(self, data: bytes) -> None:
        self._stamp = now()
        if self._broken:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "protocol upgrades are not supported")
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP: {error}")

    def eof_received(self) -> bool:
        # As real servers do: a client that closed its sending side is gone.
        return False

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._begin_request()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._grow_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and not self._busy:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            self._refuse(413, "body too large")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._broken:
            return
        if self._parser.should_upgrade():
            self._refuse(400, "protocol upgrades are not supported")
            return
        path = self._url.decode("latin-1").partition("?")[0]
        version = self._parser.get_http_version()
        self._waiting.append(
            Request(
                self._parser.get_method().decode("latin-1"),
                path,
                self._headers,
                b"".join(self._body),
                self._stamp,
                self._parser.should_keep_alive(),
                version == "1.0",
            )
        )
        if len(self._waiting) > _MAX_PIPELINED and self._transport is not None:
            self._transport.pause_reading()
        self._next_request()

    def _begin_request(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._head_size = 0

    def _grow_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            self._refuse(431, "headers too large")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be parsed and close; a reply in progress is finished first, and is the last."""
        if self._broken:
            return
        self._broken = True
        if self._busy:
            self._waiting.clear()
            return
        for write in encode(error_reply(status, message), keep_alive=False).writes:
            self.send(write.data)
        self._close()

    def _next_request(self) -> None:
        if self._busy or not self._waiting or self._transport is None:
            return
        self._busy = True
        request = self._waiting.popleft()
        if len(self._waiting) == _MAX_PIPELINED:
            self._resume()
        self._owner.answer(self, request)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    # Replies

    @property
    def alive(self) -> bool:
        return self._transport is not None

    def play(self, playing: Playing) -> None:
        """Send a reply; its `on_end` is called once, with the outcome."""
        if self._transport is None:
            self._finish(playing, "lost")
            return
        self._playing = playing
        self._step(playing)

    def play_page(self, request: Request, reply: Reply) -> None:
        """Answer at once, outside the script."""
        wire = encode(reply, keep_alive=request.keep_alive, http10=request.http10)
        self.play(Playing(wire, now(), None))

    def _step(self, playing: Playing) -> None:
        """Do all that is due, then wait for the next absolute time."""
        writes = playing.wire.writes
        while self._playing is playing:
            ended = playing.index == len(writes)
            due = playing.base_ns + (playing.wire.end_ns if ended else writes[playing.index].at_ns)
            if due > now():
                self._owner.alarm.at(due, self._step, playing)
                return
            if ended:
                self._end(playing)
                return
            write = writes[playing.index]
            playing.index += 1
            self.send(write.data)
            if self._playing is not playing:
                return
            if playing.record is not None:
                done = now()
                playing.record.writes_ns.append(done)
                playing.record.worst_late_ns = max(playing.record.worst_late_ns, done - due)
            if write.piece is not None and playing.on_piece is not None:
                playing.on_piece(write.piece)

    def send(self, data: bytes) -> None:
        """Write now: straight to the socket, because a transport may join the writes of one loop turn."""
        transport = self._transport
        if transport is None or not data:
            return
        if self._fd is None or transport.get_write_buffer_size():
            transport.write(data)
            return
        try:
            sent = os.write(self._fd, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.abort("lost")
            return
        if sent < len(data):
            transport.write(data[sent:])

    def _end(self, playing: Playing) -> None:
        end = playing.wire.end
        if end == "hang":
            return
        self._finish(playing, "done" if end == "normal" else end)
        if end == "exit":
            self._owner.exit("scripted end")
        elif end == "reset":
            self.abort(reset=True)
        elif end == "close_early" or playing.wire.close or self._broken:
            self._close()
        else:
            self._busy = False
            if self._waiting:
                # Not now: a thousand pipelined requests would be a thousand calls deep.
                asyncio.get_running_loop().call_soon(self._next_request)

    def _finish(self, playing: Playing, outcome: str) -> None:
        self._playing = None
        if playing.on_end is not None:
            playing.on_end(playing, outcome)

    def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            self._owner.closed(self)

    def abort(self, outcome: str = "aborted", *, reset: bool = False) -> None:
        """Close at once; with `reset` the client gets RST."""
        transport = self._transport
        if transport is None:
            return
        if reset and (sock := transport.get_extra_info("socket")) is not None:
            with socket.socket(fileno=os.dup(sock.fileno())) as twin:
                twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._gone(outcome)
        transport.abort()

    def _gone(self, outcome: str) -> None:
        if self._transport is None:
            return
        self._transport = None
        self._waiting.clear()
        self._owner.closed(self)
        if self._playing is not None:
            self._finish(self._playing, outcome)
