from __future__ import annotations

import msgspec
import pytest

from servetune.sim import Ask, Chunk, Piece, Reply, Script, Stream, error_reply, json_reply, uniform

WORKED = Stream(
    role_frame=True,
    role_at_ms=48,
    chunks=(Chunk(118, 3), Chunk(12, 4), Chunk(12, 1), Chunk(0, 2, with_previous=True)),
    finish_at_ms=168,
    done_gap_ms=1,
)


def test_truth_of_the_worked_example() -> None:
    # Scheduled 0, sent 2: the server's zero is 2, so its times are 2 ms less than the example's.
    truth = WORKED.truth(Ask(include_usage=True))
    assert [(group.at_ms + 2, group.tokens) for group in truth.token_groups] == [(120, 3), (132, 4), (144, 3)]
    assert truth.first_byte_ms == 48
    assert truth.ttft_ms == 118
    assert truth.n_1 == 3
    assert truth.gaps_ms == [12, 12]
    assert truth.tpot_ms == pytest.approx(24 / 7)
    assert truth.e2e_ms == 169
    assert truth.n_out == 10
    assert truth.complete
    assert truth.groups[-1].at_ms == 168
    assert truth.groups[-1].tokens == 0


def test_truth_counts_reasoning_apart() -> None:
    chunks = [Chunk(50, kind="reasoning")] + [Chunk(10, kind="reasoning")] * 473 + [Chunk(20)] * 38
    truth = Stream(chunks=tuple(chunks)).truth()
    assert (truth.n_out, truth.n_reason, truth.ttft_ms) == (512, 474, 50)
    assert truth.ttfa_ms == 50 + 4730 + 20


@pytest.mark.parametrize(
    "stream",
    [
        uniform(5, 1, 1, stop_after=3, end="close_early"),
        uniform(5, 1, 1, error_at=2),
        uniform(5, 1, 1, done=False, finish_in="none"),
        uniform(5, 1, 1, stop_after=5, end="hang"),
    ],
)
def test_truth_of_broken_streams_has_no_end(stream: Stream) -> None:
    assert not stream.truth().complete
    assert stream.truth().e2e_ms is None


def test_truth_ends_with_the_finish_frame_without_a_sentinel() -> None:
    assert uniform(3, 10, 5, done=False, finish_gap_ms=7).truth().e2e_ms == 27


def test_truth_waits_for_the_last_part_of_a_split_event() -> None:
    stream = uniform(1, 10, 0, split=50, split_gap_ms=2)
    parts = -(-len(b"data: \n\n" + _payload(stream)) // 50)
    assert stream.truth().ttft_ms == 10 + 2 * (parts - 1)


def _payload(stream: Stream) -> bytes:
    from servetune.sim.frames import events

    return events(stream, Ask())[0].payload


def test_uniform_and_stall() -> None:
    stream = uniform(10, 100, 10, per_chunk=4, stall_after=1, stall_ms=500)
    assert [chunk.k for chunk in stream.chunks] == [4, 4, 2]
    assert stream.chunk_times() == [100, 610, 620]


def test_ttft_replaces_the_gap_of_the_first_chunk() -> None:
    assert Stream(ttft_ms=7, chunks=(Chunk(10),) * 3).chunk_times() == [7, 17, 27]


def test_limited_cuts_inside_a_chunk() -> None:
    cut = uniform(10, 0, 1, per_chunk=4).limited(6)
    assert [chunk.k for chunk in cut.chunks] == [4, 2]
    assert cut.finish_reason == "length"
    assert uniform(10, 0, 1).limited(10).finish_reason == "stop"


def test_scripts_are_json() -> None:
    script = Script(
        (
            WORKED,
            Reply(pieces=(Piece(1.5, b"\xff\x00"),), end="reset"),
            error_reply(503, retry_after_s=2),
            json_reply({"a": 1}),
        ),
        slots=2,
        known_fields=("model",),
    )
    assert msgspec.json.decode(msgspec.json.encode(script), type=Script) == script


def test_a_script_can_be_written_by_hand() -> None:
    text = b'{"replies":[{"type":"stream","ttft_ms":20,"chunks":[{},{"gap_ms":5,"tokens":2}]}],"slots":1}'
    script = msgspec.json.decode(text, type=Script)
    assert script.replies == (Stream(ttft_ms=20, chunks=(Chunk(), Chunk(5, 2))),)


@pytest.mark.parametrize(
    "text",
    [
        b'{"replies":[]}',
        b'{"replies":[{"type":"stream","colour":1}]}',
        b'{"replies":[{"type":"stream","chunks":[{"gap_ms":-1}]}]}',
        b'{"replies":[{"type":"stream","chunks":[{},{"gap_ms":1,"with_previous":true}]}]}',
        b'{"replies":[{"type":"stream","chunks":[{"gap_ms":5}],"finish_at_ms":4}]}',
        b'{"replies":[{"type":"stream","split":0}]}',
        b'{"replies":[{"type":"reply","pieces":[{"at_ms":2,"data":""},{"at_ms":1,"data":""}]}]}',
        b'{"replies":[{"type":"reply"}],"slots":0}',
    ],
)
def test_wrong_scripts_are_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Script)


def test_replies_repeat_or_stay() -> None:
    first, second = uniform(1, 0, 0), uniform(2, 0, 0)
    assert [Script((first, second)).reply(i) for i in range(3)] == [first, second, first]
    assert [Script((first, second), repeat=False).reply(i) for i in range(3)] == [first, second, second]
