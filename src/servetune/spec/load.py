"""Load points: how hard a window drives the server."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from servetune.spec.units import SpecError

_FORMS = "serial, concurrency=N, rate=R, or rate=R,arrivals=poisson|gamma|constant,burstiness=B"


class Arrivals(StrEnum):
    POISSON = "poisson"
    GAMMA = "gamma"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Load:
    """One load point.

    slots       requests in flight, closed loop (1 = serial); None in open loop
    rate        requests per second, open loop; None in closed loop
    arrivals    how the gaps of the open loop are drawn
    burstiness  shape of the gamma gaps: 1 = Poisson, below 1 burstier, CV = burstiness^-1/2
    """

    slots: int | None = None
    rate: float | None = None
    arrivals: Arrivals = Arrivals.POISSON
    burstiness: float = 1.0

    @property
    def is_open(self) -> bool:
        """True when requests leave by schedule, whatever the server does."""
        return self.rate is not None

    @property
    def is_serial(self) -> bool:
        return self.slots == 1

    def __str__(self) -> str:
        if self.slots is not None:
            return "serial" if self.slots == 1 else f"concurrency={self.slots}"
        text = f"rate={self.rate:g}"
        if self.arrivals is not Arrivals.POISSON:
            text += f",arrivals={self.arrivals}"
        if self.arrivals is Arrivals.GAMMA:
            text += f",burstiness={self.burstiness:g}"
        return text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Load point of a text such as `serial` or `rate=5,arrivals=constant`. Raises SpecError."""
        if text.strip() == "serial":
            return cls(slots=1)
        parts = [_pair(part, text) for part in text.split(",")]
        pairs = dict(parts)
        if len(pairs) < len(parts):
            raise SpecError(f"load '{text}': each word can be given once")
        if "concurrency" in pairs:
            slots = _number(pairs.pop("concurrency"), "concurrency", text)
            _nothing_left(pairs, text)
            if slots != int(slots):
                raise SpecError(f"load '{text}': concurrency must be a whole number")
            return cls(slots=int(slots))
        if "rate" not in pairs:
            raise SpecError(f"load '{text}' is not a load point: write {_FORMS}")
        rate = _number(pairs.pop("rate"), "rate", text)
        word = pairs.pop("arrivals", "gamma" if "burstiness" in pairs else "poisson")
        if word not in list(Arrivals):
            raise SpecError(
                f"load '{text}': arrivals must be one of {', '.join(Arrivals)}{_near(word, Arrivals)}"
            )
        burstiness = 1.0
        if "burstiness" in pairs:
            if word != Arrivals.GAMMA:
                raise SpecError(f"load '{text}': burstiness goes with arrivals=gamma only")
            burstiness = _number(pairs.pop("burstiness"), "burstiness", text)
        _nothing_left(pairs, text)
        return cls(rate=rate, arrivals=Arrivals(word), burstiness=burstiness)


def _pair(part: str, text: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    name = name.strip()
    known = ("serial", "concurrency", "rate", "arrivals", "burstiness")
    if not equals or name not in known:
        raise SpecError(f"load '{text}' is not a load point: write {_FORMS}{_near(name, known)}")
    return name, value.strip()


def _number(value: str, name: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SpecError(f"load '{text}': {name} must be a number above zero, not '{value}'")
    return number


def _nothing_left(pairs: dict[str, str], text: str) -> None:
    if pairs:
        raise SpecError(f"load '{text}': {', '.join(pairs)} does not belong here: write {_FORMS}")


def _near(word: str, known: tuple[str, ...] | type[Arrivals]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {close[0]}?)" if close and close[0] != word else ""
