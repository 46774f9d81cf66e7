"""Load points as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.spec import Arrivals, Load, SpecError


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("serial", Load(slots=1)),
        (" serial ", Load(slots=1)),
        ("concurrency=1", Load(slots=1)),
        ("concurrency = 64", Load(slots=64)),
        ("rate=2.5", Load(rate=2.5)),
        ("rate=5,arrivals=constant", Load(rate=5, arrivals=Arrivals.CONSTANT)),
        ("arrivals=poisson, rate=5", Load(rate=5)),
        ("rate=5,arrivals=gamma,burstiness=0.5", Load(rate=5, arrivals=Arrivals.GAMMA, burstiness=0.5)),
        ("rate=5,burstiness=0.5", Load(rate=5, arrivals=Arrivals.GAMMA, burstiness=0.5)),
    ],
)
def test_load_points(text: str, load: Load) -> None:
    assert Load.parse(text) == load
    assert Load.parse(str(load)) == load  # what a file stores is read again
    assert load.is_open == (load.rate is not None)
    assert load.is_serial == (load.slots == 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write serial"),
        ("fast", "write serial"),
        ("seriel", "did you mean serial?"),
        ("serial=1", "write serial"),
        ("serial,concurrency=2", "write serial"),
        ("concurrency", "write serial"),
        ("concurrency=", "above zero"),
        ("concurrency=two", "above zero"),
        ("concurrency=0", "above zero"),
        ("concurrency=1.5", "whole number"),
        ("concurrency=nan", "above zero"),
        ("concurrency=inf", "above zero"),
        ("concurrency=2,rate=3", "rate does not belong here"),
        ("concurrency=2,arrivals=constant", "arrivals does not belong here"),
        ("rate=0", "above zero"),
        ("rate=-1", "above zero"),
        ("rate=5,arrivals=possion", "did you mean poisson?"),
        ("rate=5,arrivals=", "arrivals must be one of poisson, gamma, constant"),
        ("rate=5,arrivals=constant,burstiness=2", "burstiness goes with"),
        ("rate=5,burstiness=0", "above zero"),
        ("rat=5", "did you mean rate?"),
        ("rate=5,", "write serial"),
        ("rate=5,rate=6", "once"),
        ("arrivals=constant", "write serial"),
    ],
)
def test_what_is_no_load_point(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Load.parse(text)
    assert f"load '{text}'" in str(caught.value)
    assert words in str(caught.value)


WORDS = st.sampled_from(
    ["serial", "concurrency", "rate", "arrivals", "burstiness", "=", ",", "5", "-1", "gamma"]
)


@given(st.lists(WORDS | st.text(max_size=3), max_size=8).map("".join))
def test_any_text_is_a_load_point_or_refused(text: str) -> None:
    try:
        load = Load.parse(text)
    except SpecError:
        return
    assert (load.slots is None) != (load.rate is None)
    assert Load.parse(str(load)).slots == load.slots
