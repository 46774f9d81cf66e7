"""The tables of a bench: per prompt in serial mode, the summary, and the gates that speak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from servetune.measure import SHOWN, Bench, Distribution, Gate, Measurement, Row, Verdict
from servetune.report.words import figure, interval, number, plain

_FIGURES = {
    "success_rate": "success rate",
    "serial_tok_s": "tok/s end to end",
    "decode_tok_s": "tok/s decode, a stream",
    "tpot_pooled": "TPOT, pooled",
    "output_throughput": "output throughput",
    "total_throughput": "total throughput",
    "request_rate": "request rate",
    "in_flight": "in flight",
    "slo_attainment": "SLO met",
    "goodput": "goodput",
    "acceptance_length": "acceptance length",
    "tokens_per_step": "tokens per step",
    "step_time": "step time",
    "tokens_per_chunk": "tokens per arrival",
    "prefix_hit_share": "prefix hit share",
}
_DISTRIBUTIONS = {
    "ttft": "TTFT",
    "ttfa": "TTFA",
    "tpot": "TPOT",
    "itl": "ITL",
    "chunk_gap": "chunk gap",
    "worst_stall": "worst stall",
    "e2e": "E2E",
    "service": "service",
    "normalised_latency": "E2E ÷ tokens",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "client_lag": "client lag",
}
_LINE_WIDTH, _LEAST_LABEL = 74, 10
_CELL_WIDTH = 6
_IF_TOLD = ("acceptance_length", "tokens_per_step", "tokens_per_chunk", "prefix_hit_share", "step_time")
_MOST_ROWS = 50


def bench_tables(bench: Bench, labels: Sequence[str] = ()) -> RenderableType:
    """Everything a bench showed. `labels` are the first words of the prompts, for the user's own eyes."""
    parts: list[RenderableType] = []
    for window in bench.windows:
        parts += [*_window(window, labels), ""]
    return Group(*parts[:-1])


def _window(window: Measurement, labels: Sequence[str]) -> Iterator[RenderableType]:
    server = window.server
    who = " ".join(word for word in (server.engine, server.version) if word)
    yield Text(plain(f"{window.load}  ·  {server.model}  ·  {who}"), style="bold")
    if window.load == "serial":
        yield _prompts(window, labels)
    yield _summary(window)
    if window.distributions:
        yield _spread(window)
    yield from _remarks(window)
    yield _verdict(window)


def _prompts(window: Measurement, labels: Sequence[str]) -> Table:
    """One line a request; columns that no request has are left out."""
    columns: dict[str, Callable[[Row], str]] = {
        "tokens": lambda r: number(r.output_tokens),
        "decode\ntok/s": lambda r: number(r.decode_tok_s),
        "e2e\ntok/s": lambda r: number(r.end_to_end_tok_s),
        "TTFT\nms": lambda r: number(r.ttft_ms),
        "TPOT\nms": lambda r: number(r.tpot_ms),
        "accept\nlen": lambda r: number(r.acceptance_length),
        "step\nms": lambda r: number(r.step_ms),
        "cached": lambda r: number(r.cached_tokens),
    }
    rows = window.rows[:_MOST_ROWS]
    shown = {name: cell for name, cell in columns.items() if any(cell(row) != "–" for row in rows)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("#", justify="right", no_wrap=True, min_width=len(str(len(rows))))
    label_width = max(_LEAST_LABEL, _LINE_WIDTH - (_CELL_WIDTH + 2) * len(shown))
    table.add_column("prompt", max_width=label_width, no_wrap=True, overflow="ellipsis")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True, min_width=_CELL_WIDTH)
    for row in rows:
        table.add_row(str(row.request + 1), _label(row, labels), *(cell(row) for cell in shown.values()))
    if len(window.rows) > len(rows):
        table.add_row("…", f"{len(window.rows) - len(rows)} more in the JSON")
    return table


def _label(row: Row, labels: Sequence[str]) -> str:
    if row.error:
        return f"[red]{escape(plain(row.error))}[/red]"
    label = labels[row.prompt] if row.prompt < len(labels) else f"prompt {row.prompt + 1}"
    return escape(plain(f"{row.bucket}: {label}" if row.bucket else label))


def _summary(window: Measurement) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_column(style="dim")
    requests = window.requests
    words = f"{requests.ok} ok of {requests.scheduled}"
    for name, count in (("failed", requests.failed), ("unsent", requests.unsent)):
        words += f", {count} {name}" if count else ""
    span = (
        f"window {number(window.seconds)} s, {window.loop} loop" if window.seconds else f"{window.loop} loop"
    )
    table.add_row("requests", words, span)
    for name, label in _FIGURES.items():
        estimate = window.figures.get(name)
        if estimate is None or (estimate.value is None and name in _IF_TOLD):
            continue
        table.add_row(label, figure(estimate), estimate.note or estimate.method)
    if window.server.acceptance_length is not None:
        positions = " ".join(f"{share:.2f}" for share in window.server.acceptance_by_position)
        table.add_row(
            "server's own counters",
            f"{number(window.server.acceptance_length)} tokens/step",
            f"accepted by position: {positions}" if positions else "acceptance length over the window",
        )
    return table


def _spread(window: Measurement) -> Table:
    """Distributions; what a percentile that is not shown would need stands below."""
    lines = {
        f"{label} [dim]{found.unit}[/dim]": _line(found)
        for name, label in _DISTRIBUTIONS.items()
        if (found := window.distributions.get(name)) is not None
    }
    names = ["n", "mean", "p50", "95 % of p50", "p90", "p95", "p99", "max"]
    table = Table("", box=None, pad_edge=False, header_style="dim")
    shown = [name for name in names if any(name in line for line in lines.values())]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for label, line in lines.items():
        table.add_row(label, *(line.get(name, "–") for name in shown))
    return table


def _line(found: Distribution) -> dict[str, str]:
    cells = {"n": number(found.n), "mean": number(found.mean), "max": number(found.max)}
    for quantile in found.quantiles:
        name = f"p{100 * quantile.p:g}"
        cells[name] = "failed" if quantile.value is None else number(quantile.value)
        if quantile.p == SHOWN[0]:
            cells["95 % of p50"] = interval(quantile.low, quantile.high)
    return cells


def _needs(window: Measurement) -> str:
    """What it takes to show the percentiles that are not shown."""
    needs = window.distributions["e2e"].needs
    words = ", ".join(f"{name} {n}" for name, n in needs.items())
    return f"independent requests needed for a percentile: {words}" if words else ""


def _remarks(window: Measurement) -> Iterator[Text]:
    shares = ", ".join(f"{source} {share:.0%}" for source, share in window.token_sources.items())
    if needs := _needs(window):
        yield Text(needs, style="dim")
    yield Text(f"tokens counted by: {shares or 'nothing'}", style="dim")
    for gate in window.flags:
        yield Text(_sentence(gate), style="yellow")


def _sentence(gate: Gate) -> str:
    word = "VOID" if gate.verdict is Verdict.VOID else "note"
    return f"{word}  {gate.name}: {plain(gate.evidence)} (limit: {gate.limit}; {gate.reason})"


def _verdict(window: Measurement) -> Text:
    if window.void:
        return Text("\n".join(_sentence(gate) for gate in window.void), style="bold red")
    return Text("valid: all gates passed; intervals are from within one launch", style="green")
