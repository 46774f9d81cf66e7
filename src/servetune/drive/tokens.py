"""How many tokens each chunk of an answer carried, and from which source that is known.

Order of trust: token ids in the chunks, running totals in the chunks, the total at the end split by
a tokenizer, a tokenizer alone, the number of chunks. Sums of re-encoded pieces are never used: the
pieces of a text tokenize differently from the text (P-14).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from servetune.events import MISSING, UNKNOWN_TOKENS, Kind, TokenSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass
class Chunks:
    """The events of one answer as columns, one entry an event.

    times       arrival, ns
    kinds       Kind
    ids         token ids in it, -1 where it has no such field
    generated   tokens generated up to and including it by the server's word, -1 where not told
    texts       its text; only for a tokenizer, so perhaps without reasoning and tool calls if none counts
    """

    times: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Counted:
    """total: tokens of the answer, source: of the total; chunks: tokens of each piece (-1 where not
    known), chunk_source: of those."""

    total: int
    source: TokenSource
    chunks: list[int]
    chunk_source: TokenSource


def count(chunks: Chunks, total: int, tokenizer: Tokenizer | None) -> Counted:
    """Tokens of an answer. `total` is the server's final count, or -1."""
    kinds = chunks.kinds
    carrying = len(kinds) - kinds.count(Kind.EMPTY)
    if carrying and _told(kinds, chunks.ids):
        by_ids = [max(ids, 0) for ids in chunks.ids]
        return Counted(total if total >= 0 else sum(by_ids), TokenSource.IDS, by_ids, TokenSource.IDS)
    if carrying and _told(kinds, chunks.generated):
        known = total if total >= 0 else max(chunks.generated)
        return Counted(known, TokenSource.USAGE, _differences(chunks.generated), TokenSource.USAGE)
    one_each = [1 if kind else 0 for kind in kinds]
    # the total may hold an end token that no chunk shows
    if carrying and total - carrying in (0, 1):
        return Counted(total, TokenSource.USAGE, one_each, TokenSource.CHUNKS)
    split = None if tokenizer is None else _split(chunks.texts, tokenizer)
    n = MISSING if split is None else sum(split)
    unknown = [UNKNOWN_TOKENS * one for one in one_each]
    if total >= 0:
        if split is not None and total - n in (0, 1):
            return Counted(total, TokenSource.USAGE, split, TokenSource.TOKENIZER)
        return Counted(total, TokenSource.USAGE, unknown, TokenSource.NONE)
    if split is not None:
        if n == carrying:
            return Counted(n, TokenSource.TOKENIZER, one_each, TokenSource.TOKENIZER)
        return Counted(n, TokenSource.TOKENIZER, unknown, TokenSource.NONE)
    return Counted(carrying, TokenSource.CHUNKS, one_each, TokenSource.CHUNKS)


def _told(kinds: list[int], values: list[int]) -> bool:
    """True when every chunk that carries something has a value."""
    return MISSING not in values or all(value >= 0 for kind, value in zip(kinds, values, strict=True) if kind)


def _differences(generated: list[int]) -> list[int]:
    """Tokens of each chunk by the rise of the running total; a total that falls rises by nothing."""
    chunks, before = [], 0
    for total in generated:
        rise = max(0, total - before)
        before += rise
        chunks.append(rise)
    return chunks


def _split(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    """Tokens of the whole text, each given to the chunk in which its last character came."""
    ends = list(accumulate(map(len, texts)))
    text = "".join(texts)
    chunks = [0] * len(texts)
    if not text:
        return chunks
    for _, end in tokenizer.encode(text, add_special_tokens=False).offsets:
        chunks[bisect_left(ends, max(end, 1))] += 1
    return chunks
