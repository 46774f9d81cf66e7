"""The event columns: one row a request, one entry a streamed chunk.

This is the one contract between what produces events (`drive`, `sim`) and what reads them
(`measure`). All times are integer ns of one monotonic clock (`servetune.clock`); a time or a count
that does not exist is -1 in memory and null in Parquet, never 0. Chunks of all requests lie in flat
arrays; those of request i are `chunk_start[i] : chunk_start[i + 1]`. Chunks completed by one read of
the socket have the same `chunk_time` and form one arrival group.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]
Kinds = npt.NDArray[np.int8]

MISSING = -1
UNKNOWN_TOKENS = -1
FORMAT = "servetune-events/1"


class Kind(IntEnum):
    """What a chunk carried. Empty chunks (role, keep-alive, usage, finish frames) set no metric."""

    EMPTY = 0
    TEXT = 1
    REASONING = 2
    TOOL_CALL = 3


class Phase(StrEnum):
    WARM_UP = "warm-up"
    MEASURED = "measured"
    DRAIN = "drain"


class TokenSource(StrEnum):
    """Where `completion_tokens` comes from, in order of trust."""

    IDS = "ids"
    USAGE = "usage"
    TOKENIZER = "tokenizer"
    CHUNKS = "chunks"
    NONE = "none"


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    UNSENT = "unsent"


class Failure(StrEnum):
    """Why a request failed. `error` is one of these, then ": " and the proof in words."""

    REFUSED = "connection refused"
    UNREACHABLE = "endpoint unreachable"
    RESET = "connection reset"
    CLOSED = "connection closed"
    TIMEOUT = "timeout"
    STALLED = "stalled"
    HTTP_STATUS = "http status"
    BAD_HTTP = "malformed http"
    BAD_STREAM = "malformed stream"
    TRUNCATED = "truncated stream"
    SERVER_ERROR = "server error"
    EMPTY = "empty answer"
    UNSENT = "unsent"
    CLIENT = "client fault"
    INTERRUPTED = "interrupted"


@dataclass
class Events:
    """Columns of one window; every array has one entry a request unless its name starts with chunk.

    request            int64  position in the plan, unique within a window
    prompt             int64  which prompt of the traffic was sent
    session, turn      int64  conversation and its turn, or missing
    bucket, phase      str
    scheduled, sent, first_byte, done   int64 ns, as in the table of metrics
    connect            int64 ns spent opening a connection after `scheduled`; 0 when one was ready
    prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens   int64 tokens
    token_source       where `completion_tokens` comes from (TokenSource)
    chunk_source       where the tokens of its chunks come from (TokenSource; none = not known)
    input_tokens       int64  tokens of the prompt as sent, where known before sending
    asked_tokens       int64  output tokens asked for, or missing
    exact_tokens       1 when the server was told not to stop before `asked_tokens`, else 0
    drafts, accepted   int64  verify steps and accepted draft tokens, where the server tells
    status, error, finish_reason   str; error is `class: words of the server`
    http_status        int64
    chunk_start        int64, one more entry than requests
    chunk_time, chunk_tokens, chunk_kind   flat; chunk_tokens is -1 where it is not known
    """

    request: Ints
    prompt: Ints
    session: Ints
    turn: Ints
    scheduled: Ints
    sent: Ints
    connect: Ints
    first_byte: Ints
    done: Ints
    prompt_tokens: Ints
    completion_tokens: Ints
    cached_tokens: Ints
    reasoning_tokens: Ints
    input_tokens: Ints
    asked_tokens: Ints
    exact_tokens: Ints
    drafts: Ints
    accepted: Ints
    http_status: Ints
    bucket: list[str]
    phase: list[str]
    token_source: list[str]
    chunk_source: list[str]
    status: list[str]
    error: list[str]
    finish_reason: list[str]
    chunk_start: Ints
    chunk_time: Ints
    chunk_tokens: Small
    chunk_kind: Kinds
    about: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request)

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        return np.array([status == Status.OK for status in self.status], dtype=bool)

    def chunk_owner(self) -> Ints:
        """Row of each chunk, shape (chunks,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.chunk_start))

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Self:
        """The given rows, in the given order (a mask keeps the order)."""
        index = np.flatnonzero(rows) if rows.dtype == bool else rows
        starts, ends = self.chunk_start[index], self.chunk_start[index + 1]
        lengths = ends - starts
        chunk_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        within = np.arange(chunk_start[-1]) - np.repeat(chunk_start[:-1], lengths)
        chunks = np.repeat(starts, lengths) + within
        columns: dict[str, Any] = {"about": dict(self.about)}
        for column in fields(self):
            name, values = column.name, getattr(self, column.name)
            if name == "chunk_start":
                columns[name] = chunk_start
            elif name.startswith("chunk_") and isinstance(values, np.ndarray):
                columns[name] = values[chunks]
            elif isinstance(values, np.ndarray):
                columns[name] = values[index]
            elif isinstance(values, list):
                columns[name] = [values[i] for i in index]
        return type(self)(**columns)

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """All rows of the parts (one a worker), ordered by `scheduled`."""
        columns: dict[str, Any] = {"about": dict(parts[0].about)}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            if column.name == "chunk_start":
                lengths = np.concatenate([np.diff(v) for v in values])
                columns[column.name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            elif isinstance(values[0], np.ndarray):
                columns[column.name] = np.concatenate(values)
            elif isinstance(values[0], list):
                columns[column.name] = [row for part in values for row in part]
        whole = cls(**columns)
        return whole.take(np.lexsort((whole.request, whole.scheduled)))

    def to_table(self) -> pa.Table:
        """Arrow table, one row a request, chunks as list columns, missing values as null."""
        import pyarrow as pa

        arrays: dict[str, pa.Array] = {}
        for column in fields(self):
            name, values = column.name, getattr(self, column.name)
            if name in ("about", "chunk_start"):
                continue
            if name.startswith("chunk_") and isinstance(values, np.ndarray):
                null = values == MISSING if name == "chunk_tokens" else None
                flat = pa.array(values, mask=null)
                arrays[name] = pa.ListArray.from_arrays(pa.array(self.chunk_start, pa.int32()), flat)
            elif isinstance(values, np.ndarray):
                arrays[name] = pa.array(values, mask=values == MISSING)
            else:
                arrays[name] = pa.array(values, pa.string()).dictionary_encode()
        table = pa.table(arrays)
        return table.replace_schema_metadata({"format": FORMAT, **self.about})

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """Inverse of `to_table`. Raises ValueError when the table is not in this format."""
        import pyarrow as pa

        about = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        if about.pop("format", None) != FORMAT:
            raise ValueError(f"not an event table in format {FORMAT}")
        about.pop("ARROW:schema", None)
        columns: dict[str, Any] = {"about": about}
        for name in table.column_names:
            array = table.column(name).combine_chunks()
            if pa.types.is_list(array.type):
                columns["chunk_start"] = np.asarray(array.offsets, dtype=np.int64)
                flat = array.values
                dtype = flat.type.to_pandas_dtype()
                columns[name] = np.asarray(flat.fill_null(MISSING), dtype=dtype)
            elif pa.types.is_dictionary(array.type):
                columns[name] = array.to_pylist()
            else:
                columns[name] = np.asarray(array.fill_null(MISSING), dtype=np.int64)
        try:
            return cls(**columns)
        except TypeError as error:  # it says which column is missing or not known
            raise ValueError(f"not an event table: {error}") from None

    def write(self, path: Path) -> None:
        """Write Parquet, whole or not at all: a temporary name first, then renamed."""
        import pyarrow.parquet as pq

        unfinished = path.with_suffix(".part")
        pq.write_table(self.to_table(), unfinished, compression="zstd")
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote. Raises ValueError or OSError."""
        import pyarrow.parquet as pq

        return cls.from_table(pq.read_table(path))


_STRINGS = ("bucket", "phase", "token_source", "chunk_source", "status", "error", "finish_reason")


class EventsBuilder:
    """Collects rows into columns; `add` takes the row's values by column name."""

    def __init__(self) -> None:
        self._numbers: dict[str, array[int]] = {}
        self._strings: dict[str, list[str]] = {name: [] for name in _STRINGS}
        for column in fields(Events):
            if column.name not in (*_STRINGS, "about") and not column.name.startswith("chunk_"):
                self._numbers[column.name] = array("q")
        self._start = array("q", [0])
        self._time = array("q")
        self._tokens = array("i")
        self._kind = array("b")

    def add(
        self,
        *,
        times: list[int],
        tokens: list[int],
        kinds: list[int],
        **row: int | str,
    ) -> None:
        """Append one request; columns that are not named are missing (or empty text)."""
        for name, numbers in self._numbers.items():
            numbers.append(row.pop(name, MISSING))  # type: ignore[arg-type]
        for name, strings in self._strings.items():
            strings.append(str(row.pop(name, "")))
        if row:
            raise TypeError(f"no such event columns: {sorted(row)}")
        # an array of a list, then joined: several times faster than extending by the list
        self._time += array("q", times)
        self._tokens += array("i", tokens)
        self._kind += array("b", kinds)
        self._start.append(len(self._time))

    def build(self, about: dict[str, str] | None = None) -> Events:
        columns: dict[str, Any] = {
            name: np.array(values, dtype=np.int64) for name, values in self._numbers.items()
        }
        return Events(
            **columns,
            **self._strings,  # type: ignore[arg-type]
            chunk_start=np.array(self._start, dtype=np.int64),
            chunk_time=np.array(self._time, dtype=np.int64),
            chunk_tokens=np.array(self._tokens, dtype=np.int32),
            chunk_kind=np.array(self._kind, dtype=np.int8),
            about=about or {},
        )
