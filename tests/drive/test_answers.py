"""Whole answers: whatever bytes come, cut anywhere, a request ends ok or with a named failure."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from servetune.drive.collect import Reply, Sent, collect
from servetune.drive.connection import Exchange
from servetune.drive.spool import Head, Record, Spool, read_spool
from servetune.events import Failure, Phase
from servetune.spec import Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
NAMES = tuple(str(failure) for failure in Failure)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def body_of(data: bytes, head: bytes = HEAD) -> bytes:
    """An answer with its length."""
    return head + f"content-length: {len(data)}\r\n\r\n".encode() + data


def record(reads: list[bytes], failure: str = "") -> Record:
    return Record(Head(0, 10, 20, 0, 500, failure, b"", b""), list(range(100, 100 + len(reads))), reads)


def judged(answer: bytes | list[bytes], failure: str = "") -> Reply:
    return Reply(record([answer] if isinstance(answer, bytes) else answer, failure), None)


def row(folder: Path, answer: bytes) -> Any:
    """The events of one request with this answer, through the spool file."""
    exchange = Exchange(0, 10)
    exchange.sent, exchange.ended = 20, 500
    exchange.stamps.append(100)
    exchange.reads.append(answer)
    spool = Spool(folder / "one.raw")
    spool.add(exchange)
    spool.close()
    target = Target.parse("http://127.0.0.1:1")
    return collect(folder / "one.raw", [Sent()], phase=Phase.MEASURED, target=target)


VALID = body_of(TOKEN * 2 + FINISH + DONE)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
# Names that the reader knows, with values that it does not expect.
WORDS = st.sampled_from(
    [
        *("choices", "delta", "content", "text", "finish_reason", "token_ids", "tool_calls", "function"),
        *("usage", "completion_tokens", "prompt_tokens", "timings", "predicted_n"),
        *("error", "object", "message"),
    ]
)
ODD = st.recursive(
    JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Answers from nearly right to noise."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.binary(max_size=200))
    if kind == 1:  # a right one with some bytes changed
        data = bytearray(draw(st.sampled_from([VALID, CHUNKED + chunk(TOKEN) + chunk(DONE) + b"0\r\n\r\n"])))
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data)
    if kind == 2:  # a right one that ends early or goes on
        data = bytes(VALID[: draw(st.integers(0, len(VALID)))])
        return data + draw(st.binary(max_size=20))
    if kind == 3:
        status = draw(st.sampled_from([100, 101, 103, 199, 200, 204, 206, 301, 304, 400, 429, 503, 600, 999]))
        extra = draw(
            st.sampled_from([b"", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"content-encoding: br\r\n"])
        )
        return body_of(draw(st.binary(max_size=60)), f"HTTP/1.1 {status} X\r\n".encode() + extra)
    payload = json.dumps(draw(ODD)).encode()
    if kind == 4:
        return body_of(b"data: " + payload + b"\n\n" + draw(st.sampled_from([b"", TOKEN, FINISH, DONE])))
    return body_of(payload, b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")


@given(answers(), st.lists(st.integers(0, 1000), max_size=6), st.sampled_from(["", "connection reset: x"]))
@example(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", [], "")
@example(b"", [], "")
def test_any_answer_is_ok_or_has_a_named_failure(answer: bytes, places: list[int], failure: str) -> None:
    ends = sorted({0, len(answer), *(place % (len(answer) + 1) for place in places)})
    reply = judged([answer[a:b] for a, b in pairwise(ends)], failure)
    assert reply.error == "" or reply.error.startswith(NAMES), reply.error
    if not reply.error:
        assert reply.counted.total > 0
        assert reply.done >= 100
    assert len(reply.counted.chunks) == len(reply.chunks.times)


READS = st.lists(st.binary(min_size=1, max_size=9), max_size=4)


@given(st.lists(st.tuples(st.integers(-1, 9), READS, st.text(max_size=5)), max_size=5))
def test_spool_round_trip_and_a_truncated_file(rows: list[tuple[int, list[bytes], str]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="servetune-test-") as folder:
        path = Path(folder) / "a.raw"
        spool = Spool(path)
        ends = [0]
        for index, reads, failure in rows:
            exchange = Exchange(index, 5)
            exchange.failure = failure
            exchange.reads += reads
            exchange.stamps.extend(range(len(reads)))
            spool.add(exchange)
            ends.append(path.stat().st_size)
        spool.close()
        read = list(read_spool(path))
        expected = [(index, list(range(len(reads))), reads, failure) for index, reads, failure in rows]
        assert [(r.head.index, r.stamps, r.reads, r.head.failure) for r in read] == expected
        whole = path.read_bytes()
        for size in {*ends, *range(0, len(whole), max(1, len(whole) // 7))}:
            path.write_bytes(whole[:size])
            assert len(list(read_spool(path))) == sum(end <= size for end in ends) - 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (VALID, ""),
        (body_of(TOKEN + FINISH), ""),  # no [DONE]: the finish_reason is enough
        (body_of(TOKEN + DONE), ""),
        (body_of(TOKEN), "truncated stream"),  # P-25
        (body_of(FINISH + DONE), "empty answer"),
        (body_of(b""), "truncated stream"),
        (body_of(TOKEN + b'data: {"error":{"message":"no memory"}}\n\n' + DONE), "server error: no memory"),
        (body_of(TOKEN + b'data: {"object":"error","message":"gone"}\n\n'), "server error: gone"),
        (body_of(TOKEN + b"data: {broken\n\n" + DONE), "malformed stream"),
        (
            body_of(b"<html>hello</html>", b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n"),
            "truncated stream",
        ),
        (body_of(b'{"error":"busy"}', b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\n"), "http status: 503 busy"),
        (body_of(b"", b"HTTP/1.1 404 Not Found\r\n"), "http status: 404"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + VALID, ""),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + VALID, ""),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "malformed stream: not HTTP"),
        (body_of(gzip.compress(TOKEN + DONE), HEAD + b"content-encoding: gzip\r\n"), ""),
        (body_of(b"not gzip", HEAD + b"content-encoding: gzip\r\n"), "malformed stream: gzip body"),
        (body_of(TOKEN, HEAD + b"content-encoding: br\r\n"), "malformed stream: content-encoding 'br'"),
        (body_of(b"data: " + b"[" * 100_000 + b"\n\n"), "malformed stream"),
        (body_of(b"[" * 100_000, b"HTTP/1.1 500 X\r\n"), "http status: 500"),
    ],
)
def test_how_answers_end(answer: bytes, error: str) -> None:
    found = judged(answer).error
    assert found.startswith(error) if error else not found


@pytest.mark.parametrize("number", [2**31, 2**40, 2**63, 10**30, -5])
@pytest.mark.parametrize(
    "form",
    [
        '{"choices":[{"delta":{"content":"a"}}],"usage":{"completion_tokens":%d}}',
        '{"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":%d}}',
        '{"choices":[{"delta":{"content":"a"}}],"timings":{"predicted_n":%d,"cache_n":%d}}',
        '{"choices":[],"usage":{"completion_tokens_details":{"reasoning_tokens":%d}}}',
    ],
)
def test_absurd_counts_are_refused_or_kept_but_never_break_the_reading(
    form: str, number: int, tmp_path: Path
) -> None:
    data = (form.replace("%d", str(number))).encode()
    events = row(tmp_path, body_of(TOKEN + b"data: " + data + b"\n\n" + DONE))
    assert len(events) == 1
    events.write(tmp_path / "events.parquet")
    if number < 0:  # not told
        assert events.status == ["ok"]
        assert events.completion_tokens[0] > 0
        assert events.prompt_tokens[0] == events.cached_tokens[0] == events.reasoning_tokens[0] == -1
    else:
        assert events.status == ["failed"]
        assert events.error[0].startswith("malformed stream")
