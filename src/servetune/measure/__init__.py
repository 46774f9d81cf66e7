"""Events → metrics with intervals and gates. Pure functions over columns; definitions in docs/metrics.md."""

from servetune.measure.derive import Derived, derive, output_rate, token_gaps
from servetune.measure.estimates import Estimate
from servetune.measure.measure import measure
from servetune.measure.measurement import SCHEMA, Bench, Client, Gate, Measurement, Row, Server, Verdict
from servetune.measure.quantiles import SHOWN, Distribution, Quantile, distribution, least_n, rank_bounds
from servetune.measure.slo import attainment

__all__ = [
    "SCHEMA",
    "SHOWN",
    "Bench",
    "Client",
    "Derived",
    "Distribution",
    "Estimate",
    "Gate",
    "Measurement",
    "Quantile",
    "Row",
    "Server",
    "Verdict",
    "attainment",
    "derive",
    "distribution",
    "least_n",
    "measure",
    "output_rate",
    "rank_bounds",
    "token_gaps",
]
