"""Raw answers on disk, one record an exchange, so that memory stays flat and a kill loses little.

A file is a sequence of records: four bytes of length (little endian), then msgpack.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from servetune.drive.connection import Exchange


class Record(msgspec.Struct, array_like=True):
    """An ended exchange. stamps: int64 ns, one a read; sizes: uint32 bytes, one a read."""

    index: int
    scheduled: int
    sent: int
    connect: int
    ended: int
    failure: str
    stamps: bytes
    sizes: bytes
    raw: bytes

    def reads(self) -> tuple[list[int], list[bytes]]:
        """Arrival (ns) and bytes of each read."""
        stamps, sizes = array("q", self.stamps), array("I", self.sizes)
        reads, start = [], 0
        for size in sizes:
            reads.append(self.raw[start : start + size])
            start += size
        return list(stamps), reads


class Spool:
    """Appends exchanges to a file; each is written when it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, exchange: Exchange) -> None:
        reads = exchange.reads
        record = Record(
            exchange.index,
            exchange.scheduled,
            exchange.sent,
            exchange.connect,
            exchange.ended,
            exchange.failure,
            exchange.stamps.tobytes(),
            array("I", map(len, reads)).tobytes(),
            b"".join(reads),
        )
        reads.clear()
        encoded = self._encoder.encode(record)
        self._file.write(len(encoded).to_bytes(4, "little") + encoded)

    def close(self) -> None:
        self._file.close()


def read_spool(path: Path) -> Iterator[Record]:
    """All whole records of a file; one that a killed worker left unfinished ends the reading."""
    decoder = msgspec.msgpack.Decoder(Record)
    with io.BufferedReader(io.FileIO(path)) as file:
        while len(head := file.read(4)) == 4:
            size = int.from_bytes(head, "little")
            encoded = file.read(size)
            if len(encoded) < size:
                return
            yield decoder.decode(encoded)
