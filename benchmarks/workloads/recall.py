"""Questions about something far back in a text, in forms that a small model can answer: it goes on as that stood there.

Answers are single tokens, so that one look at the prediction after the question tells the likelihood of the right one
and of every wrong one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_WORDS = """
apple bridge candle desert engine forest garden hammer island jacket kitchen ladder market needle ocean pencil river
silver table uncle valley window yellow anchor basket castle doctor eagle finger guitar honey insect jungle lemon mirror
nurse orange planet queen rabbit saddle tiger umbrella village winter bottle carpet dragon ember feather glass harbor
iron jewel king lamp mountain novel olive paper ribbon stone tower
"""
WORDS = tuple(_WORDS.split())
PLACES = ["north", "south", "east", "west", "upper", "lower", "inner", "outer", "old", "new", "hidden", "central"]
DOORS = ["gate", "door", "chest", "drawer", "locker", "cabinet", "safe", "vault", "room", "tunnel", "well", "cellar"]
NEEDLES = 4  # of a text with several
ASKED = 12  # of a list of pairs
CHOICES = 4  # answers to choose from


@dataclass(frozen=True)
class Question:
    """prompt: tokens that follow the text. answers: tokens, the right one first."""

    prompt: tuple[int, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """text: tokens, exactly as many as were asked for."""

    text: tuple[int, ...]
    questions: tuple[Question, ...]


class Recall:
    """Makes cases, the same for the same seed. hay: tokens of real text, at least as many as the longest case."""

    def __init__(self, tokenizer: Any, hay: Sequence[int]) -> None:
        self._tokenizer, self._hay = tokenizer, hay
        self._answers = {word: ids[0] for word in WORDS if len(ids := self._ids(" " + word)) == 1}

    def cases(self, task: str, length: int, count: int) -> Iterator[Case]:
        """task: "needle", "needles" or "pairs"."""
        for number in range(count):
            chance = random.Random(f"{task}/{length}/{number}")
            if task == "pairs":
                yield self._pairs(length, chance)
            else:
                yield self._needles(length, 1 if task == "needle" else NEEDLES, number, count, chance)

    def _needles(self, length: int, needles: int, number: int, count: int, chance: random.Random) -> Case:
        """Needles at depths spread over the text; of one needle, at another depth in every case."""
        words = chance.sample(sorted(self._answers), max(needles, CHOICES))
        names = [f"{place} {door}" for place, door in self._names(needles, chance)]
        facts = [self._ids(f"\nThe password of the {n} is {w}.\n") for n, w in zip(names, words, strict=False)]
        room = length - sum(map(len, facts))
        start = chance.randrange(max(1, len(self._hay) - room))
        hay = list(self._hay[start : start + room])
        depths = [(number + 0.5) / count] if needles == 1 else [(i + 0.5) / needles for i in range(needles)]
        for depth, fact in sorted(zip(depths, facts, strict=True), reverse=True):
            at = int(depth * len(hay))
            hay[at:at] = fact
        prompts = [tuple(self._ids(f"\nThe password of the {name} is")) for name in names]
        return Case(tuple(hay), self._questions(prompts, words, chance))

    def _pairs(self, length: int, chance: random.Random) -> Case:
        """Nothing but lines of a name and a word."""
        lines, answers, text = [], [], self._ids("A list of names and words.\n")
        used: set[str] = set()
        while True:
            name = f"{chance.choice(PLACES)} {chance.choice(WORDS)} {chance.randrange(100)}"
            word = chance.choice(sorted(self._answers))
            line = self._ids(f"{name}: {word}\n")
            if len(text) + len(line) > length:
                break
            if name not in used:
                used.add(name)
                lines.append(name)
                answers.append(word)
                text += line
        text += self._ids("\n") * (length - len(text))
        asked = chance.sample(range(len(lines)), min(ASKED, len(lines)))
        prompts = [tuple(self._ids(f"{lines[i]}:")) for i in asked]
        wrong = [word for word in dict.fromkeys(answers) if word not in {answers[i] for i in asked}]
        return Case(tuple(text), self._questions(prompts, [answers[i] for i in asked] + wrong, chance))

    def _questions(
        self, prompts: Sequence[tuple[int, ...]], words: Sequence[str], chance: random.Random
    ) -> tuple[Question, ...]:
        """The answer to prompt i is word i; wrong ones are other words, of the same text where there are."""
        found = []
        for prompt, word in zip(prompts, words, strict=False):
            others = chance.sample(sorted(set(words) - {word}), CHOICES - 1)
            found.append(Question(prompt, tuple(self._answers[w] for w in (word, *others))))
        return tuple(found)

    def _names(self, count: int, chance: random.Random) -> list[tuple[str, str]]:
        return chance.sample([(place, door) for place in PLACES for door in DOORS], count)

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found
