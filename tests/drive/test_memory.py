"""A million events of 2,000 requests, all in flight at once, in under 400 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_million_events_take_less_than_400_mb() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    done = subprocess.run(
        [sys.executable, script, "--json"], capture_output=True, text=True, timeout=300, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["events"] == 1_000_000
    assert figures["failed"] == 0
    assert figures["peak_total_mb"] < 400
