"""Prompts from lines of text, JSON lines and chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.integrations.transformers.prompts import format_of, read_prompts


class Letters:
    """A tokenizer of letters, with a chat template."""

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        more = "".join(f"[{tool}]" for tool in options.get("tools", ()))
        return [ord(letter) for letter in more + text + "<assistant>" * options["add_generation_prompt"]]


def read(form: str, *rows: Any) -> list[str]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return ["".join(map(chr, ids)) for ids in read_prompts(lines, Letters(), form)]


def test_each_line_of_text_is_a_prompt() -> None:
    assert read("text", "one\n", "", "  ", "two") == ["one", "two"]


def test_templates_are_filled_with_every_combination() -> None:
    row = {"template": "{a}|{b}|{c} {unknown}", "parts": {"a": ["1", "2"], "b": ["{a}"], "c": ["x", "y"]}}
    assert read("jsonl", row) == [f"{a}|{{a}}|{c} {{unknown}}" for a in "12" for c in "xy"]
    assert read("jsonl", {"prompt": "as {it} is"}, {"tokens": [65, 66]}) == ["as {it} is", "AB"]


def test_chats_go_through_the_template() -> None:
    row = {
        "messages": [{"role": "system", "content": "be {how}"}, {"role": "user", "content": "hi"}],
        "parts": {"how": ["kind", "brief"]},
    }
    want = [f"<system>be {how}<user>hi<assistant>" for how in ("kind", "brief")]
    assert read("chat", row) == want
    assert read("chat", {**row, "add_generation_prompt": False, "tools": ["t"]})[0] == "[t]<system>be kind<user>hi"


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("yaml", "a", "format: expected one of text, jsonl, chat"),
        ("jsonl", "{", "line 1: is not JSON \\(.*in the format text a prompt"),
        ("jsonl", {"messages": []}, 'line 1: expected a text as "prompt".*; for "messages" the format is chat'),
        ("jsonl", "[1]", "line 1: expected an object, found list"),
        ("jsonl", {"other": 1}, 'line 1: expected a text as "prompt"'),
        ("jsonl", {"tokens": []}, "line 1: tokens: expected at least one token"),
        ("jsonl", {"tokens": "ab"}, "line 1: tokens"),
        ("jsonl", {"template": "{a}", "parts": {"a": "text"}}, "line 1: parts: expected a list of texts"),
        ("jsonl", {"template": "{a}", "parts": {"a": []}}, "line 1: parts: expected a list of texts"),
        ("chat", {"messages": "hi"}, 'line 1: expected a list of objects as "messages"'),
    ],
)
def test_a_line_that_does_not_fit_is_named(form: str, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        read(form, row)


def test_the_file_is_named_with_the_line() -> None:
    with pytest.raises(ValueError, match=r"^harbour\.txt, line 2: is not JSON"):
        list(read_prompts(['{"prompt": "a"}', "a harbour"], Letters(), "jsonl", "harbour.txt"))


def test_the_format_follows_from_the_ending_and_json_is_not_taken_for_text() -> None:
    line = '{"prompt": "a"}'
    assert [format_of(name, [line]) for name in ("a.jsonl", "a.JSON", "b.ndjson")] == ["jsonl"] * 3
    assert format_of("a.txt", [line, "", "{a"]) == format_of("a.txt", []) == format_of("a", ["[1]"]) == "text"
    with pytest.raises(ValueError, match=r"a\.txt: each line is a JSON object; give --format jsonl or chat"):
        format_of("a.txt", [line, "", f" {line}\r"])
