"""The tasks benchmark: its questions, and how it asks them behind a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmodules import load
from tiny_models import VOCABULARY, tiny

tasks, recall = load("tasks"), load("workloads.recall")
data = load("peers.quality.data")


class Words:
    """A tokenizer with a token a word, space and line ends included in what follows them; ids as they come."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        words = text.replace("\n", " \n ").replace(".", " . ").replace(":", " : ").split(" ")
        return SimpleNamespace(input_ids=[self._ids.setdefault(w, len(self._ids)) for w in words if w])

    def text(self, ids: Any) -> str:
        names = {number: word for word, number in self._ids.items()}
        return " ".join(names[i] for i in ids)


WORDS = Words()
HAY = WORDS(" ".join(f"hay{i % 50}" for i in range(3000))).input_ids
RECALL = recall.Recall(WORDS, HAY)


@pytest.mark.parametrize("task", ["needle", "needles", "pairs"])
def test_texts_are_as_long_as_asked_for_and_hold_each_answer_once(task: str) -> None:
    for case in RECALL.cases(task, 400, 3):
        assert len(case.text) == 400
        text = WORDS.text(case.text)
        assert len(case.questions) == {"needle": 1, "needles": recall.NEEDLES, "pairs": recall.ASKED}[task]
        for question in case.questions:
            asked, (right, *wrong) = WORDS.text(question.prompt), (WORDS.text([i]) for i in question.answers)
            assert text.count(f"{asked} {right}") == 1
            assert len({right, *wrong}) == recall.CHOICES
            assert task == "needle" or all(f" {word} " in text for word in wrong)


def test_one_needle_is_at_another_depth_in_every_text_and_texts_come_again() -> None:
    depths = [WORDS.text(case.text).index("password") / 2400 for case in RECALL.cases("needle", 400, 4)]
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] > 0.4
    assert list(RECALL.cases("pairs", 300, 2)) == list(RECALL.cases("pairs", 300, 2))


@torch.inference_mode()
def test_a_cache_is_as_it_was_after_questions() -> None:
    model = tiny("llama")
    ids = torch.arange(60) * 7 % VOCABULARY
    asked = tasks.Asked(model, data.prefill(model, ids[:-1]))
    first = asked.logits([int(ids[-1]), 3, 4])
    said = asked.greedy(int(ids[-1]), 5)
    assert torch.equal(asked.logits([int(ids[-1]), 3, 4]), first)
    whole = model(torch.cat([ids, torch.tensor([3, 4])])[None]).logits[0, -3:]
    assert torch.allclose(first, whole, atol=1e-4)
    assert said[0] == int(first[0].argmax())


class Lossless:
    def code(self, tokens: torch.Tensor, pairs: Any, start: int) -> Any:
        assert (start, len(tokens)) == (tasks.SINKS, pairs[0][0].shape[1])
        return [(k.clone(), v.clone()) for k, v in pairs], 1000


class Zero(Lossless):
    def code(self, tokens: torch.Tensor, pairs: Any, start: int) -> Any:
        return [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in pairs], 1


def test_what_loses_nothing_answers_as_the_exact_cache_and_what_loses_all_does_not() -> None:
    model = tiny("llama")
    chance = torch.Generator().manual_seed(1)
    text = tuple(torch.randint(0, VOCABULARY, (200,), generator=chance).tolist())
    questions = tuple(recall.Question((i, i + 1), (i, i + 1, i + 2, i + 3)) for i in range(4))
    methods = {"lossless": Lossless(), "zero": Zero()}
    scores = {name: tasks.Score() for name in (tasks.EXACT, *methods)}
    tasks.run(model, recall.Case(text, questions), methods, scores)
    tasks.run(model, recall.Case(text, ()), methods, scores)
    assert scores["lossless"].values == scores[tasks.EXACT].values
    assert scores["zero"].values["logp"] != scores[tasks.EXACT].values["logp"]
    assert scores[tasks.EXACT].values["agreement"] == [1.0]
    assert scores[tasks.EXACT].values["identical"] == [tasks.NEW]
    values = (200 - 1 - tasks.RECENT - tasks.SINKS) * 3 * 2 * 2 * 16
    assert scores["lossless"].coded == [2000, 2 * values]
