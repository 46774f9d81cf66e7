"""The plainest server, for what the scripted one never does: each answer is bytes, pauses and a close."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

CLOSE, RESET = object(), object()

Step = bytes | float | object
"""Bytes to send, seconds to wait, or CLOSE or RESET, after which the connection is gone."""

MODELS = b'{"object":"list","data":[{"id":"raw","object":"model","owned_by":"test"}]}'
EVENTS = (
    b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":" two"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)


@dataclass
class Asked:
    """One request as received; `connection` numbers connections from 0, `number` the POST requests."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    number: int


def whole(body: bytes, status: str = "200 OK", kind: str = "text/event-stream", headers: str = "") -> bytes:
    """An answer with its length; `headers` are whole lines."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class RawServer:
    """Answers POST requests by `answer`, GET by `page` (None: 404); see `serving_raw`."""

    answer: Callable[[Asked], Iterable[Step]]
    page: Callable[[Asked], bytes | None]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    _numbers: int = 0

    @property
    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    def talk(self, sock: socket.socket) -> None:
        connection = self.connections
        self.connections += 1
        with contextlib.suppress(OSError), sock, sock.makefile("rb") as reader:
            while line := reader.readline():
                method, path, _ = line.decode("latin-1").split()
                headers = {}
                while header := reader.readline().strip():
                    name, _, value = header.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                body = reader.read(int(headers.get("content-length", 0)))
                asked = Asked(method, path, headers, body, connection, self._numbers)
                self._numbers += method == "POST"
                self.asked.append(asked)
                for step in self.answer(asked) if method == "POST" else (self._page(asked),):
                    if isinstance(step, bytes):
                        sock.sendall(step)
                    elif isinstance(step, float):
                        time.sleep(step)
                    else:
                        if step is RESET:
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return

    def _page(self, asked: Asked) -> bytes:
        body = self.page(asked)
        if body is not None:
            return whole(body, kind="application/json")
        models = asked.path.endswith("/v1/models")
        return whole(MODELS if models else b"", "200 OK" if models else "404 Not Found", "application/json")


@contextlib.contextmanager
def serving_raw(
    answer: Callable[[Asked], Iterable[Step]],
    page: Callable[[Asked], bytes | None] = lambda _: None,
    host: str = "127.0.0.1",
) -> Iterator[RawServer]:
    """A server in threads of this process. Without `page` it lists one model and nothing else."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = RawServer(answer, page)
    open_now: list[socket.socket] = []
    with socket.create_server((host, 0), family=family, backlog=256) as listener:
        port = listener.getsockname()[1]
        server.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    open_now.append(sock)
                    threading.Thread(target=server.talk, args=(sock,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for sock in open_now:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            thread.join(5)
