"""Area A of the pitfalls: how many tokens there were. Numbers in names are those of the table of pitfalls."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from running import Cases, Part, near, run_replies, run_script, scripted
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from servetune.engines import read_counters
from servetune.events import EventsBuilder, Failure, Kind, Phase, Status, TokenSource
from servetune.measure import Client, Server, Verdict, measure
from servetune.sim import Chunk, Stream, uniform
from servetune.spec import Load

CASES = Cases()

FOURS = {"tokens": 400, "ttft_ms": 10, "gap_ms": 10, "per_chunk": 4}
P06_IDS = CASES.add(uniform(**FOURS, ids=True))
P06_USAGE = CASES.add(uniform(**FOURS, usage="each"))
P06_LAST = CASES.add(uniform(**FOURS))


@pytest.mark.parametrize("case", [P06_IDS, P06_USAGE])
def test_p06_four_tokens_a_chunk_count_as_four(case: int) -> None:
    got = CASES.part(case)
    assert got.all_equal("output_tokens") == 400
    assert got.median("decode_tok_s") == pytest.approx(400, rel=0.01)
    assert got.window.figures["tokens_per_chunk"].value == pytest.approx(4, rel=0.05)
    assert got.window.distributions["itl"].quantiles[0].value == near(2.5)


def test_p06_a_total_that_is_no_chunk_count_stays_exact() -> None:
    got = CASES.part(P06_LAST)
    assert got.all_equal("output_tokens") == 400
    assert got.window.token_sources == {"usage": 1.0}
    assert "itl" not in got.window.distributions
    assert got.window.figures["tokens_per_chunk"].value is None


def test_p06_there_is_no_peak_metric() -> None:
    window = CASES.part(P06_IDS).window
    assert not [name for name in (*window.figures, *window.distributions) if "peak" in name]


P09 = CASES.add(
    Stream(
        chunks=tuple(Chunk(100 if i == 0 else 10, 1, kind="tool_call") for i in range(32)),
        usage_override={"completion_tokens": 6400},
    )
)


def test_p09_a_buffered_tool_call_counts_by_usage_and_is_flagged() -> None:
    got = CASES.part(P09)
    assert got.all_equal("output_tokens") == 6400
    assert got.window.token_sources == {"usage": 1.0}
    assert got.gate("chunk size").verdict is Verdict.FLAG
    assert "itl" not in got.window.distributions
    assert got.soonest("ttft_ms") == near(100)


THOUGHT = tuple(Chunk(50 if i == 0 else 4950 / 474, kind="reasoning") for i in range(474))
ANSWER = tuple(Chunk(4950 / 474 if i == 0 else 10) for i in range(38))
P10_EMPTY, P10_NULL = (
    CASES.add(Stream(chunks=THOUGHT + ANSWER, reasoning_beside=beside), times=3)
    for beside in ("empty", "null")
)
P10_FIELD = CASES.add(Stream(chunks=THOUGHT[:20] + ANSWER[:5], reasoning_field="reasoning"))


@pytest.mark.parametrize("case", [P10_EMPTY, P10_NULL])
def test_p10_reasoning_sets_ttft_and_the_answer_ttfa(case: int) -> None:
    got = CASES.part(case)
    assert got.all_equal("output_tokens") == 512
    assert got.all_equal("reasoning_tokens") == 474
    assert got.soonest("ttft_ms") == near(50)
    assert got.soonest("ttfa_ms") == near(5000)
    assert got.window.distributions["ttfa"].n == 3
    assert got.window.figures["success_rate"].value == 1.0


def test_p10_both_spellings_are_the_same_events() -> None:
    one, other = CASES.part(P10_EMPTY).events, CASES.part(P10_NULL).events
    assert (one.chunk_kind == other.chunk_kind).all()
    assert (one.chunk_tokens == other.chunk_tokens).all()


def test_p10_the_other_field_name_is_reasoning_too() -> None:
    got = CASES.part(P10_FIELD)
    kinds = got.events.chunk_kind[: got.events.chunk_start[1]].tolist()
    assert (kinds.count(Kind.REASONING), kinds.count(Kind.TEXT)) == (20, 5)
    assert got.soonest("ttft_ms") == near(50)
    assert got.all_equal("output_tokens") == 25


P13 = CASES.add(
    uniform(
        10,
        100,
        1,
        usage_override={"completion_tokens": 10, "completion_tokens_details": {"reasoning_tokens": 12}},
    )
)


def test_p13_more_reasoning_than_output_tokens_is_void() -> None:
    got = CASES.part(P13)
    assert got.all_equal("reasoning_tokens") == 12
    assert got.all_equal("output_tokens") == 10
    assert got.gate("token counts").verdict is Verdict.VOID
    assert "reasoning" in got.gate("token counts").evidence


SPACES = tuple(Chunk(100 if i == 0 else 5, 1, " ") for i in range(15))
HALVES = (Chunk(100, 0, "ab"), Chunk(10, 1, "c"), Chunk(10, 1, " "), Chunk(10, 0, "d"), Chunk(10, 1, "e"))


@pytest.fixture(scope="module")
def runs_of_characters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer whose tokens are runs of spaces and runs of anything else."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" +|[^ ]+"), "isolated")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@cache
def _tokenized(tokenizer: str) -> tuple[Part, Part, Part]:
    cases = Cases(tokenizer=tokenizer)
    replies = (
        Stream(chunks=SPACES),
        Stream(chunks=SPACES, usage="none"),
        # five chunks, three tokens: two chunks hold but half a token
        Stream(chunks=HALVES),
    )
    numbers = [cases.add(reply, times=3) for reply in replies]
    told, untold, halves = (cases.part(number) for number in numbers)
    return told, untold, halves


def test_p14_usage_goes_before_the_tokenizer(runs_of_characters: str) -> None:
    got, _, _ = _tokenized(runs_of_characters)
    assert got.all_equal("output_tokens") == 15
    assert got.window.token_sources == {"usage": 1.0}
    assert got.gate("token source").verdict is Verdict.PASS


def test_p14_the_tokenizer_counts_the_whole_text_and_is_marked(runs_of_characters: str) -> None:
    _, got, _ = _tokenized(runs_of_characters)
    assert got.all_equal("output_tokens") == 1
    assert got.window.token_sources == {"tokenizer": 1.0}
    assert set(got.events.chunk_source) == {TokenSource.NONE}
    assert got.gate("token source").verdict is Verdict.FLAG
    assert "itl" not in got.window.distributions


def test_p22_a_chunk_with_half_a_token_counts_once_with_the_next(runs_of_characters: str) -> None:
    _, _, got = _tokenized(runs_of_characters)
    assert got.all_equal("output_tokens") == 3
    for row in range(len(got.rows)):
        assert got.chunks(row)[1][:5] == [0, 1, 1, 0, 1]
    assert got.soonest("ttft_ms") == near(110)
    assert got.median("tpot_ms") == near(15)
    itl = got.window.distributions["itl"]
    assert got.gaps_by(3)
    assert itl.max is not None
    assert np.isfinite(itl.max)


P22 = CASES.add(Stream(chunks=(Chunk(100), Chunk(10, 0, "\ufffd"), Chunk(10, 2, "ß")), ids=True))


def test_p22_a_text_chunk_without_a_token_is_legal() -> None:
    got = CASES.part(P22)
    assert got.all_equal("output_tokens") == 3
    assert got.all_equal("status") == Status.OK
    assert got.median("tpot_ms") == near(10)
    assert got.gaps_by(2)
    assert got.gate("token counts").verdict is Verdict.PASS


ECHO = (Chunk(50, 0, "the prompt said again"), Chunk(150), *(Chunk(10),) * 9)
P15_IDS = CASES.add(Stream(chunks=ECHO, ids=True))
P15_USAGE = CASES.add(Stream(chunks=ECHO, usage="each"))


@pytest.mark.parametrize("case", [P15_IDS, P15_USAGE])
def test_p15_an_echo_of_the_prompt_is_not_generated(case: int) -> None:
    got = CASES.part(case)
    assert got.all_equal("output_tokens") == 10
    assert got.all_equal("prompt_tokens") == 8
    assert got.soonest("ttft_ms") == near(200)
    assert got.soonest("ttfa_ms") == near(200)
    assert got.median("tpot_ms") == near(10)


@pytest.mark.parametrize("exact", [False, True])
def test_p15_tokens_after_the_end_are_not_counted(exact: bool) -> None:
    padded = (Chunk(50), *(Chunk(2),) * 39, *(Chunk(1, 0, "<pad>"),) * 20)
    run = run_replies(Stream(chunks=padded, ids=True), times=3, ask={"output_tokens": 512, "exact": exact})
    assert {row.output_tokens for row in run.rows} == {40}
    assert run.median("tpot_ms") == near(2)
    assert run.gate("output length").verdict is (Verdict.VOID if exact else Verdict.SKIPPED)


P16_USAGE, P16_NONE = CASES.add(uniform(10, 100, 1)), CASES.add(uniform(10, 100, 1, usage="none"))


def test_p16_unlike_sources_are_shown_and_flagged() -> None:
    got = CASES.part(P16_USAGE, P16_NONE)
    assert got.window.token_sources == {"usage": 0.5, "chunks": 0.5}
    assert got.gate("token source").verdict is Verdict.FLAG
    assert "usage 50%" in got.gate("token source").evidence
    assert CASES.part(P16_USAGE).gate("token source").verdict is Verdict.PASS


P24 = [
    CASES.add(uniform(10, 100, 10, role_frame=True, **told))
    for told in ({}, {"usage": "none"}, {"usage": "each"}, {"ids": True})
]


@pytest.mark.parametrize(("case", "source"), list(zip(P24, ["usage", "chunks", "usage", "ids"], strict=True)))
def test_p24_role_and_usage_frames_hold_no_token(case: int, source: str) -> None:
    got = CASES.part(case)
    assert got.all_equal("output_tokens") == 10
    assert got.window.token_sources == {source: 1.0}
    for row in range(len(got.rows)):
        assert sum(got.chunks(row)[1]) == 10
    assert got.soonest("ttft_ms") == near(100)
    assert got.gaps_by(10)


CUTS = {
    "closed inside a chunked body": ({"end": "close_early"}, Failure.CLOSED),
    "closed, the end of the body being the close": (
        {"end": "normal", "transfer": "identity"},
        Failure.TRUNCATED,
    ),
    "ended by the rules of HTTP": ({"end": "normal"}, Failure.TRUNCATED),
    "reset": ({"end": "reset", "end_gap_ms": 5}, Failure.RESET),
}
P25 = {name: CASES.add(uniform(40, 20, 1, stop_after=20, **how), times=2) for name, (how, _) in CUTS.items()}


@pytest.mark.parametrize("name", CUTS)
def test_p25_a_cut_stream_is_a_failed_request(name: str) -> None:
    got = CASES.part(P25[name])
    assert got.all_equal("status") == Status.FAILED
    assert got.all_equal("error").split(":")[0] == CUTS[name][1]
    assert got.window.requests.failed == 2
    assert got.window.figures["success_rate"].value == 0.0
    assert got.gate("failures").verdict is Verdict.VOID
    assert got.all_equal("e2e_ms") is None
    assert got.window.distributions["e2e"].failed == 2


WHOLE = {"done": {"finish_in": "none"}, "finish reason": {"done": False}}
P25_WHOLE = {name: CASES.add(uniform(20, 50, 1, **how), times=3) for name, how in WHOLE.items()}


@pytest.mark.parametrize("name", WHOLE)
def test_p25_either_sign_of_the_end_makes_a_stream_whole(name: str) -> None:
    got = CASES.part(P25_WHOLE[name])
    assert got.all_equal("status") == Status.OK
    assert got.all_equal("finish_reason") == ("" if name == "done" else "stop")
    assert got.all_equal("output_tokens") == 20
    assert got.soonest("e2e_ms") == near(69)


def test_p25_failed_requests_are_in_no_speed() -> None:
    both = CASES.part(P16_USAGE, *P25.values())
    alone = CASES.part(P16_USAGE)
    for name in ("serial_tok_s", "decode_tok_s"):
        assert both.window.figures[name] == alone.window.figures[name]
    assert both.window.figures["success_rate"].value == pytest.approx(5 / 13)


COUNTERS = {
    "vllm": """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
""",
    "llamacpp": """# TYPE llamacpp:spec_decode_num_drafts counter
llamacpp:spec_decode_num_drafts {drafts}
llamacpp:spec_decode_num_draft_tokens {drafts}
llamacpp:spec_decode_num_accepted_tokens {accepted}
llamacpp:spec_decode_num_accepted_tokens_per_pos{{position="0"}} {first}
""",
}


@pytest.mark.parametrize("engine", COUNTERS)
def test_p28_the_bonus_token_is_in_the_acceptance_length(engine: str) -> None:
    before = read_counters(COUNTERS[engine].format(drafts=1000, accepted=1000, first=500))
    after = read_counters(COUNTERS[engine].format(drafts="1.1e+03", accepted=1240, first=595))
    delta = after.since(before)
    assert delta is not None
    assert delta.totals["drafts"] == 100
    assert delta.acceptance_length == pytest.approx(3.40)
    assert delta.acceptance_by_position == pytest.approx([0.95])
    assert before.since(after) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sglang:spec_verify_calls_total 100\n",
        "trtllm_spec_decode_num_accepted_tokens_total 240\n",
        "vllm:spec_decode_num_drafts_total 0\nvllm:spec_decode_num_accepted_tokens_total 0\n",
    ],
)
def test_p28_without_steps_or_without_accepted_tokens_there_is_none(text: str) -> None:
    assert read_counters(text).acceptance_length is None


def test_p28_acceptance_of_a_real_window_comes_from_its_counters() -> None:
    stream = Stream(chunks=(Chunk(20, 1), Chunk(5, 4), Chunk(5, 3), Chunk(5, 4), Chunk(5, 1)), ids=True)
    script = scripted(stream, requests=4, metrics_vllm=True, owned_by="vllm")
    run = run_script(script, prompts=4, requests=4)
    assert run.events.drafts.tolist() == [4] * 4
    assert run.events.accepted.tolist() == [8] * 4
    assert run.window.figures["acceptance_length"].value == pytest.approx(3.0)
    assert run.window.server.acceptance_length == pytest.approx(3.0)
    assert run.gate("server counters").verdict is Verdict.PASS


def test_p32_acceptance_length_is_a_ratio_of_sums() -> None:
    builder = EventsBuilder()
    for number, (steps, tokens) in enumerate([(10, 40), (90, 90)]):
        builder.add(
            request=number,
            prompt=number,
            scheduled=number,
            sent=number,
            first_byte=number,
            done=1_000_000_000 + number,
            completion_tokens=tokens + 1,
            drafts=steps,
            accepted=tokens - steps,
            token_source="ids",
            chunk_source="ids",
            status=Status.OK,
            phase=Phase.MEASURED,
            times=[number + 1, 999_999_999],
            tokens=[1, tokens],
            kinds=[Kind.TEXT, Kind.TEXT],
        )
    window = measure(builder.build(), Load(slots=1), Client(), Server())
    assert window.figures["acceptance_length"].value == pytest.approx(1.30)
    assert window.figures["tokens_per_step"].value == pytest.approx(1.30)
    assert [row.acceptance_length for row in window.rows] == pytest.approx([4.0, 1.0])


def test_p32_holds_on_the_real_path() -> None:
    quick = Stream(chunks=(Chunk(5, 1), *(Chunk(1, 4),) * 10), ids=True)
    slow = Stream(chunks=(Chunk(5, 1), *(Chunk(1, 1),) * 90), ids=True, draft_tokens=3)
    script = scripted(quick, slow, requests=4, metrics_vllm=True, owned_by="vllm")
    run = run_script(script, prompts=4, requests=4)
    assert run.window.figures["acceptance_length"].value == pytest.approx(1.30)
    assert run.window.server.acceptance_length == pytest.approx(1.30)
