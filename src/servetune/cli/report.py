"""`servetune report`: compute every figure of a bench again from its events."""

from __future__ import annotations

from pathlib import Path


def report(folder: Path, /) -> int:
    """Show a bench that was written with `--out`, every figure computed again from its events.

    Parameters
    ----------
    folder
        What was given as `--out`.
    """
    from rich.console import Console

    from servetune.report import bench_tables
    from servetune.study import remeasure

    result = remeasure(folder)
    Console().print(bench_tables(result))
    return 0 if result.valid else 1
