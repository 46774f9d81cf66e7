"""Runs what a user asked for, from the request to the measurement on disk."""

from servetune.study.bench import BenchSpec, Listener, bench
from servetune.study.preflight import EndpointError, Preflight, preflight
from servetune.study.results import remeasure

__all__ = ["BenchSpec", "EndpointError", "Listener", "Preflight", "bench", "preflight", "remeasure"]
