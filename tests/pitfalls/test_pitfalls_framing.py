"""Area A of the pitfalls, P-23: a stream means the same in any line ends and any cuts, at linear cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from running import Cases, Part, near

from servetune.drive.sse import EventStream
from servetune.drive.stream import Answered, events_of
from servetune.sim import Chunk, Stream, uniform

FRAMES = (
    ": a comment{e}{e}"
    'data: {{"a": 1}}{e}{e}'
    "event: message{e}id: 7{e}data:no space{e}{e}"
    "data: two{e}data: lines{e}{e}"
    "retry: 10{e}{e}"
    "data: größer 東京 🜂{e}{e}"
    ": ping{e}data: after a comment{e}{e}"
    "data{e}{e}"
    "data: [DONE]{e}{e}"
)
DATA = [
    '{"a": 1}',
    "no space",
    "two\nlines",
    "größer 東京 🜂",
    "after a comment",
    "",
    "[DONE]",
]
EOLS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}


def _fed(body: bytes, size: int) -> list[str]:
    stream = EventStream()
    events = []
    for start in range(0, len(body), size):
        events += stream.feed(body[start : start + size])
    return [event.decode() for event in events + stream.rest()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
def test_p23_all_line_ends_and_cuts_give_the_same_events(eol: str, size: int) -> None:
    body = FRAMES.format(e=eol).encode()
    assert _fed(body, size) == DATA
    assert _fed(b"\xef\xbb\xbf" + body, size) == DATA


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
def test_p23_each_event_belongs_to_the_read_that_completed_it(eol: str, size: int) -> None:
    body = FRAMES.format(e=eol).encode()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    data, reads = events_of(pieces, list(range(len(pieces))), complete=True)
    assert [event.decode() for event in data] == DATA
    frames = FRAMES.format(e=eol).split(eol * 2)[:-1]
    ends = np.cumsum([len((frame + eol * 2).encode()) for frame in frames])
    ends = [int(end) for end, frame in zip(ends, frames, strict=True) if "data" in frame]
    for read, end in zip(reads, ends, strict=True):
        # the CR of the last CRLF completes it already
        assert read in {(end - 1) // size, (end - len(eol)) // size}


def _work(call: Callable[[], Any]) -> int:
    """Bytes that the methods of bytes objects were called on: what a buffer that grows costs shows here."""
    work = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal work
        if event == "c_call":
            work += 1
            if isinstance(owner := getattr(arg, "__self__", None), bytes | bytearray):
                work += len(owner)
        elif event == "call":
            work += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return work


def _events(count: int, size: int, eol: str) -> bytes:
    return (f"data: {'x' * size}{eol}{eol}" * count).encode()


@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
@pytest.mark.parametrize(("count", "size"), [(10, 1), (1, 10)], ids=["more events", "a longer event"])
def test_p23_ten_times_the_stream_is_ten_times_the_work(eol: str, count: int, size: int) -> None:
    short, long = _events(20, 150, eol), _events(20 * count, 150 * size, eol)
    assert 9 < len(long) / len(short) < 11
    by_byte = _work(lambda: _fed(long, 1)) / _work(lambda: _fed(short, 1))
    assert 8 < by_byte < 11.5


@pytest.mark.parametrize("eol", EOLS.values(), ids=EOLS)
def test_p23_taking_an_answer_apart_is_linear(eol: str) -> None:
    def read(body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        reads = [head, *(b"1\r\n%c\r\n" % byte for byte in body), b"0\r\n\r\n"]
        answered = Answered(reads)
        assert answered.complete
        events_of(answered.pieces, answered.owner, complete=True)

    short, long = _events(10, 100, eol), _events(100, 100, eol)
    assert 8 < _work(lambda: read(long)) / _work(lambda: read(short)) < 11.5


CASES = Cases()
BY_BYTE = Cases()  # some hundred writes a frame keep the server so busy that others would be late
TOKENS: dict[str, Any] = {"tokens": 8, "ttft_ms": 60, "gap_ms": 10, "usage": "each", "role_frame": True}
PLAIN = CASES.add(uniform(**TOKENS))
FORMS: dict[str, dict[str, Any]] = {
    "CRLF": {"eol": "\r\n"},
    "CR": {"eol": "\r"},
    "comments": {"comments": True},
    "data over many lines": {"multiline_data": True},
    "many lines with CRLF": {"multiline_data": True, "eol": "\r\n", "comments": True},
    "no space after the colon": {"space_after_colon": False},
    "event and id fields": {"event_field": True},
    "byte order mark": {"bom": True},
    "compressed": {"gzip": True},
    "until the close": {"transfer": "identity"},
}
FORM_CASES = {name: CASES.add(uniform(**TOKENS, **form)) for name, form in FORMS.items()}
BYTE_CASES = {name: BY_BYTE.add(uniform(**TOKENS, split=1, eol=eol), times=2) for name, eol in EOLS.items()}


def _same_chunks(got: Part) -> None:
    plain = CASES.part(PLAIN).events
    kinds, tokens = (column[: plain.chunk_start[1]] for column in (plain.chunk_kind, plain.chunk_tokens))
    assert tokens.tolist() == [0, *[1] * 8, 0, 0]
    for row in range(len(got.rows)):
        span = slice(got.events.chunk_start[row], got.events.chunk_start[row + 1])
        assert got.events.chunk_kind[span].tolist() == kinds.tolist()
        assert got.events.chunk_tokens[span].tolist() == tokens.tolist()
    assert got.all_equal("output_tokens") == 8
    assert got.all_equal("error") == ""
    assert got.all_equal("finish_reason") == "stop"


@pytest.mark.parametrize("name", FORMS)
def test_p23_the_framing_changes_no_event_and_no_time(name: str) -> None:
    got = CASES.part(FORM_CASES[name])
    _same_chunks(got)
    assert got.median("tpot_ms") == near(10)
    # the server takes a new connection, of "until the close", a little late
    assert got.soonest("ttft_ms") == pytest.approx(60, abs=2)


@pytest.mark.parametrize("name", EOLS)
def test_p23_a_stream_that_comes_byte_by_byte_is_the_same(name: str) -> None:
    _same_chunks(BY_BYTE.part(BYTE_CASES[name]))


SPLIT = "größer 東京 🜂"
P23_SPLIT = CASES.add(
    Stream(chunks=(Chunk(20, 1, SPLIT), Chunk(30, 1, SPLIT)), ids=True, split=7, split_gap_ms=0.5), times=3
)


def test_p23_characters_cut_in_two_are_whole_again() -> None:
    got = CASES.part(P23_SPLIT)
    assert got.all_equal("output_tokens") == 2
    assert got.all_equal("error") == ""
