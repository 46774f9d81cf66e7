"""Spooled answers → event columns. Runs after the window, never beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from servetune.drive.driver import SCRAPE
from servetune.drive.spool import Record, read_spool
from servetune.drive.stream import Answered, StreamError, events_of
from servetune.drive.tokens import Chunks, count
from servetune.engines import Chunk, Counters, decode, decode_lines, read_counters
from servetune.engines.openai import error_words
from servetune.events import MISSING, Events, EventsBuilder, Failure, Kind, Phase, Status

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from servetune.spec import Target

_SENTINEL = b"[DONE]"
_EMPTY, _TEXT = int(Kind.EMPTY), int(Kind.TEXT)


class Sent(msgspec.Struct, frozen=True):
    """What is known of a prompt's requests without their answers.

    asked   output tokens asked for, or -1; exact: the server was told to give just as many
    input   tokens of the prompt where they are known before sending (token ids), or -1
    """

    asked: int = MISSING
    exact: bool = False
    bucket: str = ""
    input: int = MISSING


class Reply:
    """One answer read: counts, chunks, and how it ended."""

    def __init__(self, record: Record, tokenizer: Tokenizer | None) -> None:
        self.status = MISSING
        self.error = record.head.failure
        self.finish_reason = ""
        self.done = MISSING
        self.chunks = Chunks()
        self.usage_total = self.prompt = self.cached = self.reasoning = MISSING
        self.drafts = self.accepted = MISSING
        self._sentinel = False
        self._streamed = True
        self._keep_text = tokenizer is not None
        self._stamps = record.stamps
        try:
            answered = Answered(record.reads)
            self.status = answered.status
            self._read(answered)
        except StreamError as error:
            self.error = self.error or f"{Failure.BAD_STREAM}: {error}"
        self.counted = count(self.chunks, self.usage_total, tokenizer)
        self._judge()
        if not self._streamed:
            self.chunks = Chunks()
            self.counted = replace(self.counted, chunks=[])

    @property
    def first_byte(self) -> int:
        return self._stamps[0] if self._stamps else MISSING

    def _read(self, answered: Answered) -> None:
        if self.status < 0:
            return
        pieces = answered.decoded()
        if self.status != 200:
            self.error = f"{Failure.HTTP_STATUS}: {self.status} {error_words(b''.join(pieces))}".rstrip()
            return
        if "json" in answered.headers.get("content-type", ""):
            self._streamed = False
            if answered.complete or not self.error:
                self._add([_decoded(b"".join(pieces))], self._stamps[-1:])
                self._sentinel = not self.error
            return
        data, positions = events_of(pieces, answered.owner, complete=answered.complete or not self.error)
        stamps = [self._stamps[position] for position in positions]
        if _SENTINEL in data:
            end = data.index(_SENTINEL)
            self._sentinel = True
            self.done = stamps[end]
            data = data[:end]
        self._add(_decoded_all(data), stamps)

    def _add(self, chunks: Sequence[Chunk | None], stamps: list[int]) -> None:
        """Take in events in order, up to an error; None is an event without data (a keep-alive)."""
        kinds, ids, generated, texts = [], [], [], []
        for chunk in chunks:
            if chunk is None:
                kind, tokens, total, text = _EMPTY, MISSING, MISSING, ""
            elif (chunk.error or chunk.message) and chunk.failure is not None:
                self.error = self.error or f"{Failure.SERVER_ERROR}: {chunk.failure}"
                break
            else:
                kind, tokens, total, text = _EMPTY, MISSING, MISSING, ""
                for choice in chunk.choices or ():
                    if choice.token_ids is not None:
                        tokens = max(tokens, 0) + len(choice.token_ids)
                    if choice.finish_reason is not None:
                        self.finish_reason = choice.finish_reason
                    if choice.delta is not None and type(choice.delta.content) is str:
                        text += choice.delta.content
                if text:
                    kind = _TEXT
                if self._keep_text or not text:
                    kind, text = chunk.content()
                if chunk.usage is not None or chunk.timings is not None or chunk.metrics is not None:
                    if chunk.choices:  # a usage frame brings no token, whatever its total
                        total = _known(chunk.generated, MISSING)
                    self._count(chunk)
            kinds.append(kind)
            ids.append(tokens)
            generated.append(total)
            texts.append(text)
        self.chunks = Chunks(stamps[: len(kinds)], kinds, ids, generated, texts)

    def _count(self, chunk: Chunk) -> None:
        """What the server says of its counts; the last word holds."""
        if (usage := chunk.usage) is not None:
            self.usage_total = _known(usage.completion_tokens, self.usage_total)
            self.prompt = _known(usage.prompt_tokens, self.prompt)
            self.reasoning = _known(usage.reasoning_tokens, self.reasoning)
            if usage.prompt_tokens_details is not None:
                self.cached = _known(usage.prompt_tokens_details.cached_tokens, self.cached)
            if usage.completion_tokens_details is not None:
                self.reasoning = _known(usage.completion_tokens_details.reasoning_tokens, self.reasoning)
        if (timings := chunk.timings) is not None:
            self.cached = _known(timings.cache_n, self.cached)
            self.accepted = _known(timings.draft_n_accepted, self.accepted)
        if chunk.metrics is not None and (told := chunk.metrics.speculative_decoding) is not None:
            self.drafts = _known(told.num_spec_steps, self.drafts)
            self.accepted = _known(told.num_accepted_draft_tokens, self.accepted)

    def _judge(self) -> None:
        """Decide whether the answer is whole. With [DONE] seen, what happened after does not matter."""
        if self._sentinel:
            if not self.error.startswith((Failure.HTTP_STATUS, Failure.BAD_STREAM, Failure.SERVER_ERROR)):
                self.error = ""
        elif not self.error and not self.finish_reason:
            self.error = f"{Failure.TRUNCATED}: neither [DONE] nor a finish_reason"
        if self.done < 0 and not self.error:
            self.done = self._stamps[-1]
        if not self.error and self.counted.total <= 0:
            self.error = f"{Failure.EMPTY}: a 200 without a single token"


def _decoded(text: bytes) -> Chunk:
    try:
        return decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StreamError(f"{error} in {text[:80]!r}") from None


def _decoded_all(data: list[bytes]) -> Sequence[Chunk | None]:
    """Chunk of each event, None for one without data. Raises StreamError for one that can't be read."""
    lines = b"\n".join(data)
    if lines.count(b"\n") == len(data) - 1:  # no data with line breaks: all at once
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            chunks = decode_lines(lines)
            if len(chunks) == len(data):
                return chunks
    return [_decoded(text) if text.strip() else None for text in data]


def _known(value: int | None, otherwise: int) -> int:
    return otherwise if value is None or value < 0 else value


def collect(
    spool: Path,
    prompts: list[Sent],
    *,
    phase: Phase,
    target: Target,
    tokenizer: Tokenizer | None = None,
) -> Events:
    """Event columns of all exchanges in a spool file, in the order they ended.

    Counter readings between the requests of a serial stage give the verify steps of each request.
    """
    builder = EventsBuilder()
    readings: dict[int, Counters] = {}
    order: list[int] = []
    for record in read_spool(spool):
        if record.head.index == SCRAPE:
            readings[len(order)] = _counters(record)
            continue
        order.append(record.head.index)
        _add_row(builder, record, prompts, phase=phase, target=target, tokenizer=tokenizer)
    events = builder.build()
    for row in range(len(order)):
        if events.drafts[row] < 0 and row in readings and row + 1 in readings:
            delta = readings[row + 1].since(readings[row])
            if delta is not None and "drafts" in delta.totals and "accepted_tokens" in delta.totals:
                events.drafts[row] = round(delta.totals["drafts"])
                events.accepted[row] = round(delta.totals["accepted_tokens"])
    return events


def _counters(record: Record) -> Counters:
    try:
        answered = Answered(record.reads)
        return read_counters(b"".join(answered.decoded()).decode("utf-8", "replace"))
    except StreamError:
        return Counters()


def _add_row(
    builder: EventsBuilder,
    record: Record,
    prompts: list[Sent],
    *,
    phase: Phase,
    target: Target,
    tokenizer: Tokenizer | None,
) -> None:
    head = record.head
    prompt = head.index % len(prompts)
    sent = prompts[prompt]
    interrupted = head.failure.startswith(Failure.INTERRUPTED)
    row: dict[str, int | str] = {
        "request": head.index,
        "prompt": prompt,
        "bucket": sent.bucket,
        "phase": Phase.DRAIN if interrupted else phase,
        "scheduled": head.scheduled,
        "sent": head.sent,
        "connect": head.connect,
        "input_tokens": sent.input,
        "asked_tokens": sent.asked,
        "exact_tokens": int(sent.exact),
    }
    if head.sent < 0:
        unsent = head.failure.startswith(Failure.UNSENT)
        status = Status.UNSENT if unsent else Status.FAILED
        builder.add(times=[], tokens=[], kinds=[], status=status, error=target.masked(head.failure), **row)
        return
    reply = Reply(record, tokenizer)
    counted = reply.counted
    builder.add(
        times=reply.chunks.times,
        tokens=counted.chunks,
        kinds=reply.chunks.kinds,
        first_byte=reply.first_byte,
        done=reply.done,
        prompt_tokens=reply.prompt,
        completion_tokens=counted.total,
        cached_tokens=reply.cached,
        reasoning_tokens=reply.reasoning,
        drafts=reply.drafts,
        accepted=reply.accepted,
        http_status=reply.status,
        token_source=counted.source,
        chunk_source=counted.chunk_source,
        finish_reason=reply.finish_reason,
        status=Status.FAILED if reply.error else Status.OK,
        error=target.masked(reply.error),
        **row,
    )
