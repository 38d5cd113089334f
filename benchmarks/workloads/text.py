"""The text that workloads are cut from, in tokens."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conversations import held_out_conversations, held_out_text

CHARACTERS = 8  # more than a token has, on average
END = "<|im_end|>\n"
# Of conversations that are cut from a file: turns, tokens of a question, tokens of an answer.
TURNS, QUESTION, ANSWER = 6, 50, 110

Turn = tuple[list[int], list[int]]
"""What the user says and what is answered, each with its markup."""


class Text:
    """Running text and conversations; what was taken does not come again until `rewind`.

    By default ShareGPT's conversations for tests, every fourth, which no benchmark calibrates with. path: a text file,
    of which conversations are made by cutting. tokens: how much running text there is to be. Pieces are encoded on
    their own and joined as tokens, as a program does that has a cache of what came before.
    """

    def __init__(self, tokenizer: Any, path: Path | None, tokens: int) -> None:
        self._tokenizer, self._path = tokenizer, path
        words = held_out_text(tokens * CHARACTERS) if path is None else path.read_text(errors="replace")
        self._running = self.ids(words[: tokens * CHARACTERS])
        self.rewind()

    def rewind(self) -> None:
        self._at = 0
        self._dialogues = self._conversations()

    def ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, verbose=False).input_ids]

    def message(self, role: str, content: list[int]) -> list[int]:
        """One message in ChatML's markup; other models read it as text."""
        return self.ids(f"<|im_start|>{role}\n") + content + self.ids(END)

    def system(self, prompt: str) -> list[int]:
        return self.message("system", self.ids(prompt))

    def take(self, count: int) -> list[int]:
        """The next `count` tokens of running text. Ends the program where there are too few."""
        found = self._running[self._at : self._at + count]
        if len(found) < count:
            raise SystemExit(f"the text has {len(self._running)} tokens: too few, {self._at + count} are needed")
        self._at += count
        return found

    def dialogue(self) -> list[Turn]:
        """The turns of the next conversation, at least three."""
        found = next(self._dialogues, None)
        if found is None:
            raise SystemExit("there are too few conversations")
        return found

    def _conversations(self) -> Iterator[list[Turn]]:
        if self._path is not None:
            for _ in itertools.count():
                yield [self._turn(self.take(QUESTION), self.take(ANSWER)) for _ in range(TURNS)]
        with contextlib.closing(held_out_conversations()) as source:
            for turns in source:
                said = [self.ids(turn["content"]) for turn in turns]
                yield [self._turn(*pair) for pair in zip(said[::2], said[1::2], strict=False)]

    def _turn(self, question: list[int], answer: list[int]) -> Turn:
        return self.message("user", question), self.message("assistant", answer)
