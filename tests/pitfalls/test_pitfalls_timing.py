"""Area A of the pitfalls: when tokens arrived. Numbers in names are those of the table of pitfalls.

P-03, P-04   figures of the server's histograms and of other tools: with their import
P-27 … P-31  except P-28: figures read from engines' logs: with the engines
P-17         its second half (TPOT below the hardware's floor): with the floor
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from running import Cases, Part, drive, near

from servetune.clock import MS, SECOND, now
from servetune.drive import Progress
from servetune.drive import collect as collecting
from servetune.engines import Chunk as Decoded
from servetune.events import Events, EventsBuilder, Kind, Phase, Status
from servetune.measure import Client, Measurement, Server, Verdict, derive, measure, output_rate
from servetune.sim import Chunk, Script, Stream, json_reply, uniform
from servetune.spec import Load

CASES = Cases()


def _steady(tokens: int = 10, **options: object) -> Stream:
    """Tokens 10 ms apart from 100 ms on, each with its id."""
    return uniform(tokens, 100, 10, ids=True, **options)


def _measured(events: Events) -> Measurement:
    return measure(events, Load(slots=1), Client(), Server())


P01 = CASES.add(_steady())


def test_p01_ttft_is_no_itl_sample() -> None:
    got = CASES.part(P01)
    assert got.soonest("ttft_ms") == near(100)
    assert got.median("tpot_ms") == near(10)
    itl = got.window.distributions["itl"]
    assert got.gaps_by(10)
    assert itl.quantiles[0].value == near(10)


def test_p02_itl_of_a_verify_step_is_its_gap_by_its_tokens() -> None:
    builder = EventsBuilder()
    times = [100 * MS + 12 * MS * i for i in range(26)]
    builder.add(
        request=0,
        prompt=0,
        scheduled=0,
        sent=0,
        first_byte=times[0],
        done=times[-1],
        completion_tokens=101,
        drafts=25,
        accepted=75,
        token_source="ids",
        chunk_source="ids",
        status=Status.OK,
        phase=Phase.MEASURED,
        finish_reason="stop",
        times=times,
        tokens=[1] + [4] * 25,
        kinds=[Kind.TEXT] * 26,
    )
    window = _measured(builder.build())
    itl, gap = window.distributions["itl"], window.distributions["chunk_gap"]
    assert (itl.min, itl.mean, itl.max) == pytest.approx((3.0, 3.0, 3.0))
    assert (gap.min, gap.mean, gap.max) == pytest.approx((12.0, 12.0, 12.0))
    assert window.figures["acceptance_length"].value == pytest.approx(4.0)
    assert window.figures["tokens_per_chunk"].value == pytest.approx(4.0)
    assert window.figures["step_time"].value == pytest.approx(12.0)


P05 = CASES.add(_steady(101, stall_after=50, stall_ms=1990), times=3)


def test_p05_a_stall_is_seen_whatever_the_mean() -> None:
    got = CASES.part(P05)
    assert got.median("worst_stall_ms") == near(2000)
    assert got.median("tpot_ms") == near(29.9)
    gaps = np.concatenate([np.diff(got.chunks(row)[0][:101]) for row in range(3)])
    assert np.median(gaps) == near(10)
    assert (gaps > 1000).sum() == 3
    assert got.window.distributions["worst_stall"].n == 3


FIRST_OF_MANY = (Chunk(100, 32), *(Chunk(10),) * 32)
P07 = CASES.add(Stream(chunks=FIRST_OF_MANY, ids=True))
P07_UNKNOWN = CASES.add(Stream(chunks=FIRST_OF_MANY))


def test_p07_several_tokens_in_first_chunk() -> None:
    got = CASES.part(P07)
    assert got.all_equal("output_tokens") == 64
    assert got.median("tpot_ms") == near(10.0)
    assert got.window.figures["tpot_pooled"].note == ""


def test_p07_an_unknown_first_chunk_makes_tpot_approximate() -> None:
    got = CASES.part(P07_UNKNOWN)
    assert got.all_equal("output_tokens") == 64
    assert got.median("tpot_ms") == near(320 / 63)
    assert got.window.figures["tpot_pooled"].note.startswith("approximate")
    assert "itl" not in got.window.distributions


PAIRS = tuple(itertools.chain.from_iterable((Chunk(10), Chunk(with_previous=True)) for _ in range(10)))
P08 = CASES.add(Stream(chunks=PAIRS, ttft_ms=100, ids=True))


def test_p08_events_of_one_read_are_one_group() -> None:
    got = CASES.part(P08)
    for row in range(len(got.rows)):
        times, tokens = got.chunks(row)
        assert tokens[:20] == [1] * 20
        assert times[0:20:2] == times[1:20:2]
    derived = derive(got.events, open_loop=False)
    # a late client may read two writes at once, but never one write twice
    assert np.median(derived.n_groups) == 10
    assert (derived.groups.tokens % 2 == 0).all()
    assert got.median("tpot_ms") == near(5.0)
    assert got.window.distributions["chunk_gap"].quantiles[0].value == near(10)


P11 = CASES.add(Stream(chunks=(Chunk(200), Chunk(10)), role_frame=True, role_at_ms=1, ids=True))
P11_USAGE = CASES.add(Stream(chunks=(Chunk(200), Chunk(10)), role_frame=True, role_at_ms=1))


@pytest.mark.parametrize("case", [P11, P11_USAGE])
def test_p11_the_role_frame_sets_no_ttft(case: int) -> None:
    got = CASES.part(case)
    assert got.soonest("ttft_ms") == near(200)
    first_byte = (got.events.first_byte - got.events.sent) / MS
    assert np.median(first_byte) < 20


_WHOLE = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"content": "some words"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 8, "completion_tokens": 20},
}
P12 = CASES.add(json_reply(_WHOLE, at_ms=150))


def test_p12_a_reply_that_is_not_streamed_has_no_ttft() -> None:
    got = CASES.part(P12)
    for name in ("ttft_ms", "ttfa_ms", "tpot_ms", "decode_tok_s", "worst_stall_ms"):
        assert got.all_equal(name) is None
    ttft = got.window.distributions["ttft"]
    assert (ttft.n, ttft.mean, ttft.min, ttft.max, ttft.quantiles) == (0, None, None, None, [])
    assert got.window.figures["decode_tok_s"].value is None
    assert got.window.figures["tpot_pooled"].value is None
    assert got.window.requests.ok == 5
    assert got.gate("not buffered").verdict is Verdict.VOID
    assert got.all_equal("output_tokens") == 20
    assert got.soonest("e2e_ms") == near(150)


P17 = CASES.add(Stream(chunks=(Chunk(300, 512),), ids=True))
P17_MANY = CASES.add(
    Stream(chunks=(Chunk(300), *(Chunk(with_previous=True, text="a"),) * 149), finish_in="last_chunk")
)


@pytest.mark.parametrize(("case", "tokens"), [(P17, 512), (P17_MANY, 150)])
def test_p17_a_buffered_reply_has_no_decode_time(case: int, tokens: int) -> None:
    got = CASES.part(case)
    assert got.all_equal("output_tokens") == tokens
    assert got.soonest("ttft_ms") == near(300)
    assert got.all_equal("tpot_ms") is None
    assert got.all_equal("decode_tok_s") is None
    assert got.window.figures["decode_tok_s"].value is None
    assert got.gate("not buffered").verdict is Verdict.VOID
    assert got.gate("not buffered") in got.window.void


def test_p17_a_buffered_reply_that_took_two_reads_is_void() -> None:
    builder = EventsBuilder()
    first, last = 300 * MS, 300 * MS + 150_000  # 512 tokens in one write, which the kernel cut in two
    builder.add(
        request=0,
        prompt=0,
        scheduled=0,
        sent=0,
        first_byte=first,
        done=last,
        completion_tokens=512,
        token_source="ids",
        chunk_source="ids",
        status=Status.OK,
        phase=Phase.MEASURED,
        finish_reason="stop",
        times=[first, last],
        tokens=[256, 256],
        kinds=[Kind.TEXT] * 2,
    )
    assert _measured(builder.build()).void


def test_p17_a_streamed_reply_is_not_called_buffered() -> None:
    assert CASES.part(P01).gate("not buffered").verdict is Verdict.PASS


def test_p18_a_step_of_the_wall_clock_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time
    stepped_at: list[int] = []

    def step(progress: Progress) -> None:
        if progress.done >= 3 and not stepped_at:
            stepped_at.append(now())

    def stepped() -> float:
        return wall() - (5.0 if stepped_at else 0.0)

    monkeypatch.setattr(time, "time", stepped)
    monkeypatch.setattr(time, "time_ns", lambda: round(stepped() * SECOND))
    report, events, log = drive(Script((_steady(11),)), tmp_path, requests=8, tick=step)
    assert report.started < stepped_at[0] < report.ended
    got = Part(events())
    assert got.soonest("ttft_ms") == near(100)
    assert got.median("tpot_ms") == near(10)
    assert got.window.seconds * 1000 == pytest.approx((report.ended - report.started) / MS, abs=50)
    ended = [record.ended_ns for record in log.records]
    assert all(end is not None and report.started < end < report.ended + 50 * MS for end in ended)


P19 = CASES.add(uniform(100, 900, 1, ids=True), times=3)


def test_p19_the_rate_over_time_shows_a_burst_where_it_was() -> None:
    got = CASES.part(P19)
    for row in range(len(got.rows)):
        one = got.events.take(np.array([row]))
        start = int(one.sent[0])
        rate = output_rate(one, start, start + 2 * SECOND, 20)
        assert (rate[:9] == 0).all()
        assert rate.sum() * 0.1 == pytest.approx(100)
    rates = [output_rate(got.events.take(np.array([i])), s, s + SECOND, 10) for i, s in _sent(got.events)]
    assert np.median([rate[9] for rate in rates]) == pytest.approx(1000, rel=0.03)


def _sent(events: Events) -> list[tuple[int, int]]:
    return list(enumerate(events.sent.tolist()))


def test_p20_p72_a_slow_parser_moves_no_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0
    decode = collecting._decoded

    def slow(text: bytes) -> Decoded:
        nonlocal parsed
        parsed += 1
        time.sleep(0.005)
        return decode(text)

    def refuse(lines: bytes) -> list[Decoded]:
        raise msgspec.DecodeError("one by one, please")

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "_decoded", slow)
        patch.setattr(collecting, "decode_lines", refuse)
        report, events, log = drive(Script((_steady(20),)), tmp_path, requests=5)
        assert parsed == 0, "nothing is parsed while the window runs"
        slowly = events()
    assert parsed >= 5 * 20
    assert parsed * 0.005 * SECOND > 0.2 * (report.ended - report.started)
    quickly = events()
    assert (slowly.chunk_time == quickly.chunk_time).all()
    assert slowly.to_table().equals(quickly.to_table())
    got = Part(slowly)
    assert got.soonest("ttft_ms") == near(100)
    assert got.median("tpot_ms") == near(10)
    late = []
    for record, (start, end) in zip(log.records, itertools.pairwise(slowly.chunk_start), strict=True):
        late += list(slowly.chunk_time[start : start + 20] - np.array(record.writes_ns[:20]))
        assert end - start >= 20
    assert abs(np.median(late)) < 1 * MS


P21 = CASES.add(_steady(usage_always=True, finish_gap_ms=500))


def test_p21_the_finish_frame_is_no_itl_sample_but_ends_the_request() -> None:
    plain, late = CASES.part(P01), CASES.part(P21)
    assert late.median("tpot_ms") == near(10)
    assert late.gaps_by(10)
    assert max(row.worst_stall_ms or 0.0 for row in late.rows) < 400
    assert late.soonest("e2e_ms") == near(690)
    assert late.soonest("e2e_ms") - plain.soonest("e2e_ms") == near(500)


BIG = (*(Chunk(10),) * 5, Chunk(10, 1, "x" * 200_000), *(Chunk(10),) * 5)
P26 = CASES.add(Stream(chunks=BIG, ttft_ms=100, ids=True), times=7)


def test_p26_a_frame_of_200_kb_delays_nothing() -> None:
    got = CASES.part(P26)
    assert got.all_equal("output_tokens") == 11
    assert got.window.requests.ok == 7
    arrivals = np.array([got.chunks(row)[0][:11] for row in range(7)])
    typical = np.median(arrivals, axis=0)
    for place in (4, 6, 7, 10):
        assert typical[place] == near(100 + 10 * place)
    assert typical[5] == pytest.approx(150, abs=5)
