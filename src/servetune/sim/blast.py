"""A server for benchmarks: pre-rendered events, one write each, as little CPU an event as Python allows.

Every stream has the same events. With a gap, event i of a stream is due at `base + i * gap`, whatever came
before; all streams share one gap, so a queue sorted by due time needs no heap: a stream that was served goes
to its end. Without a gap each stream is written as fast as its socket takes it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Self, cast

import httptools
import msgspec
from msgspec import Struct

from servetune.clock import MS, Alarm, now
from servetune.sim.frames import CREATED
from servetune.sim.script import error_body, json_reply
from servetune.sim.wire import encode

# Writes of one stream before the others have their turn, when there is no gap.
_BURST = 64
_GOLDEN = 0.6180339887498949
_MODEL = "blast"


class Blast(Struct, frozen=True, forbid_unknown_fields=True):
    """What each request gets: `tokens` events of about `event_bytes` bytes, `gap_ms` apart, then the end.

    `coalesce` events share one write, at the time of the last of them. The first event is due `ttft_ms` after
    receipt; with `stagger` up to one gap later, spread evenly over the streams, so that load is steady.
    One wake-up serves all that is due, and the next comes at least `tick_ms` later: a wake-up costs three
    times the CPU of a write, so this decides between CPU and lateness (at most `tick_ms`, never adding up).
    """

    tokens: int = 100
    gap_ms: float = 0.0
    event_bytes: int = 190
    coalesce: int = 1
    ttft_ms: float = 0.0
    stagger: bool = True
    tick_ms: float = 0.5

    def __post_init__(self) -> None:
        if min(self.tokens, self.coalesce) < 1 or min(self.gap_ms, self.ttft_ms) < 0:
            raise ValueError("tokens and coalesce must be positive, times not negative")

    def writes(self) -> tuple[bytes, bytes, bytes]:
        """A write, the last write with events (may be shorter), the end: finish, usage, `[DONE]`."""
        event = self.event()
        full = chunked(event * self.coalesce)
        last = chunked(event * ((self.tokens - 1) % self.coalesce + 1))
        usage = {
            "prompt_tokens": 1,
            "completion_tokens": self.tokens,
            "total_tokens": self.tokens + 1,
        }
        finish = _frame([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        end = finish + _frame([], usage=usage) + b"data: [DONE]\n\n"
        return full, last, chunked(end) + b"0\r\n\r\n"

    def event(self) -> bytes:
        """One event, filled up with text to `event_bytes` (it cannot be shorter than its frame)."""
        empty = len(_frame([_text("")]))
        return _frame([_text(" word".ljust(self.event_bytes - empty, "s"))])

    @property
    def count(self) -> int:
        """Writes with events, per stream."""
        return -(-self.tokens // self.coalesce)


def _text(text: str) -> dict[str, object]:
    return {"index": 0, "delta": {"content": text}, "finish_reason": None}


def _frame(choices: list[dict[str, object]], **more: object) -> bytes:
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": CREATED, "model": _MODEL}
    return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"


def chunked(data: bytes) -> bytes:
    """`data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Flow(asyncio.Protocol):
    """One connection; `due` (ns) and `left` (writes) of its current stream."""

    __slots__ = ("_parser", "_path", "_server", "_transport", "blocked", "due", "fd", "left", "writing")

    def __init__(self, server: BlastServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self.fd = -1
        self.due = 0
        self.left = 0
        self.blocked = False
        self.writing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self.fd = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.fd = -1
        self.left = 0

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.drop()

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_message_complete(self) -> None:
        if self.left or self.writing:
            self.drop()  # Pipelining has no place in a benchmark.
        elif self._parser.get_method() == b"POST":
            self._server.begin(self)
        else:
            self._server.page(self, self._path.decode("latin-1"))

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        if self.writing:
            self._server.pour(self)

    def write(self, data: bytes) -> None:
        """Straight to the socket; what it does not take waits in the transport."""
        if self.fd < 0:
            return
        sent = 0
        if not self.blocked:
            try:
                sent = os.write(self.fd, data)
            except BlockingIOError:
                pass
            except OSError:
                self.drop()
                return
        if sent < len(data) and self._transport is not None:
            self._transport.write(data[sent:] if sent else data)

    def drop(self) -> None:
        """Abort the connection."""
        transport, self._transport = self._transport, None
        self.fd = -1
        self.left = 0
        if transport is not None:
            transport.abort()


class BlastServer:
    """Serves `blast` to every POST, on the running loop, between `async with` and its end.

    Also answers `GET /health` and `/v1/models`. Raises OSError when the address cannot be bound.
    """

    def __init__(
        self, blast: Blast, port: int = 0, host: str = "127.0.0.1", *, reuse_port: bool = False
    ) -> None:
        self.blast = blast
        self.port = port
        self.host = host
        self._reuse_port = reuse_port
        self._full, self._last, self._end = blast.writes()
        # A write with n events is due with the n-th of them.
        self._gap = round(blast.gap_ms * blast.coalesce * MS)
        self._tick = round(blast.tick_ms * MS)
        self._due: deque[Flow] = deque()
        self._armed_at: int | None = None
        self._begun = 0
        self._flows: set[Flow] = set()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop)
        self._server = await self._loop.create_server(
            self._connect, self.host, self.port, backlog=4096, reuse_port=self._reuse_port or None
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._alarm.close()
        for flow in self._flows:
            flow.drop()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def _connect(self) -> Flow:
        flow = Flow(self)
        self._flows = {old for old in self._flows if old.fd >= 0} if len(self._flows) > 8192 else self._flows
        self._flows.add(flow)
        return flow

    def page(self, flow: Flow, path: str) -> None:
        """Answer a GET."""
        if path == "/v1/models":
            model = {"id": _MODEL, "object": "model", "created": CREATED, "owned_by": "servetune"}
            reply = json_reply({"object": "list", "data": [model]})
        elif path == "/health":
            reply = json_reply({})
        else:
            reply = json_reply(error_body(404, "no such path"), status=404)
        flow.write(encode(reply).writes[0].data)

    def begin(self, flow: Flow) -> None:
        """Start a stream."""
        flow.left = self.blast.count
        self._begun += 1
        start = now()
        flow.write(_HEAD)
        if not self._gap:
            flow.writing = True
            self._loop.call_soon(self.pour, flow)
            return
        first = (self.blast.coalesce - 1) * self._gap // self.blast.coalesce + round(self.blast.ttft_ms * MS)
        if self.blast.stagger:
            # Multiples of the golden ratio fill the gap evenly for any number of streams.
            first += int(self._begun * _GOLDEN % 1.0 * self._gap)
        flow.due = start + first
        self._enqueue(flow)

    def _enqueue(self, flow: Flow) -> None:
        """Put a new stream where its due time belongs; from then on it only moves to the end."""
        due = self._due
        index = len(due)
        while index and due[index - 1].due > flow.due:
            index -= 1
        due.insert(index, flow)
        if self._armed_at is None or flow.due < self._armed_at:
            self._arm(flow.due)

    def _arm(self, at: int) -> None:
        self._armed_at = at
        self._alarm.at(at, self._fire, at)

    def _fire(self, at: int) -> None:
        """Serve all that is due."""
        if at != self._armed_at:
            return  # An earlier time was armed since.
        due = self._due
        popleft, append, write = due.popleft, due.append, os.write
        gap, full = self._gap, self._full
        time = now()
        while due:
            flow = due[0]
            if flow.due > time:
                time = now()
                if flow.due > time:
                    break
            popleft()
            left = flow.left
            if left > 1 and not flow.blocked:
                # `Flow.write` written out: this is the hot path, and a call costs as much as all the rest.
                try:
                    sent = write(flow.fd, full)
                except OSError:
                    sent = 0
                if sent != len(full):
                    flow.write(full[sent:])
            elif left > 1:
                flow.write(full)
            elif left == 1:
                flow.write(self._last)
                flow.write(self._end)
            if left > 1 and flow.left:
                flow.left = left - 1
                flow.due += gap
                append(flow)
            else:
                flow.left = 0
        self._armed_at = None
        if due:
            self._arm(max(due[0].due, time + self._tick))

    def pour(self, flow: Flow) -> None:
        """Write a stream with no gap until the socket is full or others have waited long enough."""
        full = self._full
        for _ in range(_BURST):
            if flow.blocked or not flow.left:
                break
            if flow.left == 1:
                flow.write(self._last)
                flow.write(self._end)
            else:
                flow.write(full)
            flow.left = max(0, flow.left - 1)
        if not flow.left:
            flow.writing = False
        elif not flow.blocked:
            self._loop.call_soon(self.pour, flow)
