"""What a user may ask for, checked before anything starts: load points, durations, endpoints."""

from servetune.spec.load import Arrivals, Load
from servetune.spec.slo import Slo
from servetune.spec.target import Target
from servetune.spec.units import SpecError, duration

__all__ = ["Arrivals", "Load", "Slo", "SpecError", "Target", "duration"]
