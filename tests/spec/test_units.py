"""Durations as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.spec import SpecError, duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("500ms", 0.5), ("90s", 90.0), ("2m", 120.0), ("2min", 120.0), ("1.5h", 5400.0), ("7", 7.0)],
        *[(" 3 s ", 3.0), (".5s", 0.5), ("5.s", 5.0), ("0.001ms", 1e-6)],
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            " ",
            "s",
            "-1s",
            "+1s",
            "1,5s",
            "1e3s",
            "nan",
            "inf",
            "5 d",
            "5 S",
            "0",
            "0ms",
            "1s 2s",
            "1_0s",
        ],
    ],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(SpecError, match="not a duration"):
        duration(text)


@given(st.text(max_size=8))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        seconds = duration(text)
    except SpecError:
        return
    assert seconds > 0
