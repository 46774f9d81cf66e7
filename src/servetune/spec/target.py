"""Which endpoint requests go to, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from servetune.spec.units import SpecError

MASK = "***"

_TELLING = 8
"""Characters of a key that are not shown: fewer tell nothing, and may be ordinary words."""


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server.

    base       path before `/v1`, without a trailing slash
    key        bearer key, never shown: not in repr, errors, logs or results
    ca_file    certificates to trust instead of the system's, or None
    insecure   accept any certificate
    reuse      send several requests on one connection, one after the other
    proxy      `http://host:port` of a proxy, or None; the environment is never asked
    """

    scheme: str
    host: str
    port: int
    base: str = ""
    key: str | None = None
    ca_file: str | None = None
    insecure: bool = False
    proxy: tuple[str, int] | None = None
    reuse: bool = True

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        key: str | None = None,
        ca_file: str | None = None,
        insecure: bool = False,
        proxy: str | None = None,
    ) -> Self:
        """Target of a URL such as `http://127.0.0.1:8000` or `https://[::1]:8443/v1`. Raises SpecError."""
        scheme, host, port, path = _split(url, "endpoint", ("http", "https"))
        base = path.rstrip("/").removesuffix("/v1").rstrip("/")
        if key is not None and (not key.isascii() or not key.isprintable()):
            raise SpecError("the API key holds characters that cannot stand in an HTTP header")
        via = None
        if proxy is not None:
            _, via_host, via_port, _ = _split(proxy, "proxy", ("http",))
            via = (via_host, via_port)
        return cls(scheme, host, port, base, key, ca_file, insecure, via)

    @property
    def authority(self) -> str:
        """`host:port` as it stands in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"

    def __repr__(self) -> str:
        return f"Target({self.url}{', key=' + MASK if self.key else ''})"

    def masked(self, text: str) -> str:
        """`text` without the key, and without the beginning of it at which a message was cut off."""
        key = self.key
        if not key or key[:_TELLING] not in text:
            return text
        for length in range(len(key), min(_TELLING, len(key)) - 1, -1):
            text = text.replace(key[:length], MASK)
        return text


def _split(url: str, what: str, schemes: tuple[str, ...]) -> tuple[str, str, int, str]:
    """Scheme, host, port and path of a URL. Raises SpecError without repeating a password."""
    if not url.isprintable():
        raise SpecError(f"{what}: the URL holds characters that no URL has")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SpecError(f"{what}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise SpecError(f"{what}: user and password in the URL are not supported; use a bearer key")
    if parts.scheme not in schemes or not parts.hostname:
        raise SpecError(f"{what} '{url}' is not a URL: write {schemes[0]}://HOST:PORT")
    if parts.query or parts.fragment:
        raise SpecError(f"{what} '{url}': a query or fragment is not supported")
    if port == 0:
        raise SpecError(f"{what} '{url}': port 0 is not a port")
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme], parts.path
