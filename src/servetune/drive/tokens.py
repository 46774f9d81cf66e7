"""How many tokens each chunk of an answer carried, and from which source that is known.

Order of trust: token ids in the chunks, running totals in the chunks, the total at the end split by
a tokenizer, a tokenizer alone, the number of chunks. Sums of re-encoded pieces are never used: the
pieces of a text tokenize differently from the text (P-14).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from servetune.events import MISSING, UNKNOWN_TOKENS, Kind, TokenSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Piece(NamedTuple):
    """One event of an answer: what it carried, token ids in it (-1: no such field), tokens generated
    up to and including it by the server's word (-1: not told)."""

    kind: Kind
    text: str
    ids: int
    generated: int


@dataclass(frozen=True)
class Counted:
    """total: tokens of the answer, source: of the total; chunks: tokens of each piece (-1 where not
    known), chunk_source: of those."""

    total: int
    source: TokenSource
    chunks: list[int]
    chunk_source: TokenSource


def count(pieces: list[Piece], total: int, tokenizer: Tokenizer | None) -> Counted:
    """Tokens of an answer. `total` is the server's final count, or -1."""
    carrying = [i for i, piece in enumerate(pieces) if piece.kind]
    by_ids = [piece.ids for piece in pieces]
    if carrying and all(by_ids[i] >= 0 for i in carrying):
        chunks = [max(ids, 0) for ids in by_ids]
        return Counted(total if total >= 0 else sum(chunks), TokenSource.IDS, chunks, TokenSource.IDS)
    if carrying and all(pieces[i].generated >= 0 for i in carrying):
        chunks = _differences(pieces)
        known = total if total >= 0 else max(piece.generated for piece in pieces)
        return Counted(known, TokenSource.USAGE, chunks, TokenSource.USAGE)
    split = _split(pieces, tokenizer) if tokenizer is not None else None
    n = sum(split) if split is not None else MISSING
    one_each = [int(bool(piece.kind)) for piece in pieces]
    unknown = [UNKNOWN_TOKENS if piece.kind else 0 for piece in pieces]
    # the total may hold an end token that no chunk shows
    if total >= 0:
        if carrying and total - len(carrying) in (0, 1):
            return Counted(total, TokenSource.USAGE, one_each, TokenSource.CHUNKS)
        if split is not None and total - n in (0, 1):
            return Counted(total, TokenSource.USAGE, split, TokenSource.TOKENIZER)
        return Counted(total, TokenSource.USAGE, unknown, TokenSource.NONE)
    if split is not None:
        if n == len(carrying):
            return Counted(n, TokenSource.TOKENIZER, one_each, TokenSource.TOKENIZER)
        return Counted(n, TokenSource.TOKENIZER, unknown, TokenSource.NONE)
    return Counted(len(carrying), TokenSource.CHUNKS, one_each, TokenSource.CHUNKS)


def _differences(pieces: list[Piece]) -> list[int]:
    """Tokens of each piece by the rise of the running total; a total that falls rises by nothing."""
    chunks, before = [], 0
    for piece in pieces:
        rise = max(0, piece.generated - before) if piece.generated >= 0 else 0
        before += rise
        chunks.append(rise)
    return chunks


def _split(pieces: list[Piece], tokenizer: Tokenizer) -> list[int]:
    """Tokens of the whole text, each given to the piece in which its last character came."""
    ends = list(accumulate(len(piece.text) for piece in pieces))
    text = "".join(piece.text for piece in pieces)
    chunks = [0] * len(pieces)
    if not text:
        return chunks
    for _, end in tokenizer.encode(text, add_special_tokens=False).offsets:
        chunks[bisect_left(ends, max(end, 1))] += 1
    return chunks
