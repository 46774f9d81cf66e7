"""Raw answers on disk, one record an exchange, so that memory stays flat and a kill loses little.

A file is a sequence of records: length of the head (four bytes, little endian), the head in msgpack,
then the bytes of the answer as they were read.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from servetune.drive.connection import Exchange

_MOST_PARTS = 1000
"""Buffers of one writev; systems allow 1024."""


class Head(msgspec.Struct, array_like=True):
    """An ended exchange without its bytes. stamps: int64 ns, one a read; sizes: uint32 bytes, one a read."""

    index: int
    scheduled: int
    sent: int
    connect: int
    ended: int
    failure: str
    stamps: bytes
    sizes: bytes


class Record(NamedTuple):
    """An ended exchange: its head, arrival (ns) and bytes of each read."""

    head: Head
    stamps: list[int]
    reads: list[bytes]


class Spool:
    """Appends exchanges to a file; each is written when it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, exchange: Exchange) -> None:
        """Write an exchange and let go of its bytes."""
        reads = exchange.reads
        head = Head(
            exchange.index,
            exchange.scheduled,
            exchange.sent,
            exchange.connect,
            exchange.ended,
            exchange.failure,
            exchange.stamps.tobytes(),
            array("I", map(len, reads)).tobytes(),
        )
        encoded = self._encoder.encode(head)
        self._write([len(encoded).to_bytes(4, "little"), encoded, *reads])
        reads.clear()

    def _write(self, parts: list[bytes]) -> None:
        """Without joining: the parts are copied once, by the kernel."""
        for start in range(0, len(parts), _MOST_PARTS):
            some = parts[start : start + _MOST_PARTS]
            written = os.writev(self._file.fileno(), some)
            if written < sum(map(len, some)):  # such as a disk that fills up
                self._file.write(b"".join(some)[written:])

    def close(self) -> None:
        self._file.close()


def read_spool(path: Path) -> Iterator[Record]:
    """All whole records of a file; one that a killed worker left unfinished ends the reading."""
    decoder = msgspec.msgpack.Decoder(Head)
    with path.open("rb") as file:
        while len(length := file.read(4)) == 4:
            size = int.from_bytes(length, "little")
            encoded = file.read(size)
            if len(encoded) < size:
                return
            head = decoder.decode(encoded)
            sizes = array("I", head.sizes)
            raw = file.read(sum(sizes))
            ends = list(accumulate(sizes))
            if ends and len(raw) < ends[-1]:
                return
            reads = [raw[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            yield Record(head, list(array("q", head.stamps)), reads)
