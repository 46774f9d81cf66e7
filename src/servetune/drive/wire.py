"""How to reach the endpoint: addresses, TLS, proxy, and the bytes of a request."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servetune import __version__
from servetune.spec import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from servetune.drive.connection import Connection


class UnreachableError(OSError):
    """The endpoint did not answer at all; the message says how it failed."""


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def tls_context(target: Target) -> ssl.SSLContext | None:
    """Context for an https target. Raises OSError when its CA file can't be read."""
    if target.scheme != "https":
        return None
    context = ssl.create_default_context(cafile=target.ca_file)
    if target.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def request_bytes(target: Target, method: str, path: str, body: bytes = b"") -> bytes:
    """A whole HTTP/1.1 request for a path below the target's base."""
    absolute = target.proxy is not None and target.scheme == "http"
    where = (target.url if absolute else target.base) + path
    lines = [
        f"{method} {where} HTTP/1.1",
        f"Host: {target.authority}",
        f"User-Agent: servetune/{__version__}",
        "Accept: text/event-stream, application/json",
    ]
    if not target.reuse:
        lines.append("Connection: close")
    if target.key:
        lines.append(f"Authorization: Bearer {target.key}")
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def fetch(target: Target, method: str, path: str, body: bytes | None = None, timeout: float = 10.0) -> Answer:
    """One blocking request outside any window. Raises UnreachableError."""
    host, port = target.proxy or (target.host, target.port)
    try:
        context = tls_context(target)
        if context is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
        if target.proxy and context is not None:
            connection.set_tunnel(target.host, target.port)
        where = target.url if target.proxy and context is None else target.base
        headers = {"Host": target.authority, "User-Agent": f"servetune/{__version__}"}
        headers |= {"Authorization": f"Bearer {target.key}"} if target.key else {}
        headers |= {"Content-Type": "application/json"} if body is not None else {}
        try:
            connection.request(method, where + path, body, headers)
            answer = connection.getresponse()
            got = {name.lower(): value for name, value in answer.getheaders()}
            content = answer.read()
            if "gzip" in got.get("content-encoding", "").lower():  # not asked for, but some send it
                content = zlib.decompress(content, wbits=31)
            return Answer(answer.status, got, content)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, zlib.error, UnicodeError) as error:
        raise UnreachableError(f"{method} {target.url}{path}: {_words(error)}") from None


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


class Wire:
    """Opens connections to one target. Names are resolved once, before the window."""

    def __init__(self, target: Target) -> None:
        """Resolve the target. Raises UnreachableError."""
        self.target = target
        self._context = tls_context(target)
        host, port = target.proxy or (target.host, target.port)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"{host}: {_words(error)}") from None
        self._addresses = list(dict.fromkeys((f, str(a[0]), int(a[1])) for f, _, _, _, a in found))

    async def connect(self, protocol: Callable[[], Connection]) -> Connection:
        """A new connection to the first address that accepts. Raises OSError (ssl.SSLError too)."""
        failure: OSError | None = None
        for position, address in enumerate(self._addresses):
            try:
                connection = await self._connect(protocol, *address)
            except OSError as error:
                failure = failure or error
                continue
            if position:  # next time begin with the address that works
                self._addresses.insert(0, self._addresses.pop(position))
            return connection
        assert failure is not None
        raise failure

    async def _connect(
        self, protocol: Callable[[], Connection], family: int, host: str, port: int
    ) -> Connection:
        loop = asyncio.get_running_loop()
        if self.target.proxy and self._context is not None:
            return await self._tunnel(protocol, host, port, family, self._context)
        name = self.target.host if self._context is not None else None
        _, connection = await loop.create_connection(
            protocol, host, port, family=family, ssl=self._context, server_hostname=name
        )
        return connection

    async def _tunnel(
        self,
        protocol: Callable[[], Connection],
        host: str,
        port: int,
        family: int,
        context: ssl.SSLContext,
    ) -> Connection:
        """TLS through a proxy's CONNECT."""
        loop = asyncio.get_running_loop()
        where = self.target.authority if self.target.port != 443 else f"{self.target.authority}:443"
        transport, opening = await loop.create_connection(_Opening, host, port, family=family)
        transport.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        try:
            await opening.opened
            connection = protocol()
            secure = await loop.start_tls(transport, connection, context, server_hostname=self.target.host)
        except BaseException:
            transport.abort()
            raise
        assert secure is not None
        connection.connection_made(secure)
        return connection


class _Opening(asyncio.Protocol):
    """Waits for a proxy's answer to CONNECT."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" not in self._head or self.opened.done():
            return
        status = self._head.split(b"\r\n", 1)[0]
        if status.split(b" ")[1:2] == [b"200"]:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(ConnectionError(f"proxy refused: {status.decode('latin-1')}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(exc or ConnectionError("proxy closed the connection"))
