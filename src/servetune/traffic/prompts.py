"""Prompts of a file: OpenAI-form JSON lines, or plain text, one prompt a line."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from servetune.spec import SpecError

_SHOWN = 5
_TOO_MANY = 2**31


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. Exactly one of `messages` (chat), `text` and `ids` (completions) is given.

    max_tokens  output tokens the row itself asks for, or None
    bucket      slice of traffic for separate figures, or ""
    """

    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    bucket: str = ""

    @property
    def api(self) -> str:
        return "completions" if self.messages is None else "chat"

    @property
    def label(self) -> str:
        """The first words, for a table on the user's own terminal."""
        if self.ids is not None:
            return f"{len(self.ids)} token ids"
        text = self.text
        if self.messages is not None:
            text = next((_text(m) for m in reversed(self.messages) if m.get("role") == "user"), "")
        return " ".join((text or "").split())


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(str(p.get("text", "")) for p in parts if isinstance(p, dict))


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a `.jsonl` or `.txt` file, in order.

    A JSON row has `messages`, or `prompt` (text or token ids), and optionally `max_tokens` and
    `bucket`; other fields are ignored. Raises SpecError naming every bad line; nothing is dropped.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"traffic {path}: {error}") from None
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".txt":
        return _some([Prompt(text=line.strip()) for _, line in lines], path)
    prompts: list[Prompt] = []
    bad: list[str] = []
    for number, line in lines:
        try:
            prompts.append(_row(line))
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        shown = "\n  ".join(bad[:_SHOWN])
        raise SpecError(f"traffic {path}: {len(bad)} of {len(lines)} rows are not prompts\n  {shown}{more}")
    return _some(prompts, path)


def _some(prompts: list[Prompt], path: Path) -> list[Prompt]:
    if not prompts:
        raise SpecError(f"traffic {path}: no prompts in this file")
    return prompts


def _row(line: str) -> Prompt:
    row = msgspec.json.decode(line, type=dict[str, Any])
    limit = row.get("max_tokens", row.get("max_completion_tokens"))
    if limit is not None and (type(limit) is not int or not 1 <= limit < _TOO_MANY):
        raise ValueError(f"max_tokens must be a whole number from 1 to {_TOO_MANY - 1}, not {limit!r}")
    bucket = str(row.get("bucket", ""))
    if ("messages" in row) == ("prompt" in row):
        raise ValueError("a row needs either 'messages' or 'prompt'")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("'messages' must be a list of at least one message")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError("each message needs a 'role' and a 'content'")
        return Prompt(messages=tuple(messages), max_tokens=limit, bucket=bucket)
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        return Prompt(text=prompt, max_tokens=limit, bucket=bucket)
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < _TOO_MANY for i in prompt):
        return Prompt(ids=tuple(prompt), max_tokens=limit, bucket=bucket)
    raise ValueError("'prompt' must be a text or a list of token ids, and not empty")


def warm_up_prompts(prompts: list[Prompt], n: int) -> list[Prompt]:
    """`n` prompts of the measured lengths that share no prefix with the measured ones.

    Words (or ids) in reverse order, so the lengths stay and a prefix cache learns nothing (P-48).
    """
    firsts = {prompt.ids[0] for prompt in prompts if prompt.ids}
    return [_reversed(prompts[i % len(prompts)], i // len(prompts), firsts) for i in range(n)]


def _reversed(prompt: Prompt, turn: int, firsts: set[int]) -> Prompt:
    change: dict[str, Any] = {}
    if prompt.ids is not None:
        change["ids"] = _reversed_ids(prompt.ids, turn, firsts)
    elif prompt.text is not None:
        change["text"] = _reversed_words(prompt.text, turn)
    elif prompt.messages is not None:
        change["messages"] = tuple(_reversed_message(m, turn) for m in prompt.messages)
    return msgspec.structs.replace(prompt, **change)


def _reversed_message(message: dict[str, Any], turn: int) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _reversed_words(content, turn)}
    if isinstance(content, list):  # the first part decides whether a prefix is shared
        return {**message, "content": [{"type": "text", "text": _reversed_words("", turn)}, *content]}
    return message


def _reversed_ids(ids: tuple[int, ...], turn: int, firsts: set[int]) -> tuple[int, ...]:
    """The ids turned round so that they begin with none of `firsts`; if all do, with another id."""
    for shift in range(turn, turn + len(ids)):
        start = shift % len(ids)
        if ids[::-1][start] not in firsts:
            return ids[::-1][start:] + ids[::-1][:start]
    below = (i for i in range(ids[0] - 1, -1, -1) if i not in firsts)
    above = (i for i in range(ids[0] + 1, _TOO_MANY) if i not in firsts)
    return (next(chain(below, above)), *ids[1:])


def _reversed_words(text: str, turn: int) -> str:
    words = text.split()[::-1]
    turn = turn % len(words) if words else 0
    return " ".join(["Warm-up", *words[turn:], *words[:turn]])
