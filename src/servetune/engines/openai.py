"""The OpenAI wire form that all engines share: request bodies out, streamed chunks in."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from servetune.engines.endpoint import Dialect
from servetune.events import Kind
from servetune.traffic import Prompt


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of a window asks for.

    output_tokens   tokens to generate; exactly, when `exact` and the engine can
    extra           fields added to each body as they are
    """

    model: str
    output_tokens: int | None = None
    exact: bool = False
    temperature: float | None = None
    seed: int | None = None
    api: str | None = None
    extra: dict[str, Any] = {}


def body(prompt: Prompt, ask: Ask, dialect: Dialect) -> tuple[str, bytes]:
    """Path below the base and JSON body of one request.

    Only fields that the engine knows are sent: some servers refuse a request for one unknown field.
    """
    api = ask.api or prompt.api
    fields: dict[str, Any] = {"model": ask.model, "stream": True}
    if api == "chat":
        fields["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
    else:
        fields["prompt"] = prompt.text if prompt.ids is None else prompt.ids
    limit = ask.output_tokens or prompt.max_tokens
    if limit is not None:
        fields["max_tokens"] = limit
        if ask.exact:
            fields |= {"ignore_eos": True} if dialect.ignore_eos else {}
            fields |= {"min_tokens": limit} if dialect.min_tokens else {}
    if ask.temperature is not None:
        fields["temperature"] = ask.temperature
    if ask.seed is not None:
        fields["seed"] = ask.seed
    if dialect.include_usage:
        options = {"include_usage": True}
        fields["stream_options"] = options | (
            {"continuous_usage_stats": True} if dialect.running_usage else {}
        )
    for name in dialect.count_fields:
        fields[name] = True
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    return path, msgspec.json.encode(fields | ask.extra)


NO_ERROR = msgspec.Raw(b"")

Count = Annotated[int, msgspec.Meta(lt=2**31)]
"""Tokens or steps; what is larger is no count."""


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    function: Function | None = None


class Delta(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None

    def content_of(self) -> tuple[Kind, str]:
        """What the delta carried and its text."""
        kind, parts = Kind.EMPTY, []
        if thought := self.reasoning_content or self.reasoning:
            kind = Kind.REASONING
            parts.append(thought)
        for call in self.tool_calls or ():
            if call.function is not None and (call.function.name or call.function.arguments):
                kind = Kind.TOOL_CALL
                parts.append((call.function.name or "") + (call.function.arguments or ""))
        if visible := self.content or self.refusal:
            kind = Kind.TEXT
            parts.append(visible if isinstance(visible, str) else _joined(visible))
        return kind, "".join(parts)


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: Count | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Timings(msgspec.Struct, gc=False):
    """llama.cpp: counts so far in each chunk (`timings_per_token`), all of them in the last."""

    predicted_n: Count | None = None
    cache_n: Count | None = None
    draft_n: Count | None = None
    draft_n_accepted: Count | None = None


class SpeculationMetrics(msgspec.Struct, gc=False):
    """vLLM with `--per-request-spec-decode-metrics`."""

    num_spec_steps: Count | None = None
    num_accepted_draft_tokens: Count | None = None


class RequestMetrics(msgspec.Struct, gc=False):
    speculative_decoding: SpeculationMetrics | None = None


class Chunk(msgspec.Struct, gc=False):
    """One streamed chunk, or a whole reply that was not streamed."""

    choices: list[Choice] | None = []
    usage: Usage | None = None
    timings: Timings | None = None
    metrics: RequestMetrics | None = None
    error: msgspec.Raw = NO_ERROR
    message: str | None = None

    @property
    def failure(self) -> str | None:
        """The server's words when this is an error, else None."""
        if self.error and bytes(self.error) != b"null":
            return error_words(bytes(self.error))
        return self.message if not self.choices else None

    @property
    def generated(self) -> int | None:
        """Tokens generated up to and including this chunk, where the server tells, else None."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return self.timings.predicted_n if self.timings is not None else None

    def content(self) -> tuple[Kind, str]:
        """What the chunk carried and its text; visible text wins over reasoning beside it."""
        kind, parts = Kind.EMPTY, []
        for choice in self.choices or ():
            if choice.text:
                kind = Kind.TEXT
                parts.append(choice.text)
            if (delta := choice.delta or choice.message) is not None:
                found, text = delta.content_of()
                kind = found if found is Kind.TEXT else kind or found
                parts.append(text)
        return kind, "".join(parts)


def _joined(parts: list[Any]) -> str:
    return "".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))


_decoder = msgspec.json.Decoder(Chunk)
decode = _decoder.decode
"""Chunk of a JSON text in bytes. Raises msgspec.DecodeError (ValidationError for a wrong shape)."""
decode_lines = _decoder.decode_lines
"""Chunks of JSON texts, one a line: the same at once, for speed."""


def error_words(text: bytes) -> str:
    """The message in an error body of any of the usual shapes, else its first characters."""
    words: Any
    try:
        words = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        words = None
    for name in ("error", "message", "detail"):
        if isinstance(words, dict) and name in words:
            words = words[name]
    if not isinstance(words, str):
        words = text.decode("utf-8", "replace")
    return " ".join(words.split())[:300]
