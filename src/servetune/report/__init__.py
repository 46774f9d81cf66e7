"""Measurements as tables on a terminal."""

from servetune.report.table import bench_tables
from servetune.report.words import figure, plain

__all__ = ["bench_tables", "figure", "plain"]
