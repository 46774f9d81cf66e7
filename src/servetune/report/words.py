"""Figures as text."""

from __future__ import annotations

import math

from servetune.measure import Estimate


def number(value: float | None) -> str:
    """Three or four significant digits, without an exponent; counts in full; a dash for none."""
    if value is None or math.isnan(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def plain(text: str) -> str:
    """`text` without control characters, which a model's name or an error could send to the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def interval(low: float | None, high: float | None) -> str:
    """`[low, high]`, empty when there is none."""
    if low is None and high is None:
        return ""
    return f"[{number(low)}, {number(high)}]"


def figure(estimate: Estimate) -> str:
    """Value, interval and unit."""
    if estimate.value is None:
        return "–"
    if estimate.unit == "":
        share = [None if x is None else 100 * x for x in (estimate.value, estimate.low, estimate.high)]
        return f"{number(share[0])} % {interval(share[1], share[2])}".rstrip()
    return f"{number(estimate.value)} {estimate.unit} {interval(estimate.low, estimate.high)}".rstrip()
