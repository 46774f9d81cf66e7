"""Byte-exact rendering: events, framing, transfer encoding."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from servetune.sim import Ask, Chunk, Piece, Reply, Stream, uniform
from servetune.sim.layout import frame, lay_out
from servetune.sim.wire import encode

PLAIN = Stream(chunks=(Chunk(10, text="Grüß"), Chunk(5, text=" 你好")))


def body(stream: Stream, ask: Ask | None = None) -> bytes:
    return b"".join(piece.data for piece in lay_out(stream, ask or Ask()).reply.pieces)


def frames(stream: Stream, ask: Ask | None = None) -> list[dict[str, Any]]:
    lines = body(stream, ask).decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]


def test_chat_bytes() -> None:
    head = (
        '{"id":"chatcmpl-scripted","object":"chat.completion.chunk","created":1700000000,"model":"scripted",'
    )
    expected = "data: [DONE]\n\n"
    for delta, reason in (("{}", '"stop"'), ('{"content":" 你好"}', "null"), ('{"content":"Grüß"}', "null")):
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'
        expected = f'data: {head}"choices":[{choice}]}}\n\n' + expected
    assert body(PLAIN) == expected.encode()
    assert [piece.at_ms for piece in lay_out(PLAIN, Ask()).reply.pieces] == [10, 15, 15, 15]


def test_completions_frames() -> None:
    stream = Stream(chunks=(Chunk(1, text="a"),), role_frame=True, ids=True, prompt_tokens=2)
    first, last = frames(stream, Ask(api="completions"))
    assert first["object"] == "text_completion"
    assert first["choices"] == [
        {
            "index": 0,
            "text": "a",
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [1000],
            "prompt_token_ids": [0, 1],
        }
    ]
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, b'data: {"a":[1]}\n\n'),
        ({"eol": "\r\n"}, b'data: {"a":[1]}\r\n\r\n'),
        ({"eol": "\r"}, b'data: {"a":[1]}\r\r'),
        ({"space_after_colon": False}, b'data:{"a":[1]}\n\n'),
        ({"event_field": True}, b'event: message\nid: 7\ndata: {"a":[1]}\n\n'),
        ({"multiline_data": True}, b'data: {\ndata:   "a": [\ndata:     1\ndata:   ]\ndata: }\n\n'),
        (
            {"multiline_data": True, "eol": "\r", "space_after_colon": False},
            b'data:{\rdata:  "a": [\rdata:    1\rdata:  ]\rdata:}\r\r',
        ),
    ],
)
def test_event_framing(options: dict[str, Any], expected: bytes) -> None:
    assert frame(Stream(**options), b'{"a":[1]}', 7) == expected


def test_comments_and_bom() -> None:
    stream = uniform(1, 30, 0, comments=True, bom=True, finish_in="none", head_at_ms=10)
    reply = lay_out(stream, Ask()).reply
    assert reply.pieces[0] == Piece(10, b"\xef\xbb\xbf: keep-alive\n\n")
    assert reply.pieces[1].at_ms == 30
    assert reply.pieces[1].data.startswith(b"data: {")
    assert reply.pieces[2].data == b": keep-alive\n\ndata: [DONE]\n\n"


def test_coalesced_events_share_a_write() -> None:
    stream = Stream(chunks=(Chunk(10), Chunk(with_previous=True), Chunk(5)), done=False, finish_in="none")
    layout = lay_out(stream, Ask())
    assert [piece.data.count(b"data: ") for piece in layout.reply.pieces] == [2, 1]
    assert [(a.at_ms, a.piece) for a in layout.arrivals] == [(10, 0), (10, 0), (15, 1)]


def test_split_cuts_characters_and_keeps_the_bytes() -> None:
    for size in (1, 3, 7, 100_000):
        stream = Stream(chunks=PLAIN.chunks, split=size, split_gap_ms=0.25)
        pieces = lay_out(stream, Ask()).reply.pieces
        assert b"".join(piece.data for piece in pieces) == body(PLAIN)
        assert max(len(piece.data) for piece in pieces) <= size
        times = [piece.at_ms for piece in pieces]
        assert times == sorted(times)
    one = [p.data for p in lay_out(Stream(chunks=PLAIN.chunks, split=1), Ask()).reply.pieces]
    assert b"\xc3" in one


def test_ids_and_role() -> None:
    stream = Stream(chunks=(Chunk(1, 2), Chunk(1, 3)), role_frame=True, ids=True, prompt_tokens=3)
    role, first, second, finish = frames(stream)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["prompt_token_ids"] == [0, 1, 2]
    assert "prompt_token_ids" not in first
    assert [f["choices"][0]["token_ids"] for f in (role, first, second, finish)] == [
        [],
        [1000, 1001],
        [1002, 1003, 1004],
        [],
    ]


def test_last_usage_waits_to_be_asked() -> None:
    stream = uniform(4, 0, 0, per_chunk=2, usage_override={"prompt_tokens_details": {"cached_tokens": 5}})
    assert all("usage" not in f for f in frames(stream))
    last = frames(stream, Ask(include_usage=True, prompt_tokens=6))[-1]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 6,
        "total_tokens": 10,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    always = uniform(4, 0, 0, usage_always=True)
    assert frames(always)[-1]["usage"]["completion_tokens"] == 4


def test_usage_in_each_frame_is_cumulative_and_counts_reasoning() -> None:
    stream = Stream(
        chunks=(Chunk(1, 2, kind="reasoning"), Chunk(1, 3)), role_frame=True, usage="each", prompt_tokens=1
    )
    usages = [f["usage"] for f in frames(stream)]
    assert [usage["completion_tokens"] for usage in usages] == [0, 2, 5, 5]
    assert usages[-1]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_timings_are_llama_cpps() -> None:
    stream = uniform(9, 100, 10, per_chunk=4, timings="each", prompt_tokens=50)
    timings = [f["timings"] for f in frames(stream)]
    assert [t["predicted_n"] for t in timings] == [4, 8, 9, 9]
    assert timings[-1]["predicted_ms"] == 20
    assert timings[-1]["prompt_per_second"] == 500
    assert (timings[-1]["draft_n"], timings[-1]["draft_n_accepted"]) == (6, 3)
    assert "draft_n" not in timings[0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("beside", "more"), [("absent", {}), ("null", {"content": None}), ("empty", {"content": ""})]
)
def test_reasoning_shapes(name: Any, beside: Any, more: dict[str, Any]) -> None:
    stream = Stream(
        chunks=(Chunk(1, kind="reasoning", text="hm"),), reasoning_field=name, reasoning_beside=beside
    )
    assert frames(stream)[0]["choices"][0]["delta"] == {**more, name: "hm"}


def test_tool_call_shapes() -> None:
    stream = Stream(chunks=(Chunk(1, kind="tool_call", text="{"), Chunk(1, kind="tool_call", text="}")))
    first, second, _ = [f["choices"][0]["delta"] for f in frames(stream)]
    assert first["tool_calls"][0]["function"] == {"name": "lookup", "arguments": "{"}
    assert first["tool_calls"][0]["id"] == "call-1"
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}


def test_finish_reason_in_the_last_chunk() -> None:
    found = frames(uniform(2, 0, 0, finish_in="last_chunk"))
    assert [f["choices"][0]["finish_reason"] for f in found] == [None, "stop"]


def test_error_event_and_early_stop() -> None:
    assert "error" in frames(uniform(5, 0, 1, error_at=2))[2]
    assert body(uniform(5, 0, 1, error_at=2)).endswith(b"data: [DONE]\n\n")
    assert len(frames(uniform(5, 0, 1, stop_after=2))) == 2
    assert b"[DONE]" not in body(uniform(5, 0, 1, stop_after=5))


def test_answer_without_a_stream() -> None:
    stream = Stream(chunks=(Chunk(10, kind="reasoning", text="hm"), Chunk(5, text="yes")), done_gap_ms=2)
    reply = lay_out(stream, Ask(stream=False)).reply
    assert [piece.at_ms for piece in reply.pieces] == [17]
    answer = json.loads(reply.pieces[0].data)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
    }
    assert answer["usage"]["completion_tokens"] == 2


REPLY = Reply(headers={"X-A": "b"}, pieces=(Piece(1, b"one"), Piece(2, b""), Piece(3, b"two")))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 6\r\n\r\none", b"", b"two"]),
        (
            {"transfer": "chunked"},
            [
                b"HTTP/1.1 200 OK\r\nx-a: b\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
                b"",
                b"3\r\ntwo\r\n0\r\n\r\n",
            ],
        ),
        (
            {"transfer": "chunked", "end_ms": 9},
            [
                b"HTTP/1.1 200 OK\r\nx-a: b\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
                b"",
                b"3\r\ntwo\r\n",
                b"0\r\n\r\n",
            ],
        ),
        (
            {"transfer": "chunked", "end": "close_early"},
            [
                b"HTTP/1.1 200 OK\r\nx-a: b\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",
                b"",
                b"3\r\ntwo\r\n",
            ],
        ),
        (
            {"transfer": "identity"},
            [b"HTTP/1.1 200 OK\r\nx-a: b\r\nconnection: close\r\n\r\none", b"", b"two"],
        ),
        ({"end": "reset"}, [b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 7\r\n\r\none", b"", b"two"]),
        (
            {"status": 503, "head_at_ms": 0.5},
            [
                b"HTTP/1.1 503 Service Unavailable\r\nx-a: b\r\ncontent-length: 6\r\n\r\n",
                b"one",
                b"",
                b"two",
            ],
        ),
        ({"raw": True}, [b"one", b"", b"two"]),
    ],
)
def test_http_bytes(options: dict[str, Any], expected: list[bytes]) -> None:
    import msgspec

    wire = encode(msgspec.structs.replace(REPLY, **options))
    assert [write.data for write in wire.writes] == expected
    assert [write.piece for write in wire.writes if write.piece is not None] == [0, 1, 2]


def test_old_clients_get_no_chunks() -> None:
    wire = encode(Reply(transfer="chunked", pieces=(Piece(0, b"x"),)), http10=True)
    assert wire.close
    assert wire.writes[0].data.endswith(b"connection: close\r\n\r\nx")


def test_gzip_can_be_read_piece_by_piece() -> None:
    wire = encode(Reply(pieces=REPLY.pieces, transfer="chunked", gzip=True, head_at_ms=0))
    assert b"content-encoding: gzip" in wire.writes[0].data
    unpack = zlib.decompressobj(wbits=31)
    first = wire.writes[1].data.split(b"\r\n", 1)[1][:-2]
    assert unpack.decompress(first) == b"one"
