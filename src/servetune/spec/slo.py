"""What was promised to a user of the service."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Self

from servetune.spec.units import SpecError, duration

_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Slo:
    """Upper limits of one request in ms; None = not limited. All must be met."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        limits = {name: getattr(self, name) for name in _NAMES}
        return ",".join(f"{name}={limit:g}ms" for name, limit in limits.items() if limit is not None)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Limits of a text such as `ttft=500ms,tpot=30ms`. Raises SpecError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in _NAMES:
                near = difflib.get_close_matches(name, _NAMES, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise SpecError(
                    f"slo '{text}': write limits of {', '.join(_NAMES)}, such as ttft=500ms{hint}"
                )
            if name in limits:
                raise SpecError(f"slo '{text}': {name} is given twice")
            limits[name] = 1000.0 * duration(value)
        return cls(**limits)
