"""Counters of the engines: only what can be a count."""

from __future__ import annotations

import pytest

from servetune.engines import decode, read_counters


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-5", "1e21", "9.1e15", "word", ""])
def test_what_cannot_be_a_count_is_passed_over(value: str) -> None:
    text = f"vllm:generation_tokens_total {value}\nvllm:prompt_tokens_total 7\n"
    assert read_counters(text).totals == {"prompt_tokens": 7.0}


def test_counters_of_several_engines_of_one_server_add_up() -> None:
    text = 'vllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 6\n'
    assert read_counters(text).totals == {"generated_tokens": 11.0}


def test_a_counter_that_fell_is_no_difference() -> None:
    before = read_counters("llamacpp:tokens_predicted_total 10\n")
    after = read_counters("llamacpp:tokens_predicted_total 3\n")
    assert after.since(before) is None
    assert before.since(after) is not None


def test_choices_may_be_null() -> None:
    chunk = decode(b'{"choices":null,"usage":{"completion_tokens":3}}')
    assert chunk.generated == 3
    assert chunk.content() == (0, "")
