"""The server over real sockets. Times are only compared downwards, or with wide margins."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plain_client import CHAT, ask, connect, exchange, payloads, post, read_all, request, serving

from servetune.sim import Ask, Chunk, Log, Piece, Reply, Script, Stream, error_reply, json_reply, uniform
from servetune.sim.layout import lay_out

MS = 1_000_000


def test_a_stream_arrives_as_scripted() -> None:
    stream = Stream(
        role_frame=True, chunks=(Chunk(20, 3), Chunk(10, 2), Chunk(0, 1, with_previous=True)), done_gap_ms=5
    )
    with serving(stream) as server:
        status, headers, body = post(server, messages=[{"role": "user", "content": "one two"}], model="m")
        record = server.log().records[0]
    assert status == 200
    assert headers == {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
    expected = lay_out(stream, Ask(model="m", prompt_tokens=2)).reply.pieces
    assert body == b"".join(piece.data for piece in expected)
    assert record.started_ns == record.received_ns
    for piece, written in zip(expected, record.writes_ns, strict=True):
        assert written >= record.received_ns + piece.at_ms * MS
    assert record.outcome == "done"
    assert 0 <= record.worst_late_ns < 5_000 * MS


def test_replies_take_turns_and_connections_live_on() -> None:
    script = Script((json_reply({"a": 1}), error_reply(503, "busy", retry_after_s=7)))
    with serving(script) as server, connect(server) as sock:
        sock.sendall(request() + request() + request("{}").replace(b"host: x", b"connection: close"))
        answers = read_all(sock)
        log = server.log()
    assert [line for line in answers.split(b"\r\n") if b"HTTP/1.1" in line] == [
        b"HTTP/1.1 200 OK",
        # The body of the one before has no line end.
        b'{"a":1}HTTP/1.1 503 Service Unavailable',
        b'{"error":{"message":"busy","type":"InternalServerError","param":null,"code":503}}HTTP/1.1 200 OK',
    ]
    assert b"retry-after: 7" in answers
    assert log.connections == 1
    assert [record.status for record in log.records] == [200, 503, 200]


def test_close_early_has_no_terminal_chunk() -> None:
    with serving(uniform(5, 1, 1, stop_after=2, end="close_early")) as server:
        answer = exchange(server, request())
    assert answer.count(b"data: ") == 2
    assert not answer.endswith(b"0\r\n\r\n")


def test_close_early_with_a_length() -> None:
    with serving(Reply(pieces=(Piece(0, b"abc"),), end="close_early")) as server:
        answer = exchange(server, request())
    assert b"content-length: 4\r\n" in answer
    assert answer.endswith(b"abc")


def test_reset() -> None:
    with serving(uniform(2, 1, 1, stop_after=1, end="reset", end_gap_ms=30)) as server:
        with pytest.raises(ConnectionResetError):
            exchange(server, request())
        assert server.log().records[0].outcome == "reset"


def test_hang_stays_open_until_the_client_leaves() -> None:
    with serving(uniform(2, 1, 1, stop_after=1, end="hang")) as server:
        with connect(server, 0.3) as sock:
            sock.sendall(request())
            assert b"data: " in sock.recv(65536)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            assert server.log().in_flight == 1
        _until(lambda: server.log().in_flight == 0)
        assert server.log().records[0].outcome == "lost"


def test_exit_ends_all_connections() -> None:
    script = Script((uniform(1, 0, 0, stop_after=0, end="hang"), uniform(3, 5, 5, stop_after=1, end="exit")))
    with serving(script) as server, connect(server) as other:
        other.sendall(request())
        _until(lambda: len(server.log().records) == 1)
        _ended(lambda: exchange(server, request()))
        _ended(lambda: read_all(other))
        with pytest.raises(ConnectionRefusedError):
            connect(server)
        assert server.exited.is_set()


def test_exit_on_the_nth_request_and_above_a_load() -> None:
    with serving(Script((uniform(1, 0, 0),), die_at_request=3)) as server:
        assert [post(server)[0], post(server)[0]] == [200, 200]
        _ended(lambda: post(server))
        assert server.log().exit_reason == "request 3 was received"
    with serving(Script((uniform(1, 60_000, 0),), die_above_in_flight=2)) as server:
        socks = [connect(server) for _ in range(3)]
        for sock in socks:
            sock.sendall(request())
        for sock in socks:
            _ended(partial(read_all, sock))
            sock.close()
        assert server.log().in_flight_max == 3
        assert server.log().in_flight == 0


def _ended(act: Any) -> None:
    """`act` must find the connection closed or reset."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        act()


def _until(true: Any) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_identity_ends_by_closing_and_raw_has_no_head() -> None:
    with serving(uniform(2, 1, 1, transfer="identity")) as server:
        head, _, body = exchange(server, request()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert body.endswith(b"data: [DONE]\n\n")
    with serving(Reply(pieces=(Piece(0, b"\x00garbage"), Piece(5, b"\r\n\xff")), raw=True)) as server:
        assert exchange(server, request()) == b"\x00garbage\r\n\xff"


def test_gzip_round_trip() -> None:
    stream = uniform(20, 0, 0)
    with serving(Script((Stream(chunks=stream.chunks, gzip=True), stream))) as server:
        _, headers, packed = post(server)
        _, _, plain = post(server)
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed) == plain


def test_split_at_one_byte_over_the_wire() -> None:
    stream = Stream(chunks=(Chunk(0, text="😀 é"), Chunk(1)))
    with serving(Script((Stream(chunks=stream.chunks, split=1), stream))) as server:
        _, _, cut = post(server)
        _, _, whole = post(server)
        writes = len(server.log().records[0].writes_ns)
    assert cut == whole
    assert writes == len(cut)


def test_a_large_frame_passes_through_a_slow_reader() -> None:
    text = "x" * 5_000_000
    with serving(Stream(chunks=(Chunk(0, text=text), Chunk(1)))) as server, connect(server) as sock:
        sock.sendall(request())
        time.sleep(0.1)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += sock.recv(1 << 20)
    assert text.encode() in got


def test_slots_serve_in_order() -> None:
    with serving(Script((uniform(1, 30, 0),), slots=1)) as server:
        socks = [connect(server) for _ in range(4)]
        for sock in socks:
            sock.sendall(request())
        for sock in socks:
            while not sock.recv(65536).endswith(b"0\r\n\r\n"):
                pass
            sock.close()
    log = server.log()
    starts = [record.started_ns or 0 for record in log.records]
    assert starts == sorted(starts)
    for before, after in itertools.pairwise(starts):
        assert after - before >= 30 * MS
    assert [record.outcome for record in log.records] == ["done"] * 4


def test_long_queues_are_not_deep_calls() -> None:
    with serving(Script((Reply(),), slots=1)) as server, connect(server) as sock:
        count = 3000
        sock.sendall(request() * count)
        got = b""
        while got.count(b"HTTP/1.1 200 OK\r\n") < count:
            got += sock.recv(65536)
    script = Script((uniform(1, 300, 0), *(Reply(),) * 200), slots=1)
    with serving(script) as server:
        socks = [connect(server) for _ in range(200)]
        for sock in socks:
            sock.sendall(request())
        assert all(sock.recv(65536).startswith(b"HTTP/1.1 200") for sock in socks)
        for sock in socks:
            sock.close()


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    script = Script((Reply(end="hang"), uniform(2, 0, 0), uniform(3, 0, 0)), slots=1)
    with serving(script) as server:
        with connect(server) as first:
            first.sendall(request())
            _until(lambda: len(server.log().records) == 1)
            with connect(server) as second:
                second.sendall(request())
                _until(lambda: len(server.log().records) == 2)
            _until(lambda: server.log().records[1].outcome == "lost")
            assert server.log().records[1].started_ns is None
        assert len(payloads(post(server)[2])) == 4
    assert [record.outcome for record in server.log().records] == ["lost", "lost", "done"]


def test_strict_fields() -> None:
    script = Script((uniform(1, 0, 0), uniform(2, 0, 0)), known_fields=("stream", "messages"))
    with serving(script) as server:
        status, _, body = post(server, ignore_eos=True)
        assert status == 400
        assert json.loads(body)["error"]["param"] == "ignore_eos"
        # The refused request used up no reply.
        assert len(payloads(post(server)[2])) == 2


def test_max_tokens() -> None:
    with serving(Script((uniform(9, 0, 0, usage="each"),), honour_max_tokens=True)) as server:
        frames = payloads(post(server, max_tokens=4)[2])
        assert len(payloads(post(server, max_completion_tokens=2)[2])) == 3
    assert frames[-1]["usage"]["completion_tokens"] == 4
    assert frames[-1]["choices"][0]["finish_reason"] == "length"


def test_requests_without_a_stream() -> None:
    with serving(uniform(3, 5, 5)) as server:
        status, headers, body = ask(server, "POST", "/v1/completions", '{"prompt":"a b"}')
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["choices"][0]["text"] == " the river runs"
    assert json.loads(body)["usage"] == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}


def test_pages() -> None:
    with serving(uniform(3, 0, 0)) as server:
        post(server)
        assert json.loads(ask(server, "GET", "/v1/models")[2])["data"][0]["id"] == "scripted"
        assert ask(server, "GET", "/health")[::2] == (200, b"")
        assert json.loads(ask(server, "GET", "/version")[2])["version"]
        metrics = ask(server, "GET", "/metrics?x=1")[2].decode()
        assert ask(server, "GET", "/nowhere")[0] == 404
        status, headers, _ = ask(server, "GET", CHAT)
        assert (status, headers["allow"]) == (405, "POST")
        assert ask(server, "DELETE", "/health")[0] == 405
    assert "servetune_sim:requests_total 1\n" in metrics
    assert "servetune_sim:generation_tokens_total 3\n" in metrics


def test_vllm_counters_follow_the_stream() -> None:
    stream = uniform(9, 0, 0, per_chunk=4, prompt_tokens=7, draft_tokens=5)
    with serving(Script((stream,), metrics_vllm=True)) as server:
        post(server)
        lines = ask(server, "GET", "/metrics")[2].decode().splitlines()
    values = {line.split("{")[0]: line.split()[-1] for line in lines if not line.startswith("#")}
    assert values == {
        "vllm:num_requests_running": "0",
        "vllm:num_requests_waiting": "0",
        "vllm:prompt_tokens_total": "7",
        "vllm:generation_tokens_total": "9",
        "vllm:spec_decode_num_drafts_total": "2",
        "vllm:spec_decode_num_draft_tokens_total": "10",
        "vllm:spec_decode_num_accepted_tokens_total": "3",
    }


def test_given_metrics() -> None:
    with serving(Script((uniform(1, 0, 0),), metrics_text="a 1\n")) as server:
        assert ask(server, "GET", "/metrics")[2] == b"a 1\n"


def test_keys_are_checked_and_never_logged() -> None:
    with serving(uniform(1, 0, 0), expected_key="sesame", keep_bodies=True) as server:
        assert post(server)[0] == 401
        assert post(server, headers={"Authorization": "Bearer wrong"})[0] == 401
        assert post(server, headers={"Authorization": "Bearer sesame"})[0] == 200
        assert ask(server, "GET", "/v1/models")[0] == 401
        raw = ask(server, "GET", "/log")[2]
    log = msgspec.json.decode(raw, type=Log)
    assert [record.authorization for record in log.records] == ["missing", "wrong", "correct"]
    assert b"sesame" not in raw
    assert b"Bearer" not in raw


def test_log_over_http() -> None:
    with serving(uniform(2, 10, 10), keep_bodies=True) as server:
        post(server, model="m", headers={"User-Agent": "me"})
        log = msgspec.json.decode(ask(server, "GET", "/log")[2], type=Log)
        (record,) = log.records
        assert record == server.log().records[0]
    assert json.loads(record.body or "") == {"stream": True, "messages": [], "model": "m"}
    assert record.body_size == len(record.body or "")
    assert (record.n, record.path, record.in_flight) == (1, CHAT, 1)
    assert record.headers["user-agent"] == "me"
    assert 0.5 < log.in_flight_mean <= 1.0
    assert log.pages == {"/log": 1}


def test_accept_delay_holds_back_reading() -> None:
    with serving(uniform(1, 0, 0, accept_delay_ms=80)) as server:
        begun = time.monotonic_ns()
        post(server)
        assert server.log().records[0].received_ns - begun >= 80 * MS


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_garbage_is_refused_and_the_server_lives(garbage: bytes) -> None:
    with serving(uniform(1, 0, 0)) as server:
        try:
            answer = exchange(server, garbage)
        except ConnectionResetError:
            answer = b"HTTP/1.1 4"
        assert answer.startswith(b"HTTP/1.1 4")
        assert post(server)[0] == 200


@pytest.mark.parametrize("body", ["", "{", "[]", "1", '"\\ud800"', '{"a":1}}', "\u0000"])
def test_bodies_that_are_no_object(body: str) -> None:
    with serving(uniform(1, 0, 0)) as server:
        assert ask(server, "POST", CHAT, body)[0] == 400
        assert post(server)[0] == 200


def test_odd_but_valid_fields_are_harmless() -> None:
    with serving(uniform(1, 0, 0)) as server:
        body = '{"messages":{"content":[1,{"text":"a"},null]},"max_tokens":"x","stream_options":3,"model":7}'
        assert ask(server, "POST", CHAT, body)[0] == 200


def test_requests_in_parts_and_chunked_bodies() -> None:
    data = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    data += b"2\r\n{}\r\n0\r\n\r\n"
    with serving(json_reply(1)) as server, connect(server) as sock:
        for index in range(len(data)):
            sock.sendall(data[index : index + 1])
        assert read_all(sock).endswith(b"\r\n\r\n1")


def test_expect_continue() -> None:
    with serving(json_reply(1)) as server, connect(server) as sock:
        sock.sendall(request("{}").replace(b"host: x", b"expect: 100-continue\r\nconnection: close")[:-2])
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"{}")
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")


def test_ipv6() -> None:
    with serving(uniform(1, 0, 0), host="::1") as server:
        assert server.url == f"http://[::1]:{server.port}"
        assert post(server)[0] == 200


def test_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    try:
        subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    from servetune.sim.process import fetch

    with serving(uniform(1, 0, 0), tls=(cert, key)) as server:
        assert server.url.startswith("https://")
        assert b"scripted" in fetch(f"{server.url}/v1/models")


def test_in_flight_is_exact() -> None:
    with serving(uniform(1, 150, 0)) as server:
        threads = [threading.Thread(target=post, args=(server,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Not before the end: a client has its last byte a moment before the server's books are closed.
    log = server.log()
    assert log.in_flight_max == max(record.in_flight for record in log.records)
    assert log.in_flight == 0
    assert 1 < log.in_flight_mean <= 20
