"""Event streams: any valid stream, cut anywhere, against a plain reader of the standard's text."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from servetune.drive.sse import EventStream, simple_events
from servetune.drive.stream import events_of

# Characters that mean something to the format, so that examples meet its corners often.
TEXT = st.text(st.sampled_from('ab: \t\0{}"é漢🙂\ufeff\u2028dt'), max_size=12)
ENDINGS = st.sampled_from(["\n", "\r\n", "\r"])
FIELD = st.sampled_from(["data", "data", "data", "event", "id", "retry", "datum", "dat", ""])


@st.composite
def lines(draw: st.DrawFn) -> str:
    kind = draw(st.integers(0, 9))
    if kind < 2:
        return ""
    if kind == 2:
        return ":" + draw(TEXT)
    name = draw(FIELD)
    return name + draw(st.sampled_from([":", ": ", ":  ", ""])) + draw(TEXT)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream of lines with any endings, mixed or not, with or without a byte order mark."""
    one = draw(st.none() | ENDINGS)
    text = draw(st.sampled_from(["", "", "\ufeff"]))
    for line in draw(st.lists(lines(), max_size=25)):
        text += line + (one or draw(ENDINGS))
    return (text + draw(st.sampled_from(["", "data: cut", "\ufeffdata: x"]))).encode()


@st.composite
def usual_streams(draw: st.DrawFn) -> bytes:
    """What servers mostly send, with what may follow the last event."""
    blocks = draw(st.lists(TEXT, max_size=10))
    between = st.sampled_from([": ping\n\n", "\n", "\ufeff", "event: x\n"])
    body = "".join(f"data:{draw(st.sampled_from(['', ' ']))}{block}\n\n" for block in blocks)
    rest = draw(st.sampled_from(["", "data: rest", "data: rest\n", "\ufeffdata: x", "da", "\n", ": c\n\n"]))
    return (body + (draw(between) if draw(st.integers(0, 4)) == 0 else "") + rest).encode()


def cut(body: bytes, places: list[int]) -> list[bytes]:
    """The body in pieces; places beyond its end are taken modulo its length."""
    ends = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[a:b] for a, b in pairwise(ends)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def by_the_standard(text: str) -> list[tuple[int, str]]:
    """(characters read, data) of each dispatched event: WHATWG HTML 9.2.6, word for word.

    Characters read include the line end of the empty line; of a CRLF only its CR, since an event is
    complete when the line is.
    """
    text_start = 1 if text.startswith("\ufeff") else 0
    events: list[tuple[int, str]] = []
    data = ""
    at = text_start
    while True:
        end = next((i for i in range(at, len(text)) if text[i] in "\r\n"), None)
        if end is None:
            return events  # an incomplete line, and so an incomplete event, is discarded
        line = text[at:end]
        at = end + (2 if text[end : end + 2] == "\r\n" else 1)
        if line == "":
            if data != "":
                events.append((end + 1, data.removesuffix("\n")))
            data = ""
        elif line.startswith(":"):
            continue
        else:
            name, colon, value = line.partition(":")
            if colon and value.startswith(" "):
                value = value[1:]
            if name == "data":
                data += value + "\n"


def read(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    """(piece that completed it, data) of each event by EventStream."""
    stream = EventStream()
    return [(number, event) for number, piece in enumerate(pieces) for event in stream.feed(piece)]


def piece_of(pieces: list[bytes], length: int) -> int:
    """The piece in which the first `length` bytes of the body end."""
    for number, piece in enumerate(pieces):
        length -= len(piece)
        if length <= 0:
            return number
    raise AssertionError("beyond the body")


@given(streams() | usual_streams(), CUTS)
def test_any_stream_cut_anywhere_reads_as_the_standard_says(body: bytes, places: list[int]) -> None:
    pieces = cut(body, places)
    text = body.decode()
    expected = [
        (piece_of(pieces, len(text[:read_to].encode())), data.encode())
        for read_to, data in by_the_standard(text)
    ]
    assert read(pieces) == expected


@given(streams() | usual_streams())
def test_byte_by_byte_is_the_same(body: bytes) -> None:
    single = [body[i : i + 1] for i in range(len(body))]
    assert [event for _, event in read(single)] == [event for _, event in read([body] if body else [])]


def slowly(pieces: list[bytes], owner: list[int], *, complete: bool) -> tuple[list[bytes], list[int]]:
    """What `events_of` must give: EventStream over the pieces, then the unfinished event."""
    stream = EventStream()
    found = [(e, owner[i]) for i, piece in enumerate(pieces) for e in stream.feed(piece)]
    if complete:
        found += [(e, owner[-1] if owner else 0) for e in stream.rest()]
    return [e for e, _ in found], [o for _, o in found]


@given(
    streams() | usual_streams() | st.binary(max_size=60),
    CUTS,
    st.lists(st.integers(0, 2), min_size=13),
    st.booleans(),
)
def test_the_fast_path_agrees_with_the_slow_one(
    body: bytes, places: list[int], steps: list[int], complete: bool
) -> None:
    pieces = cut(body, places)
    owner = [sum(steps[: i + 1]) for i in range(len(pieces))]  # several pieces of one read, reads without any
    assert events_of(pieces, owner, complete=complete) == slowly(pieces, owner, complete=complete)


@given(st.lists(TEXT, min_size=1, max_size=10), CUTS)
def test_the_usual_form_takes_the_fast_path(events: list[str], places: list[int]) -> None:
    text = "".join(f"data: {event}\n\n" for event in events)
    pieces = cut(text.encode(), places)
    assert simple_events(text.encode()) == [event.encode() for event in events]
    data, reads = events_of(pieces, list(range(len(pieces))), complete=False)
    expected = by_the_standard(text)
    assert data == [event.encode() for _, event in expected]
    assert reads == [piece_of(pieces, len(text[:read_to].encode())) for read_to, _ in expected]


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_are_read_without_an_error(body: bytes, places: list[int]) -> None:
    stream = EventStream()
    for piece in cut(body, places):
        stream.feed(piece)
    stream.rest()


def test_three_endings_byte_by_byte_give_the_same_events() -> None:  # P-23
    lines_ = ["\ufeff: hello", "data: é漢", "", "event: x", "data: a", "data:b", "", "data", "", "id: 1", ""]
    for ending in ("\n", "\r\n", "\r"):
        body = "".join(line + ending for line in lines_).encode()
        for pieces in ([body], [body[i : i + 1] for i in range(len(body))]):
            assert [event for _, event in read(pieces)] == ["é漢".encode(), b"a\nb", b""], ending


def _seconds(stream_bytes: bytes, step: int) -> float:
    """Fastest of three: the machine may be busy."""
    best = float("inf")
    for _ in range(3):
        stream = EventStream()
        begun = time.process_time()
        got = [e for i in range(0, len(stream_bytes), step) for e in stream.feed(stream_bytes[i : i + step])]
        best = min(best, time.process_time() - begun)
        assert len(got) == 1
    return best


def test_a_large_frame_byte_by_byte_takes_linear_work() -> None:  # P-23, P-26
    small, large = (b"data: " + b"x" * size + b"\n\n" for size in (20_000, 200_000))
    assert _seconds(large, 1) < 40 * max(_seconds(small, 1), 1e-3)  # quadratic work would take 100 times
    assert EventStream().feed(large) == [b"x" * 200_000]


def test_a_large_frame_of_many_lines_takes_linear_work() -> None:
    small, large = (b"data: x\r\n" * lines_ + b"\r\n" for lines_ in (2_000, 20_000))
    assert _seconds(large, 3) < 40 * max(_seconds(small, 3), 1e-3)
