"""A server in a thread and the plainest clients, so that the tests share nothing with the code under test."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from servetune.sim import Reply, Script, ScriptedServer, Stream

CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def serving(script: Script | Stream | Reply, **options: Any) -> Iterator[ScriptedServer]:
    """A server on a loop of its own; one reply stands for a script of it."""
    if not isinstance(script, Script):
        script = Script((script,))
    ready = threading.Event()
    box: list[Any] = []

    async def run() -> None:
        stop = asyncio.Event()
        try:
            async with ScriptedServer(script, **options) as server:
                box.extend((server, asyncio.get_running_loop(), stop))
                ready.set()
                await stop.wait()
        finally:
            ready.set()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait(10)
    server, loop, stop = box
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()


def post(
    server: ScriptedServer, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of one streamed request."""
    data = json.dumps({"stream": True, "messages": [], **body})
    return ask(server, "POST", path, data, headers)


def ask(
    server: ScriptedServer,
    method: str,
    path: str,
    body: str | bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body of one request."""
    client = http.client.HTTPConnection(server.host, server.port, timeout=10)
    with contextlib.closing(client):
        client.request(method, path, body, headers or {})
        reply = client.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()


def request(body: str = '{"stream":true}', path: str = CHAT, method: str = "POST") -> bytes:
    """The bytes of a request."""
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def connect(server: ScriptedServer, timeout_s: float = 10) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=timeout_s)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; raises ConnectionResetError on RST."""
    parts: list[bytes] = []
    while data := sock.recv(65536):
        parts.append(data)
    return b"".join(parts)


def exchange(server: ScriptedServer, data: bytes) -> bytes:
    """What the server sends for `data` until it closes."""
    with connect(server) as sock:
        sock.sendall(data)
        return read_all(sock)


def payloads(body: bytes) -> list[Any]:
    """JSON of all events of a stream with LF and one `data: ` line each, without the sentinel."""
    found = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
    return [json.loads(part) for part in found if part != "[DONE]"]
