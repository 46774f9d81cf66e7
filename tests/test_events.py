"""The event columns: Parquet and back, rows taken and joined, missing values."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetune.events import FORMAT, MISSING, Events, EventsBuilder, Kind, Phase, Status

NUMBERS = [
    column.name
    for column in fields(Events)
    if column.type == "Ints" and not column.name.startswith("chunk_") and column.name != "request"
]
TEXTS = ["bucket", "phase", "token_source", "chunk_source", "status", "error", "finish_reason"]
TIMES = st.integers(0, 2**62)
CHUNKS = st.lists(st.tuples(TIMES, st.integers(-1, 2**31 - 1), st.sampled_from(list(Kind))), max_size=4)
WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@st.composite
def events(draw: st.DrawFn, most: int = 4, first: int = 0) -> Events:
    """Any columns whatever, with the requests numbered from `first`."""
    builder = EventsBuilder()
    for number in range(draw(st.integers(0, most))):
        row: dict[str, int | str] = {
            name: draw(st.one_of(st.just(MISSING), TIMES))
            for name in draw(st.sets(st.sampled_from(NUMBERS), max_size=6))
        }
        row |= {name: draw(WORDS) for name in draw(st.sets(st.sampled_from(TEXTS), max_size=4))}
        chunks = draw(CHUNKS)
        builder.add(
            request=first + number,
            times=[time for time, _, _ in chunks],
            tokens=[tokens for _, tokens, _ in chunks],
            kinds=[int(kind) for _, _, kind in chunks],
            **row,
        )
    return builder.build(draw(st.dictionaries(st.sampled_from(["load", "launch"]), WORDS)))


def rows_of(found: Events) -> list[tuple[object, ...]]:
    """Each row as one tuple, chunks included: what must stay together."""
    rows = []
    for i in range(len(found)):
        span = slice(found.chunk_start[i], found.chunk_start[i + 1])
        numbers = tuple(int(getattr(found, name)[i]) for name in ("request", *NUMBERS))
        texts = tuple(getattr(found, name)[i] for name in TEXTS)
        chunks = (found.chunk_time[span], found.chunk_tokens[span], found.chunk_kind[span])
        rows.append((*numbers, *texts, *(tuple(column.tolist()) for column in chunks)))
    return rows


def same(one: Events, other: Events) -> bool:
    for column in fields(Events):
        a, b = getattr(one, column.name), getattr(other, column.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True


@given(events())
def test_parquet_and_back_changes_nothing(given_events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.parquet"
        given_events.write(path)
        assert same(Events.read(path), given_events)
        assert [file.name for file in Path(folder).iterdir()] == ["events.parquet"]
    assert same(Events.from_table(given_events.to_table()), given_events)


@given(events(), st.data())
def test_take_gives_the_rows_asked_for(given_events: Events, data: st.DataObject) -> None:
    n = len(given_events)
    order = data.draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=8)) if n else []
    taken = given_events.take(np.array(order, dtype=np.int64))
    rows = rows_of(given_events)
    assert rows_of(taken) == [rows[i] for i in order]
    assert taken.about == given_events.about
    assert taken.chunk_start[-1] == len(taken.chunk_time)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
    part = given_events.take(mask)
    assert rows_of(part) == [row for row, keep in zip(rows, mask, strict=True) if keep]
    assert same(Events.from_table(part.to_table()), part)
    assert same(given_events.take(np.arange(n)), given_events)
    assert np.array_equal(np.bincount(part.chunk_owner(), minlength=len(part)), np.diff(part.chunk_start))


@given(st.lists(st.integers(0, 2**32).flatmap(lambda first: events(4, first)), min_size=1, max_size=3))
def test_joined_keeps_each_row_whole_and_orders_by_scheduled(parts: list[Events]) -> None:
    whole = Events.joined(parts)
    rows = [row for part in parts for row in rows_of(part)]
    assert sorted(map(repr, rows_of(whole))) == sorted(map(repr, rows))
    keys = list(zip(whole.scheduled.tolist(), whole.request.tolist(), strict=True))
    assert keys == sorted(keys)
    assert whole.about == parts[0].about


def _one(**row: int | str) -> EventsBuilder:
    builder = EventsBuilder()
    builder.add(times=[5, 7, 7], tokens=[0, -1, 3], kinds=[Kind.EMPTY, Kind.TEXT, Kind.TEXT], **row)
    return builder


def test_missing_values_are_null_on_disk_and_never_zero(tmp_path: Path) -> None:
    path = tmp_path / "events.parquet"
    _one(request=0, sent=0, cached_tokens=0, status=Status.OK).build().write(path)
    (row,) = pq.read_table(path).to_pylist()
    assert row["sent"] == 0
    assert row["cached_tokens"] == 0
    for name in ("scheduled", "first_byte", "done", "completion_tokens", "reasoning_tokens", "drafts"):
        assert row[name] is None
    assert row["chunk_tokens"] == [0, None, 3]
    assert row["chunk_time"] == [5, 7, 7]
    read = Events.read(path)
    assert (read.sent[0], read.done[0], read.chunk_tokens.tolist()) == (0, MISSING, [0, -1, 3])


def test_one_row_a_request_with_its_chunks_as_lists(tmp_path: Path) -> None:
    builder = _one(request=3)
    builder.add(request=4, times=[], tokens=[], kinds=[])
    table = builder.build({"load": "serial"}).to_table()
    assert table.num_rows == 2
    assert table.column("chunk_kind").to_pylist() == [[0, 1, 1], []]
    assert table.schema.metadata[b"format"] == FORMAT.encode()
    assert table.schema.metadata[b"load"] == b"serial"


def test_no_events_are_events_too(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    EventsBuilder().build().write(path)
    read = Events.read(path)
    assert (len(read), len(read.ok), read.chunk_start.tolist()) == (0, 0, [0])
    assert len(Events.joined([read, read])) == 0


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        _one(request=0, colour=1)


def test_ok_is_by_status() -> None:
    builder = EventsBuilder()
    for number, status in enumerate([*Status, Phase.MEASURED]):
        builder.add(request=number, times=[], tokens=[], kinds=[], status=status)
    assert builder.build().ok.tolist() == [True, False, False, False]


def test_a_file_in_another_form_is_a_value_error(tmp_path: Path) -> None:
    no_parquet = tmp_path / "text.parquet"
    no_parquet.write_bytes(b"not Parquet at all")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"request": [1]}), other)
    newer = tmp_path / "newer.parquet"
    table = _one(request=0).build().to_table()
    pq.write_table(table.replace_schema_metadata({"format": "servetune-events/99"}), newer)
    for path in (no_parquet, other, newer):
        with pytest.raises(ValueError):
            Events.read(path)


def test_a_file_that_lacks_a_column_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(_one(request=0).build().to_table().drop_columns(["sent"]), path)
    with pytest.raises(ValueError):
        Events.read(path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_file_cut_short_is_a_value_error(tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.parquet"
    _one(request=0).build().write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError):
        Events.read(path)


def test_no_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Events.read(tmp_path / "none.parquet")


def test_writing_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.parquet"
    _one(request=1).build().write(path)
    _one(request=2).build().write(path)
    assert Events.read(path).request.tolist() == [2]
