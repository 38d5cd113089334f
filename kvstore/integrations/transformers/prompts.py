"""Prompts from the lines of a file: plain text, JSON objects with templates, or chats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.core.tokens import as_tokens

FORMATS = ("text", "jsonl", "chat")
_ENDINGS = (".jsonl", ".ndjson", ".json")


def format_of(name: str, lines: Iterable[str]) -> str:
    """Return the format of a file of prompts that nobody named: "jsonl" if it ends in .jsonl, .ndjson or .json, else
    "text".

    Args:
        name: of the file.
        lines: of the file.

    Raises:
        ValueError: the ending says text, and each line is a JSON object.

    Example:
        >>> format_of("prompts.jsonl", []), format_of("prompts.txt", ["a prompt"])
        ('jsonl', 'text')
    """
    if name.lower().endswith(_ENDINGS):
        return "jsonl"
    full = [line for line in lines if line.strip()]
    if full and all(map(_is_object, full)):
        raise ValueError(
            f"{name}: each line is a JSON object; give --format jsonl or chat, or text if the objects themselves are "
            "the prompts"
        )
    return "text"


def _is_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_prompts(lines: Iterable[str], tokenizer: Any, form: str = "text", name: str = "") -> Iterator[list[int]]:
    """Yield the token ids of every prompt.

    Args:
        lines: of the file.
        tokenizer: of the model.
        form: "text": each line is a prompt. "jsonl": each line is an object with "prompt", a text; or "tokens", ids; or
            "template", a text with names in braces, with "parts", the texts for each name: all combinations are
            prompts. "chat": each line is an object with "messages", for the tokenizer's chat template, and "parts" as
            above for their contents; "tools" and "add_generation_prompt" (true if it is not there) go to the template.
        name: of the file, for what is raised.

    Raises:
        ValueError: names the line that does not fit.

    Example:
        >>> class Letters:
        ...     def __call__(self, text):
        ...         return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})
        >>> line = '{"template": "{a}-{b}", "parts": {"a": ["x", "y"], "b": ["1"]}}'
        >>> [bytes(ids).decode() for ids in read_prompts([line], Letters(), "jsonl")]
        ['x-1', 'y-1']
    """
    if form not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, found {form!r}")
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        try:
            if form == "text":
                yield _ids(tokenizer(text).input_ids)
                continue
            yield from (_chats if form == "chat" else _rows)(_object(text, form), tokenizer)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{name}{', ' if name else ''}line {number}: {error}") from error


def _object(line: str, form: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"is not JSON ({error}); in the format {form} each line is a JSON object, in the format text a prompt"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    return row


def _rows(row: Mapping[str, Any], tokenizer: Any) -> Iterator[list[int]]:
    if "tokens" in row:
        yield _ids(row["tokens"])
        return
    text = row.get("template", row.get("prompt"))
    if not isinstance(text, str):
        chat = '; for "messages" the format is chat' if "messages" in row else ""
        raise ValueError(f'expected a text as "prompt" or "template", or ids as "tokens"{chat}')
    for values in combinations(row.get("parts", {})):
        yield _ids(tokenizer(filled(text, values)).input_ids)


def _chats(row: Mapping[str, Any], tokenizer: Any) -> Iterator[list[int]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('expected a list of objects as "messages"')
    more = {"tools": row["tools"]} if row.get("tools") else {}
    for values in combinations(row.get("parts", {})):
        chat = [{**message, "content": _content(message.get("content"), values)} for message in messages]
        found = tokenizer.apply_chat_template(
            chat, add_generation_prompt=bool(row.get("add_generation_prompt", True)), tokenize=True, **more
        )
        yield _ids(found["input_ids"] if hasattr(found, "keys") else found)


def _content(content: Any, values: Mapping[str, str]) -> Any:
    return filled(content, values) if isinstance(content, str) else content


def combinations(parts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield a value for each name, in every combination; one without names if there are none. Raises `ValueError`.

    Example:
        >>> list(combinations({"a": ["x", "y"]}))
        [{'a': 'x'}, {'a': 'y'}]
    """
    if not isinstance(parts, Mapping) or not all(
        isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts)
        for texts in parts.values()
    ):
        raise ValueError('parts: expected a list of texts for each name, such as {"document": ["...", "..."]}')
    for values in itertools.product(*parts.values()):
        yield dict(zip(parts, values, strict=True))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its names in braces replaced; what was put in is not looked at again.

    Example:
        >>> filled("{a} {b} {c}", {"a": "{b}", "b": "2"})
        '{b} 2 {c}'
    """
    pieces, begin = [], 0
    while begin < len(text):
        found = [(at, name) for name in values if (at := text.find("{" + name + "}", begin)) >= 0]
        if not found:
            break
        at, name = min(found)
        pieces += [text[begin:at], values[name]]
        begin = at + len(name) + 2
    return "".join([*pieces, text[begin:]])


def _ids(ids: Any) -> list[int]:
    found: list[int] = as_tokens(ids).tolist()
    return found
