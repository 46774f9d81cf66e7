"""Quantities with units, as users write them."""

from __future__ import annotations

import re

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class SpecError(ValueError):
    """The user asked for something that can't be done; the message says what would be right."""


def duration(text: str) -> float:
    """Seconds of `500ms`, `90s`, `2m`, `1.5h` or a plain number of seconds. Raises SpecError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text)
    if not match or (match[2] and match[2] not in _SECONDS):
        raise SpecError(f"'{text}' is not a duration: write a number with ms, s, m or h, such as 500ms or 2m")
    seconds = float(match[1]) * _SECONDS.get(match[2] or "s", 1.0)
    if seconds <= 0:
        raise SpecError(f"'{text}' is not a duration: it must be above zero")
    return seconds
