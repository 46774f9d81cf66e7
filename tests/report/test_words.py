"""Figures and foreign words as text."""

from __future__ import annotations

import pytest

from servetune.report.words import number, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (9.876, "9.88"),
        (64, "64"),
        (1234567, "1,234,567"),
        (59.171, "59.2"),
        (1234.5, "1,234"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert plain("m\x1b]0;pwn\x07\x1b[31m\u202e ok é 日本") == "m�]0;pwn��[31m� ok é 日本"
