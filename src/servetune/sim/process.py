"""The scripted server as a process of its own, ended with the process that started it."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from servetune.sim.record import Log
from servetune.sim.script import Script

KEY_VARIABLE = "SERVETUNE_SIM_KEY"


class ServerProcess:
    """A running `python -m servetune.sim`; made by `serve_process` and `blast_process`."""

    def __init__(
        self, arguments: Sequence[str], *, first_line: bytes = b"", environment: dict[str, str] | None = None
    ) -> None:
        """Start it and wait for its address. Raises RuntimeError when it ends before it listens."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servetune.sim", "--lifeline", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._rest = b""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(first_line)
            self._process.stdin.flush()
        self.url = self._process.stdout.readline().decode().strip()
        if not self.url:
            self.stop()
            raise RuntimeError(f"the server did not start: exit status {self._process.returncode}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float = 10.0) -> int:
        """Wait until it ends by itself (a scripted exit); its exit status.

        Raises subprocess.TimeoutExpired when it still runs after `timeout_s`.
        """
        self._drain(timeout_s)
        return self._process.wait(timeout_s)

    def log(self) -> Log:
        """The server's log; after it ended, the log it left. Raises OSError when there is none."""
        if self._process.poll() is not None or self._rest:
            self._drain(5.0)
            if not self._rest.strip():
                raise OSError("the server ended without leaving a log")
            return msgspec.json.decode(self._rest, type=Log)
        return msgspec.json.decode(fetch(f"{self.url}/log"), type=Log)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it: first by closing its standard input, by signals only if that does not help."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdin = None
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            try:
                self._drain(timeout_s)
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
            break

    def _drain(self, timeout_s: float) -> None:
        # The log is larger than a pipe: unread, it would keep the process from ending.
        if self._process.stdout is not None and not self._process.stdout.closed:
            out, _ = self._process.communicate(timeout=timeout_s)
            self._rest += out


@contextlib.contextmanager
def serve_process(
    script: Script,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    keep_bodies: bool = False,
    expected_key: str | None = None,
    tls: tuple[Path, Path] | None = None,
) -> Iterator[ServerProcess]:
    """Serve `script` in a process of its own; arguments as for `ScriptedServer`.

    The log stays readable after the end. The process also ends when this one dies, however it dies.
    """
    arguments = ["--script", "-", "--port", str(port), "--host", host, "--log-on-exit"]
    if keep_bodies:
        arguments.append("--keep-bodies")
    if tls is not None:
        arguments += ["--cert", str(tls[0]), "--tls-key", str(tls[1])]
    # The key goes by the environment: command lines are readable by everyone.
    environment = {} if expected_key is None else {KEY_VARIABLE: expected_key}
    line = msgspec.json.encode(script) + b"\n"
    with _running(ServerProcess(arguments, first_line=line, environment=environment)) as server:
        yield server


@contextlib.contextmanager
def blast_process(
    tokens: int,
    gap_ms: float = 0.0,
    *,
    event_bytes: int = 190,
    coalesce: int = 1,
    ttft_ms: float = 0.0,
    stagger: bool = True,
    tick_ms: float = 0.5,
    processes: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    share_port: bool = False,
) -> Iterator[ServerProcess]:
    """A blast server (`servetune.sim.blast`) in a process of its own."""
    arguments = ["--blast", "--tokens", str(tokens), "--gap-ms", str(gap_ms), "--port", str(port)]
    arguments += ["--event-bytes", str(event_bytes), "--coalesce", str(coalesce), "--ttft-ms", str(ttft_ms)]
    arguments += ["--processes", str(processes), "--host", host, "--tick-ms", str(tick_ms)]
    if not stagger:
        arguments.append("--no-stagger")
    if share_port:
        arguments.append("--share-port")
    with _running(ServerProcess(arguments)) as server:
        yield server


@contextlib.contextmanager
def _running(server: ServerProcess) -> Iterator[ServerProcess]:
    try:
        yield server
    finally:
        server.stop()


def fetch(url: str, timeout_s: float = 10.0) -> bytes:
    """Body of GET `url` on this machine; certificates are not checked. Raises OSError."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("GET", parts.path)
        return connection.getresponse().read()
