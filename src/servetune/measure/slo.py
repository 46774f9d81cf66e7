"""Which requests met their promise. A failed, unsent or wrong-length request is a miss."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servetune.measure.derive import Derived
from servetune.spec import Slo


def attainment(derived: Derived, slo: Slo) -> npt.NDArray[np.bool_]:
    """True where the request met every limit, shape (n,); goodput is their number per second.

    A limit on TPOT does not bind a request that has none (a single arrival of tokens).
    """
    events = derived.events
    met: npt.NDArray[np.bool_] = events.ok & ~(
        (events.exact_tokens == 1) & (events.completion_tokens != events.asked_tokens)
    )
    if slo.ttft is not None:
        met &= derived.ttft <= slo.ttft
    if slo.tpot is not None:
        met &= np.isnan(derived.tpot) | (derived.tpot <= slo.tpot)
    if slo.e2e is not None:
        met &= derived.e2e <= slo.e2e
    return met
