"""Prompt files, and warm-up prompts that share nothing with the measured ones."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.engines import Ask, Dialect, body
from servetune.spec import SpecError
from servetune.traffic import Prompt, read_prompts, warm_up_prompts

ONE = st.sampled_from(["one", "two", "three", "four", "five", "six", "seven"])
WORDS = st.lists(ONE, min_size=1, max_size=12)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows(tmp_path: Path) -> None:
    chat = {"role": "user", "content": "hello"}
    path = written(
        tmp_path / "a.jsonl",
        {"messages": [chat], "bucket": "de"},
        {"prompt": "text", "max_tokens": 5, "extra": 1},
        {"prompt": [1, 2, 3], "max_completion_tokens": 6},
    )
    first, second, third = read_prompts(path)
    assert (first.messages, first.bucket, first.api, first.label) == ((chat,), "de", "chat", "hello")
    assert (second.text, second.max_tokens, second.api, second.label) == ("text", 5, "completions", "text")
    assert (third.ids, third.max_tokens, third.label) == ((1, 2, 3), 6, "3 token ids")


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first prompt\r\n\n  second \x0b\u2028 prompt  \n")
    assert [prompt.text for prompt in read_prompts(path)] == ["first prompt", "second \x0b\u2028 prompt"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", b'{"prompt":"one"}\n'), ("a.txt", b"one\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert read_prompts(tmp_path / name) == [Prompt(text="one")]


def test_line_breaks_inside_a_json_text_are_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt":"a\u2028b\x85c"}\n{"prompt":"d"}')
    assert [prompt.text for prompt in read_prompts(path)] == ["a\u2028b\x85c", "d"]


def test_a_bad_row_is_never_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": ""}, {"prompt": "b"})
    with pytest.raises(SpecError, match="1 of 3 rows") as caught:
        read_prompts(path)
    assert "line 2:" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "a"})
    path.chmod(0)
    with pytest.raises(SpecError, match=r"a\.jsonl"):
        read_prompts(path)


LINES = st.binary(max_size=40) | st.sampled_from([b'{"prompt":"a"}', b'{"messages":[{"role":"user"}]}'])


@given(st.lists(LINES))
def test_any_file_is_read_or_refused_in_words(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="servetune-test-") as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(b"\n".join(lines))
        try:
            prompts = read_prompts(path)
        except SpecError:
            return
        assert prompts
        for prompt in [*prompts, *warm_up_prompts(prompts, 3)]:
            assert body(prompt, Ask(model="m"), Dialect("endpoint"))
            assert isinstance(prompt.label, str)


def payloads(prompts: list[Prompt]) -> set[bytes]:
    return {body(prompt, Ask(model="m"), Dialect("endpoint"))[1] for prompt in prompts}


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


KINDS: dict[str, list[Prompt]] = {
    "text": [Prompt(text=f"{n} little words in a row") for n in range(5)],
    "one word": [Prompt(text="word")],
    "chat": [Prompt(messages=(message("be kind", "system"), message(f"question {n}"))) for n in range(5)],
    "parts": [
        Prompt(messages=({"role": "user", "content": [{"type": "text", "text": f"look at {n} of it"}]},))
        for n in range(5)
    ],
    "ids": [Prompt(ids=tuple(range(n, n + 20))) for n in range(5)],
    "equal ids": [Prompt(ids=(7,) * 20)],
    "ids that read the same backwards": [Prompt(ids=(1, 2, 3, 2, 1))],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5, 12])
def test_p48_warm_up_and_measured_prompts_are_disjoint(kind: str, n: int) -> None:
    measured = KINDS[kind]
    warm = warm_up_prompts(measured, n)
    assert len(warm) == n
    assert not payloads(warm) & payloads(measured)
    for prompt, other in zip(warm, (measured * n)[:n], strict=True):
        assert prompt.api == other.api
        assert prompt.max_tokens == other.max_tokens
        if prompt.ids is not None:
            assert other.ids is not None
            assert len(prompt.ids) == len(other.ids)
            assert prompt.ids[0] != other.ids[0]  # no common prefix
        if prompt.text is not None:
            assert other.text is not None
            assert 0 <= len(prompt.text.split()) - len(other.text.split()) <= 1
            assert not prompt.text.startswith(other.text[:1])


@given(st.lists(WORDS.map(" ".join), min_size=1, max_size=5, unique=True), st.integers(1, 12))
def test_warm_up_texts_share_no_beginning_with_measured_ones(texts: list[str], n: int) -> None:
    warm = warm_up_prompts([Prompt(text=text) for text in texts], n)
    for prompt in warm:
        assert prompt.text is not None
        for text in texts:
            assert prompt.text[0] != text[0]
