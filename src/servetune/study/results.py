"""The files of a bench: `bench.json`, and one Parquet file of events a load point."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from servetune.events import Events
from servetune.measure import SCHEMA, Bench, measure
from servetune.spec import Load, Slo, SpecError


def prepare_folder(folder: Path) -> None:
    """Make the folder. Raises SpecError when it can't be written or holds another bench."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--out {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise SpecError(f"--out {folder}: not writable")
    if (folder / "bench.json").exists():
        raise SpecError(f"--out {folder}: holds a bench already; choose another folder")


def events_file(folder: Path, load: str) -> Path:
    name = load.replace("=", "-").replace(",", "_")
    return folder / f"events-{name}.parquet"


def save_events(folder: Path, load: Load, events: Events) -> None:
    events.about = {"load": str(load)}
    events.write(events_file(folder, str(load)))


def encode_bench(result: Bench) -> bytes:
    """Readable JSON of a bench, in the form of docs/schema/bench.json."""
    return msgspec.json.format(msgspec.json.encode(result)) + b"\n"


def save_bench(folder: Path, result: Bench) -> None:
    unfinished = folder / "bench.json.part"
    unfinished.write_bytes(encode_bench(result))
    unfinished.replace(folder / "bench.json")


def remeasure(folder: Path) -> Bench:
    """Compute every figure of a bench again from its event files. Raises SpecError."""
    try:
        stored = msgspec.json.decode((folder / "bench.json").read_bytes(), type=Bench)
    except (OSError, msgspec.MsgspecError) as error:
        raise SpecError(f"{folder} is not a bench folder: {error}") from None
    if stored.schema != SCHEMA:
        raise SpecError(f"{folder} is in format '{stored.schema}', this servetune reads {SCHEMA}")
    windows = []
    for old in stored.windows:
        try:
            events = Events.read(events_file(folder, old.load))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(f"{events_file(folder, old.load)}: {error}") from None
        slo = Slo.parse(old.slo) if old.slo else Slo()
        windows.append(measure(events, Load.parse(old.load), old.client, old.server, slo))
    return msgspec.structs.replace(stored, windows=windows)
