"""Settings of all tests: how many examples a property gets."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline: on a loaded machine an example's time says nothing. Long lists of bytes are meant.
settings.register_profile(
    "servetune",
    max_examples=int(os.environ.get("SERVETUNE_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("servetune")
