"""How requests travel: TLS, keys, addresses, proxies, connections, bodies, and how each failure is named."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pitfalls.running import PRELUDE, Silent, gate, prompts_of, run_replies, run_script, scripted
from raw_server import CLOSE, EVENTS, serving_raw, whole
from servetune.drive import Limits, UnreachableError, fetch, keeps_alive, request_bytes
from servetune.engines import Ask, Dialect, body
from servetune.events import Failure
from servetune.measure import Bench, Verdict
from servetune.sim import Piece, Reply, Script, Stream, error_reply, serve_process, uniform
from servetune.spec import Load, Target
from servetune.study import BenchSpec, EndpointError, bench

KEY = "sk-very-secret-0123456789"
GOOD = uniform(4, 3, 2)


def benched(target: Target, requests: int = 6, load: str = "concurrency=2", out: Path | None = None) -> Bench:
    spec = BenchSpec(
        target=target,
        prompts=prompts_of(requests),
        loads=[Load.parse(load)],
        traffic="test",
        requests=requests,
        warm_up=0,
        out=out,
    )
    return bench(spec, Silent())


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and localhost that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", "/CN=servetune test", "-addext", names]
    subprocess.run([*command, "-out", made[0], "-keyout", made[1]], check=True, capture_output=True)
    return made


def test_tls_with_the_right_authority(certificate: tuple[Path, Path]) -> None:
    script = scripted(GOOD, requests=6)
    with serve_process(script, tls=certificate) as server:
        assert server.url.startswith("https://")
        result = benched(Target.parse(server.url, ca_file=str(certificate[0])))
        log = server.log()
    assert result.windows[0].requests.ok == 6
    assert log.requests == PRELUDE + 6
    assert len({record.connection for record in log.records}) == 4


def test_tls_that_is_not_trusted_is_not_used(certificate: tuple[Path, Path]) -> None:
    with serve_process(scripted(GOOD, requests=6), tls=certificate) as server:
        with pytest.raises(EndpointError, match="certificate"):
            benched(Target.parse(server.url))
        assert server.log().requests == 0
        assert benched(Target.parse(server.url, insecure=True)).windows[0].requests.ok == 6


def test_http_spoken_to_https_is_named(certificate: tuple[Path, Path]) -> None:
    with serve_process(Script((GOOD,)), tls=certificate) as server, pytest.raises(EndpointError):
        benched(Target.parse(server.url.replace("https", "http")))
    with serve_process(Script((GOOD,))) as server, pytest.raises(EndpointError, match=r"(?i)ssl|tls"):
        benched(Target.parse(server.url.replace("http", "https"), insecure=True))


def test_the_key_is_sent_and_never_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    echo = error_reply(500, f"key {KEY} is over its limit")
    stream = {"content-type": "text/event-stream"}
    beside = Reply(
        headers=stream,
        pieces=(Piece(1, b'data: {"error":{"message":"no quota for ' + KEY.encode() + b'"}}\n\n'),),
    )
    broken = Reply(headers=stream, pieces=(Piece(1, f"data: {KEY}\n\n".encode()),))
    long = Reply(status=500, pieces=(Piece(1, b"x" * 285 + KEY.encode()),))
    replies = [GOOD, echo, beside, broken, long, GOOD]
    with serve_process(scripted(*replies), expected_key=KEY, keep_bodies=True) as server:
        target = Target.parse(server.url, key=KEY)
        result = benched(target, out=tmp_path / "out", load="serial")
        log = server.log()
    assert {record.authorization for record in log.records} == {"correct"}
    assert KEY not in repr(target)
    window = result.windows[0]
    assert window.requests.ok == 2
    errors = [row.error for row in window.rows if row.error]
    assert errors[0] == "http status: 500 key *** is over its limit"
    assert errors[1] == "server error: no quota for ***"
    shown = capfd.readouterr()
    files = b"".join(path.read_bytes() for path in sorted((tmp_path / "out").iterdir()))
    parts = [KEY, KEY[:15]]  # a cut message must not show the beginning either
    for part in parts:
        assert part.encode() not in files
        assert part not in " ".join(errors)
        assert part not in shown.out + shown.err


@pytest.mark.parametrize("status", [401, 403, 400, 500])
def test_a_refusal_that_repeats_the_key_is_masked(status: int) -> None:
    refused = whole(f'{{"error":"Incorrect key: {KEY}"}}'.encode(), f"{status} No", "application/json")

    with serving_raw(lambda _: (refused,)) as server:
        target = Target.parse(server.url, key=KEY)
        server._page = lambda _: refused  # type: ignore[method-assign]
        with pytest.raises(EndpointError) as caught:
            benched(target)
    assert KEY not in str(caught.value)
    if status in (401, 403):
        assert "refused the key" in str(caught.value)
        assert "***" in str(caught.value)


def test_a_wrong_key_is_named() -> None:
    with serve_process(Script((GOOD,)), expected_key=KEY) as server:
        for target in (Target.parse(server.url), Target.parse(server.url, key="sk-other")):
            with pytest.raises(EndpointError, match="refused the key") as caught:
                benched(target)
            assert "sk-other" not in str(caught.value)


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with serve_process(scripted(GOOD, requests=6), host="::1") as server:
        assert "[::1]" in server.url
        result = benched(Target.parse(server.url))
        hosts = {record.headers["host"] for record in server.log().records}
    assert result.windows[0].requests.ok == 6
    assert hosts == {server.url.removeprefix("http://")}


class Proxy:
    """A small HTTP proxy on a loop of its own; keeps the first line of each request and tunnel."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n")[0].decode()
            self.lines.append(line)
            method, where, _ = line.split()
            authority = where if method == "CONNECT" else where.split("/")[2]
            host, _, port = authority.rpartition(":")
            there, back = await asyncio.open_connection(host.strip("[]"), int(port))
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\nvia: test\r\n\r\n")
            else:
                back.write(self._rewritten(head))
            await asyncio.gather(
                self._copy(reader, back, absolute=method != "CONNECT"), self._copy(there, writer)
            )
        writer.close()

    def _rewritten(self, data: bytes) -> bytes:
        method, where, version = data.split(b"\r\n")[0].split(b" ")
        path = b"/" + where.split(b"/", 3)[3]
        return b" ".join((method, path, version)) + data[data.index(b"\r\n") :]

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, absolute: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if absolute and data.startswith((b"POST http://", b"GET http://")):
                    self.lines.append(data.split(b"\r\n")[0].decode())
                    data = self._rewritten(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        ready = threading.Event()
        stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            stop.append((asyncio.get_running_loop(), asyncio.Event()))
            ready.set()
            await stop[0][1].wait()
            server.close()

        thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        thread.start()
        ready.wait(10)
        try:
            yield self
        finally:
            stop[0][0].call_soon_threadsafe(stop[0][1].set)
            thread.join(10)


def test_http_goes_through_a_proxy_in_absolute_form() -> None:
    with serve_process(scripted(GOOD, requests=6)) as server, Proxy().running() as proxy:
        result = benched(Target.parse(server.url, proxy=proxy.url))
        log = server.log()
    assert result.windows[0].requests.ok == 6
    assert f"POST {server.url}/v1/chat/completions HTTP/1.1" in proxy.lines
    assert f"GET {server.url}/v1/models HTTP/1.1" in proxy.lines
    assert sum(line.startswith("POST") for line in proxy.lines) == log.requests == PRELUDE + 6


def test_https_goes_through_a_proxy_by_connect(certificate: tuple[Path, Path]) -> None:
    with serve_process(scripted(GOOD, requests=6), tls=certificate) as server, Proxy().running() as proxy:
        target = Target.parse(server.url, proxy=proxy.url, ca_file=str(certificate[0]))
        result = benched(target)
        requests = server.log().requests
    assert result.windows[0].requests.ok == 6
    assert requests == PRELUDE + 6
    assert {line.split()[0] for line in proxy.lines} == {"CONNECT"}
    assert {line.split()[1] for line in proxy.lines} == {server.url.removeprefix("https://")}


def test_a_proxy_that_refuses_is_named(certificate: tuple[Path, Path]) -> None:
    with serve_process(Script((GOOD,))) as proxy:  # no proxy at all: it answers CONNECT with 404
        target = Target.parse("https://127.0.0.1:9", proxy=proxy.url, insecure=True)
        with pytest.raises(EndpointError):
            benched(target)
        with pytest.raises(UnreachableError):
            fetch(target, "GET", "/v1/models")
        assert not keeps_alive(target, b"", 5.0)
    with serving_raw(lambda _: ()) as gone:
        pass
    with pytest.raises(EndpointError, match="refused"):
        benched(Target.parse("http://127.0.0.1:9", proxy=gone.url))


def test_the_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run_replies(GOOD).window.requests.ok == 5


def test_connections_are_used_again() -> None:
    run = run_script(scripted(GOOD, requests=40), "concurrency=4", requests=40, prompts=40)
    assert run.window.requests.ok == 40
    assert run.window.client.opened == 0  # all of the window's were open before it
    assert len({record.connection for record in run.log.records[PRELUDE:]}) == 4


def payload(target: Target) -> bytes:
    return request_bytes(target, "POST", *body(prompts_of(1)[0], Ask(model="m"), Dialect("endpoint")))


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        (Script((GOOD,)), True),
        (Script((uniform(4, 3, 2, transfer="identity"),)), False),  # ends with the connection
        (Script((uniform(4, 3, 2, headers={"connection": "close"}),)), False),
        (Script((uniform(4, 3, 2, end="close_early"),)), False),
        (Script((uniform(4, 3, 2, end="reset"),)), False),
        (Script((error_reply(503),)), True),
    ],
)
def test_keeps_alive(script: Script, kept: bool) -> None:
    with serve_process(script) as server:
        target = Target.parse(server.url)
        assert keeps_alive(target, payload(target), 10.0) is kept


def test_keeps_alive_gives_up_in_time() -> None:
    with serve_process(Script((uniform(4, 3, 2, stop_after=1, end="hang"),))) as server:
        target = Target.parse(server.url)
        assert not keeps_alive(target, payload(target), 0.3)
    assert not keeps_alive(target, payload(target), 0.3)  # nobody there any more


def test_a_server_that_closes_without_a_word_loses_no_request() -> None:
    with serving_raw(lambda _: (whole(EVENTS), 0.001, CLOSE)) as server:
        target = Target.parse(server.url)
        assert not keeps_alive(target, payload(target), 10.0)
        result = benched(target, requests=30, load="concurrency=3")
        connections = {asked.connection for asked in server.posts}
        announced = {asked.headers.get("connection") for asked in server.posts[-30:]}
    assert result.windows[0].requests.ok == 30
    assert len(connections) >= 30
    assert announced == {"close"}


@pytest.mark.parametrize("transfer", ["chunked", "identity", "length"])
@pytest.mark.parametrize("gzip", [False, True])
def test_each_way_to_frame_a_body(transfer: str, gzip: bool) -> None:
    stream = Stream(chunks=GOOD.chunks, transfer=transfer, gzip=gzip)  # type: ignore[arg-type]
    run = run_script(Script((stream,)), "concurrency=3", requests=6, prompts=6)
    assert run.window.requests.ok == 6
    assert {row.output_tokens for row in run.rows} == {4}


UPGRADE = b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"

FAILURES: dict[str, tuple[Stream | Reply, Failure | None]] = {
    "early close": (uniform(6, 3, 2, stop_after=3, end="close_early"), Failure.CLOSED),
    "early close of an identity body": (
        uniform(6, 3, 2, stop_after=3, end="normal", transfer="identity"),
        Failure.TRUNCATED,
    ),
    "reset": (uniform(6, 3, 2, stop_after=3, end="reset", end_gap_ms=20), Failure.RESET),
    "garbage": (Reply(pieces=(Piece(1, b"\x00\xff garbage \r\n\r\n"),), raw=True), Failure.BAD_HTTP),
    "upgrade": (Reply(pieces=(Piece(1, UPGRADE),), raw=True), Failure.BAD_HTTP),
    "nothing at all": (Reply(pieces=(), raw=True, end="close_early"), Failure.CLOSED),
    "stall": (uniform(6, 3, 2, stop_after=3, end="hang"), Failure.STALLED),
    "head only": (Reply(pieces=(), head_at_ms=1, end="hang", transfer="chunked"), Failure.STALLED),
    "busy": (error_reply(503, "busy", retry_after_s=1), Failure.HTTP_STATUS),
    "moved": (Reply(status=302, headers={"location": "http://127.0.0.1:9/"}), Failure.HTTP_STATUS),
    "bad json": (
        Reply(headers={"content-type": "text/event-stream"}, pieces=(Piece(1, b"data: {oops\n\n"),)),
        Failure.BAD_STREAM,
    ),
    "error in the stream": (uniform(6, 3, 2, error_at=3), Failure.SERVER_ERROR),
    "no tokens": (Stream(), Failure.EMPTY),
    "no [DONE], a finish_reason": (uniform(4, 3, 2, done=False), None),
    "no finish_reason, a [DONE]": (uniform(4, 3, 2, finish_in="none"), None),
    "neither": (uniform(4, 3, 2, done=False, finish_in="none"), Failure.TRUNCATED),
    "a close after the end": (uniform(4, 3, 2, end="close_early"), None),
    "a reset after the end": (uniform(4, 3, 2, end="reset", end_gap_ms=20), None),
    "interim answer": (
        Reply(
            raw=True,
            pieces=(
                Piece(0, b"HTTP/1.1 100 Continue\r\n\r\n"),
                Piece(2, b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
                Piece(
                    4,
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
                    b'data: {"choices":[{"delta":{"content":"a b"},"finish_reason":"stop"}]}\n\n'
                    b"data: [DONE]\n\n",
                ),
            ),
        ),
        None,
    ),
}


def test_each_failure_has_its_name() -> None:
    """All of them in one bench, each among good requests: none disturbs another."""
    names = list(FAILURES)
    replies = [reply for name in names for reply in (FAILURES[name][0], GOOD)]
    script = scripted(*replies)
    count = len(replies)
    run = run_script(script, requests=count, prompts=count, limits=Limits(20.0, 0.6))
    got = {name: run.rows[2 * place].error for place, name in enumerate(names)}
    for name, (_, failure) in FAILURES.items():
        assert got[name].startswith(failure) if failure else got[name] == "", (name, got[name])
    assert {row.error for row in run.rows[1::2]} == {""}
    assert got["busy"] == "http status: 503 busy"
    assert got["error in the stream"] != "server error: "
    assert run.log.requests == PRELUDE + count
    assert gate(run.window, "failures").verdict is Verdict.VOID


def test_a_slow_accept_is_waited_for_and_then_named() -> None:
    slow = uniform(4, 3, 2, accept_delay_ms=300)
    run = run_script(scripted(GOOD, slow, requests=2), "rate=10,arrivals=constant", requests=2, prompts=2)
    assert run.window.requests.ok == 2
    run = run_replies(uniform(4, 60_000, 2, head_at_ms=60_000), times=1, limits=Limits(0.5, 30))
    assert run.rows[0].error == "timeout: no end after 0.5 s"


def test_bytes_after_an_answer_in_the_same_read_end_it_all_the_same() -> None:
    """A server that sends an answer nobody asked for behind the one that was: the first counts at once."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = head + f"{len(EVENTS):x}\r\n".encode() + EVENTS + b"\r\n0\r\n\r\n"
    with serving_raw(lambda _: [answer + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"]) as server:
        (window,) = benched(Target.parse(server.url), requests=2, load="serial").windows
    assert window.requests.ok == 2
    assert max(row.e2e_ms or 0 for row in window.rows) < 5_000
