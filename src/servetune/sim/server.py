"""The scripted server: an OpenAI-compatible HTTP server that does exactly what its script says."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import ssl
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from servetune.clock import Alarm, now
from servetune.sim.connection import Connection, Playing, Request
from servetune.sim.frames import Api, Ask
from servetune.sim.pages import Counters, page
from servetune.sim.record import KEPT_HEADERS, Authorization, InFlight, Log, Record
from servetune.sim.rendering import Rendered, Renderer
from servetune.sim.script import Reply, Script, error_body, error_reply, json_reply
from servetune.sim.wire import encode

_GENERATION: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_PAGES = ("/v1/models", "/health", "/version", "/metrics", "/log")


class ScriptedServer:
    """Serves `script` on the running loop, between `async with` and its end.

    `port` 0 takes a free one. `expected_key`: requests without `Authorization: Bearer <key>` get 401 (all
    paths but `/health` and `/log`). `tls`: certificate and key file. `keep_bodies`: request bodies go into
    the log. Raises OSError when the address cannot be bound.
    """

    def __init__(
        self,
        script: Script,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        keep_bodies: bool = False,
        expected_key: str | None = None,
        tls: tuple[Path, Path] | None = None,
        reuse_port: bool = False,
    ) -> None:
        self.script = script
        self.host = host
        self.port = port
        self.exited = asyncio.Event()
        self.alarm: Alarm
        self._keep_bodies = keep_bodies
        self._expected = None if expected_key is None else f"Bearer {expected_key}".encode()
        self._tls = tls
        self._reuse_port = reuse_port
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._opened = 0
        self._records: list[Record] = []
        self._accepted = 0
        self._in_flight = InFlight()
        self._pages: dict[str, int] = {}
        self._counters = Counters()
        self._renderer = Renderer(script)
        self._queue: deque[tuple[Connection, Record, Rendered]] = deque()
        self._exit_reason: str | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        context = None
        if self._tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self._tls)
        loop = asyncio.get_running_loop()
        self.alarm = Alarm(loop)
        try:
            self._server = await loop.create_server(
                self._connect,
                self.host,
                self.port,
                ssl=context,
                backlog=4096,
                reuse_port=self._reuse_port or None,
            )
        except OSError:
            self.alarm.close()
            raise
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._shut()
        if self._server is not None:
            await self._server.wait_closed()
        self.alarm.close()

    @property
    def url(self) -> str:
        """Base address, without `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    def log(self) -> Log:
        """What was received and done so far; the records are live."""
        return Log(
            records=self._records,
            in_flight=self._in_flight.current,
            in_flight_max=self._in_flight.most,
            in_flight_mean=self._in_flight.mean(now()),
            connections=self._opened,
            pages=self._pages,
            requests=self._counters.requests,
            generation_tokens=self._counters.generation_tokens,
            exit_reason=self._exit_reason,
        )

    def exit(self, reason: str) -> None:
        """Stop serving as a dying process does: no listener, all connections aborted."""
        if self._exit_reason is None:
            self._exit_reason = reason
            self._shut()
            self.exited.set()

    def _shut(self) -> None:
        if self._server is not None:
            for listening in self._server.sockets:
                # at once, as a dying process does: close() alone would accept until the loop's next turn
                with socket.socket(fileno=os.dup(listening.fileno())) as same, contextlib.suppress(OSError):
                    same.shutdown(socket.SHUT_RDWR)
            self._server.close()
        self._closing = True
        for connection in list(self._connections):
            connection.abort()

    def _connect(self) -> Connection:
        self._opened += 1
        return Connection(self, self._opened)

    # Called by connections

    def opened(self, connection: Connection) -> float:
        self._connections.add(connection)
        return self.script.reply(self._accepted).accept_delay_ms

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        for item in [item for item in self._queue if item[0] is connection]:
            self._queue.remove(item)
            self._counters.waiting -= 1
            self._leave(item[1], "lost")

    def answer(self, connection: Connection, request: Request) -> None:
        if request.path in _GENERATION:
            allowed = "POST"
        elif request.path in _PAGES:
            allowed = "GET"
        else:
            connection.play_page(request, error_reply(404, f"no such path: {request.path[:200]}"))
            return
        if request.method != allowed:
            refusal = error_body(405, f"{request.path} takes {allowed}")
            connection.play_page(request, json_reply(refusal, status=405, headers={"allow": allowed}))
        elif allowed == "POST":
            self._generate(connection, request)
        else:
            self._page(connection, request)

    def _page(self, connection: Connection, request: Request) -> None:
        self._pages[request.path] = self._pages.get(request.path, 0) + 1
        if request.path == "/log":
            connection.play_page(request, json_reply(self.log()))
            return
        if request.path != "/health" and self._authorization(request) in ("missing", "wrong"):
            connection.play_page(request, error_reply(401, "wrong or missing key"))
            return
        reply = page(request.path, self.script, self._counters)
        connection.play_page(request, reply or error_reply(404, "no such page"))

    def _authorization(self, request: Request) -> Authorization:
        value = request.headers.get("authorization")
        if self._expected is None:
            return "absent" if value is None else "present"
        if value is None:
            return "missing"
        return "correct" if hmac.compare_digest(value.encode("latin-1"), self._expected) else "wrong"

    # Generation

    def _generate(self, connection: Connection, request: Request) -> None:
        self._counters.requests += 1
        record = self._recorded(connection, request)
        script = self.script
        if script.die_at_request is not None and record.n >= script.die_at_request:
            self._die(record, f"request {record.n} was received")
        elif script.die_above_in_flight is not None and record.in_flight > script.die_above_in_flight:
            self._die(record, f"{record.in_flight} requests were in flight")
        elif isinstance(parsed := self._parsed(request, record), Reply):
            refusal = encode(parsed, keep_alive=request.keep_alive, http10=request.http10)
            self._start(connection, record, Rendered(refusal, {}), request.received_ns)
        else:
            rendered = self._rendered(request, parsed)
            if script.slots is not None and self._counters.running >= script.slots:
                self._counters.waiting += 1
                self._queue.append((connection, record, rendered))
            else:
                self._start(connection, record, rendered, request.received_ns)

    def _rendered(self, request: Request, body: dict[str, Any]) -> Rendered:
        """The next reply of the script, made for this request."""
        model = body.get("model")
        ask = Ask.of(body, _GENERATION[request.path], model if isinstance(model, str) else self.script.model)
        reply = self.script.reply(self._accepted)
        self._accepted += 1
        return self._renderer.render(reply, ask, keep_alive=request.keep_alive, http10=request.http10)

    def _recorded(self, connection: Connection, request: Request) -> Record:
        record = Record(
            n=self._counters.requests,
            path=request.path,
            connection=connection.number,
            received_ns=request.received_ns,
            body_size=len(request.body),
            in_flight=self._in_flight.enter(request.received_ns),
            headers={name: value for name, value in request.headers.items() if name in KEPT_HEADERS},
            authorization=self._authorization(request),
            body=request.body.decode("utf-8", "replace") if self._keep_bodies else None,
        )
        self._records.append(record)
        return record

    def _die(self, record: Record, reason: str) -> None:
        self._leave(record, "exit")
        self.exit(reason)

    def _parsed(self, request: Request, record: Record) -> dict[str, Any] | Reply:
        """The request body, or the refusal; refused requests use up no reply of the script."""
        if record.authorization in ("missing", "wrong"):
            return error_reply(401, "wrong or missing key")
        try:
            body = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return error_reply(400, f"body is not JSON: {error}")
        if not isinstance(body, dict):
            return error_reply(400, "body must be a JSON object")
        known = self.script.known_fields
        for name in body:
            if known is not None and name not in known:
                return error_reply(400, f"Extra inputs are not permitted: {name!r}", param=name)
        return body

    def _start(
        self, connection: Connection, record: Record, rendered: Rendered, base_ns: int, *, soon: bool = False
    ) -> None:
        """Begin service: the reply's times count from `base_ns`. `soon`: with the next loop turn."""
        self._counters.prompt_tokens += rendered.prompt_tokens
        record.started_ns = base_ns
        record.status = rendered.wire.status
        playing = Playing(rendered.wire, base_ns, record)
        playing.on_piece = partial(rendered.piece_sent, self._counters)
        playing.on_end = self._ended
        self._counters.running += 1
        if soon:
            asyncio.get_running_loop().call_soon(connection.play, playing)
        else:
            connection.play(playing)

    def _ended(self, playing: Playing, outcome: str) -> None:
        self._counters.running -= 1
        if playing.record is not None:
            self._leave(playing.record, outcome)
        slots = self.script.slots
        if self._closing or slots is None or self._counters.running >= slots or not self._queue:
            return
        connection, record, rendered = self._queue.popleft()
        self._counters.waiting -= 1
        # The scripted end of the one before, not the actual one: lateness must not add up along the queue.
        freed = playing.base_ns + playing.wire.end_ns if outcome == "done" else now()
        # Soon: a long queue of empty replies would be as many calls deep.
        self._start(connection, record, rendered, max(freed, record.received_ns), soon=True)

    def _leave(self, record: Record, outcome: str) -> None:
        record.outcome = outcome
        record.ended_ns = now()
        self._in_flight.leave(record.ended_ns)
