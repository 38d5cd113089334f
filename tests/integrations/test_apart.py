"""Warm-up in parts: the prompts are cut where little is computed twice, and the merged store is that of one run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny
from warmupcases import CONFIG, facts, holds_what_it_would_compute, product

from kvstore import KVStore, KVStoreError, ModelIdentity
from kvstore.integrations.transformers import WarmupReport, warmup
from kvstore.integrations.transformers.apart import Part, PartWorkers, fill
from kvstore.integrations.transformers.parts import parts_of
from kvstore.integrations.transformers.segments import distinct_tokens, segments_of


class InTurn(PartWorkers):
    """Does the parts one after the other in this process, the last one first, and fails at one."""

    def __init__(self, parts: int, fails: int | None = None) -> None:
        self._parts, self._fails = parts, fails
        self.prompts = list[list[list[int]]]()

    def count(self) -> int:
        return self._parts

    def run(self, parts: Sequence[Part], model: Any) -> Iterator[tuple[str, WarmupReport]]:
        self.prompts = [[tokens.tolist() for tokens in part.prompts] for part in parts]
        for number in reversed(range(len(parts))):
            if number == self._fails:
                raise KVStoreError("a worker is gone")
            yield fill(parts[number], model)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_parts_hold_every_prompt_once_and_are_about_equal(count: int) -> None:
    prompts = product(4, 5, 6)
    parts = parts_of(prompts, count)
    assert 1 <= len(parts) <= count
    assert sorted(tokens.tolist() for part in parts for tokens in part) == sorted(prompts)
    work = [distinct_tokens(segments_of(part)) for part in parts]
    least = distinct_tokens(segments_of(prompts))
    assert sum(work) >= least
    if count <= 7:
        assert len(parts) == count
        assert max(work) <= 1.25 * least / count
        assert sum(work) <= 1.1 * least


def test_cuts_stand_where_prompts_share_least() -> None:
    """Four subtrees in four parts, or in two: nothing is computed twice."""
    prompts = product(4, 3, 3)
    for count in (2, 4):
        parts = parts_of(prompts, count)
        assert sum(distinct_tokens(segments_of(part)) for part in parts) == distinct_tokens(segments_of(prompts))


def test_parts_of_random_prompts() -> None:
    chance = random.Random(0)
    for _ in range(50):
        prompts = [[chance.randrange(3) for _ in range(chance.randrange(9))] for _ in range(chance.randrange(20))]
        parts = parts_of(prompts, chance.randrange(1, 6))
        found = sorted(tuple(tokens.tolist()) for part in parts for tokens in part)
        assert found == sorted({tuple(prompt) for prompt in prompts if prompt})
        assert all(parts)
    with pytest.raises(ValueError, match="at least 1 part"):
        parts_of([[1]], 0)


def test_the_merged_store_is_that_of_one_run(tmp_path: Path, llama: Any) -> None:
    prompts, identity, told = product(3, 3, 3), ModelIdentity.from_transformers(llama), []
    options: dict[str, Any] = {"namespace": b"a", "pin": True, "ttl": 1e6}
    with KVStore(tmp_path / "a", identity, CONFIG) as apart, KVStore(tmp_path / "b", identity, CONFIG) as whole:
        workers = InTurn(4)
        report = warmup(
            apart, llama, prompts, workers=workers, progress=lambda r: told.append(r.computed_tokens), **options
        )
        plain = warmup(whole, llama, prompts, **options)
        assert len(workers.prompts) == 4
        assert (report.prompts, report.tokens, report.dropped_blocks) == (plain.prompts, plain.tokens, 0)
        assert plain.computed_tokens < report.computed_tokens < 1.2 * plain.computed_tokens
        assert told == sorted(told)
        assert told[-1] == report.computed_tokens
        assert facts(apart) == facts(whole)
        assert all(holds_what_it_would_compute(apart, llama, prompt, b"a") for prompt in prompts)
        assert apart.check(deep=True).ok
        again = warmup(apart, llama, prompts, workers=InTurn(4), **options)
        assert (again.stored_tokens, again.computed_tokens) == (report.tokens, 0)
    assert not (tmp_path / "a.parts").exists()


def test_one_part_in_the_same_batches_is_bit_identical(tmp_path: Path) -> None:
    model, prompts = tiny("gpt2"), product(2, 2)
    identity, found = ModelIdentity.from_transformers(model), []
    for name, workers in (("a", InTurn(1)), ("b", None)):
        with KVStore(tmp_path / name, identity, CONFIG) as store:
            warmup(store, model, prompts, workers=workers)
            found.append([store.get(prompt).layers for prompt in prompts])  # type: ignore[union-attr]
    pairs = zip(*(sum((sum(each, ()) for each in layers), ()) for layers in found), strict=True)
    assert all(mine.equal(its) for mine, its in pairs)


def test_what_was_done_before_a_worker_failed_stays(tmp_path: Path, llama: Any) -> None:
    prompts, workers = product(4, 3), InTurn(4, fails=1)
    with KVStore(tmp_path / "a", ModelIdentity.from_transformers(llama), CONFIG) as store:
        with pytest.raises(KVStoreError, match="a worker is gone"):
            warmup(store, llama, prompts, workers=workers)
        assert not (tmp_path / "a.parts").exists()
        assert [all(p in store for p in part) for part in workers.prompts] == [False, False, True, True]
        workers = InTurn(4)
        report = warmup(store, llama, prompts, workers=workers)
        assert sorted(p for part in workers.prompts for p in part) == sorted(prompts)[:6]
        assert report.stored_tokens > 0
        assert all(prompt in store for prompt in prompts)
        assert store.check(deep=True).ok
