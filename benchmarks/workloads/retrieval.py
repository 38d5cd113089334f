"""Retrieval: the same passages in other orders and company before another question."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.workloads.arrival import Arrival
from benchmarks.workloads.text import Text

SYSTEM = "Answer the question with what the passages say, and name the passage that you found it in."
QUESTION, FOLLOWING = 32, 256


class Size(NamedTuple):
    """passages: how many there are, of `tokens` each. chosen: of a prompt."""

    passages: int
    tokens: int
    chosen: int
    prompts: int


FULL, QUICK = Size(8, 512, 4, 7), Size(4, 192, 2, 4)


def retrieval(text: Text, quick: bool) -> Iterator[Arrival]:
    """The first prompts show every passage once; the others choose among them. Seeded."""
    size = QUICK if quick else FULL
    order = random.Random(0)
    passages = [text.take(size.tokens) for _ in range(size.passages)]
    head, seam = text.system(SYSTEM) + text.ids("<|im_start|>user\n"), text.ids("\n\nPassage:\n")
    asks, answers = text.ids("\n\nQuestion:\n"), text.ids("<|im_end|>\n<|im_start|>assistant\n")
    everything = order.sample(range(size.passages), size.passages)
    seen: set[int] = set()
    for _ in range(size.prompts):
        chosen, everything = everything[: size.chosen], everything[size.chosen :]
        if not chosen:
            chosen = order.sample(range(size.passages), size.chosen)
        body = [token for number in chosen for token in seam + passages[number]]
        prompt = head + body + asks + text.take(QUESTION) + answers
        yield Arrival.of(prompt, seen.issuperset(chosen), text.take(FOLLOWING))
        seen.update(chosen)
