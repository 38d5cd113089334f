"""Prompts that are computed before they are asked for: each token once, and the store is as if each had been asked."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faultfs import Fault, FaultFS
from threadruns import HANGS_S
from tiny_models import tiny
from warmupcases import CONFIG, facts, holds_what_it_would_compute, product

from kvstore import IdentityMismatch, KVStore, ModelIdentity, TierConfig
from kvstore.core.cache_argument import given_cache
from kvstore.integrations.transformers import get_or_prefill, warmup
from kvstore.integrations.transformers.positions import heeds_positions
from kvstore.integrations.transformers.segments import distinct_tokens, segments_of

WARM = replace(CONFIG, durability="flush")


@pytest.fixture
def store(tmp_path: Path, llama: Any) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(llama), WARM) as opened:
        yield opened


def test_the_segments_of_random_prompts_are_a_tree() -> None:
    chance = random.Random(1)
    for _ in range(50):
        prompts = [[chance.randrange(3) for _ in range(chance.randrange(1, 9))] for _ in range(chance.randrange(1, 20))]
        levels = segments_of(prompts)
        prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
        assert distinct_tokens(levels) == len(prefixes)
        covered: set[tuple[int, ...]] = set()
        ends: set[tuple[int, ...]] = {()}
        for level in levels:
            before = set(ends)
            for segment in level:
                ids = segment.tokens.tolist()
                assert tuple(ids[: segment.start]) in before
                own = {tuple(ids[:end]) for end in range(segment.start + 1, segment.end + 1)}
                assert not own & covered
                covered |= own
                ends.add(tuple(ids))
        assert covered == prefixes
        assert {tuple(s.tokens.tolist()) for level in levels for s in level if s.is_prompt} == set(map(tuple, prompts))


def test_every_prompt_is_stored_and_each_token_computed_once(store: KVStore, llama: Any) -> None:
    prompts = product(2, 3, 4)
    report = warmup(store, llama, prompts)
    assert report.prompts == 24
    assert report.computed_tokens == report.tokens == distinct_tokens(segments_of(prompts))
    assert report.passes < 1 + 2 + 6 + 24
    assert (report.stored_tokens, report.dropped_blocks) == (0, 0)
    assert all(holds_what_it_would_compute(store, llama, prompt) for prompt in prompts)


def test_a_thousand_prompts_of_shared_parts_cost_their_distinct_tokens(store: KVStore, llama: Any) -> None:
    """The row: <= 1.1 times the prefill of the distinct tokens; here by what the model is given, padding included."""
    prompts = product(10, 10, 10, length=5)
    assert heeds_positions(llama)  # which is asked once for each model
    given = []
    hook = llama.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    report = warmup(store, llama, prompts)
    hook.remove()
    assert report.prompts == 1000
    assert report.computed_tokens == report.tokens
    assert report.tokens <= sum(given) <= 1.1 * report.tokens
    assert report.passes == len(given) < 300
    assert len(store.inventory().sequences) == 1000


def test_what_is_stored_is_skipped(store: KVStore, llama: Any) -> None:
    prompts = product(2, 3, 2)
    warmup(store, llama, prompts[:6])
    report = warmup(store, llama, prompts)
    assert report.stored_tokens == distinct_tokens(segments_of(prompts[:6]))
    assert report.stored_tokens + report.computed_tokens == report.tokens
    again = warmup(store, llama, prompts)
    assert (again.passes, again.computed_tokens) == (0, 0)


def test_what_is_stored_in_part_is_counted(store: KVStore, llama: Any) -> None:
    warmup(store, llama, [[7, *range(20, 30)]])
    planned = warmup(store, llama, [[7, *range(40, 60)]], dry_run=True)
    done = warmup(store, llama, [[7, *range(40, 60)]])
    assert (planned.stored_tokens, planned.computed_tokens) == (1, 20)
    assert (done.stored_tokens, done.computed_tokens, done.repeated_tokens) == (1, 20, 0)


def test_what_a_full_disk_drops_is_computed_again_and_counted_apart(tmp_path: Path, llama: Any) -> None:
    fs, looks = FaultFS(Fault("allocate", 1, errno.ENOSPC, sticky=True)), []
    identity = ModelIdentity.from_transformers(llama)
    with KVStore(tmp_path, identity, replace(WARM, host=TierConfig(0)), fs=fs) as full:

        def look(report: Any) -> None:
            full.flush()  # what was put left memory, and the disk did not take it
            looks.append(report.done_tokens)

        report = warmup(full, llama, product(2, 3, 2), progress=look)
        full.close()
    assert report.repeated_tokens > 0
    assert report.computed_tokens - report.repeated_tokens == report.tokens == looks[-1]
    assert looks == sorted(looks)


def test_memory_is_bounded_by_the_tokens_of_a_pass(store: KVStore, llama: Any) -> None:
    sizes = []
    hook = llama.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append((args[0].shape[0], given_cache(kwargs).get_seq_length())),
        with_kwargs=True,
    )
    warmup(store, llama, product(1, 20, length=30), batch_tokens=400)
    hook.remove()
    assert max(rows for rows, _ in sizes) > 1
    assert all(rows * held <= 400 for rows, held in sizes if rows > 1)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_other_kinds_of_layers_are_warmed_up(name: str, tmp_path: Path) -> None:
    model, prompts = tiny(name), product(2, 2, length=25)
    with KVStore(tmp_path, ModelIdentity.from_transformers(model), CONFIG) as store:
        report = warmup(store, model, prompts)
        assert report.computed_tokens == report.tokens
        for prompt in prompts:
            hit = store.get(prompt)
            assert hit is not None
            assert hit.tokens == len(prompt)


def test_a_dry_run_says_what_would_be_done_and_stores_nothing(store: KVStore, llama: Any) -> None:
    prompts = product(2, 2)
    planned = warmup(store, llama, prompts, dry_run=True)
    assert len(store) == 0
    assert planned.seconds > 0
    done = warmup(store, llama, prompts)
    assert (planned.prompts, planned.tokens, planned.computed_tokens, planned.bytes) == (
        done.prompts,
        done.tokens,
        done.computed_tokens,
        done.bytes,
    )
    assert warmup(store, llama, prompts, dry_run=True).seconds == 0.0


def test_progress_is_told_and_an_interrupted_run_goes_on(store: KVStore, llama: Any) -> None:
    prompts, looks = product(2, 3, 2), []

    def stop(report: Any) -> None:
        looks.append(report.computed_tokens)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup(store, llama, prompts, progress=stop)
    assert looks[0] == 0
    assert looks == sorted(looks)
    report = warmup(store, llama, prompts)
    assert report.stored_tokens >= looks[-1] > 0
    assert all(prompt in store for prompt in prompts)


def test_a_run_that_is_killed_ten_times_ends_with_the_same_store(tmp_path: Path) -> None:
    """The same sequences of as many blocks. The last bits of caches may differ: other rows were computed beside."""
    model, prompts = tiny("llama"), product(3, 3, 3)
    passes = ["1", "2", "1", "0", "1", "2", "1", "1", "0", "1"]  # 0: before the first one
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "warmup_child.py"),
        str(tmp_path / "a"),
        *passes,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.split() == ["9"] * 10, done.stderr
    identity = ModelIdentity.from_transformers(model)
    with KVStore(tmp_path / "a", identity, CONFIG) as killed, KVStore(tmp_path / "b", identity, CONFIG) as whole:
        assert len(killed) > 0
        first = warmup(killed, model, prompts, batch_tokens=100)
        assert 0 < first.computed_tokens < first.tokens
        warmup(whole, model, prompts, batch_tokens=100)
        assert facts(killed) == facts(whole)
        assert all(prompt in killed for prompt in prompts)
        assert all(holds_what_it_would_compute(killed, model, prompt) for prompt in prompts)
        assert killed.check(deep=True).ok


def test_pins_and_namespaces_are_those_of_whole_prompts(store: KVStore, llama: Any) -> None:
    prompts = product(1, 2)
    warmup(store, llama, prompts, namespace=b"a", pin=True, ttl=1e6)
    found = store.inventory().sequences
    assert sorted(each.tokens.tolist() for each in found) == sorted(prompts)
    assert all(each.pinned and each.expires for each in found)
    assert store.contains(prompts[0]) == 0


def test_get_or_prefill_computes_what_is_missing(store: KVStore, llama: Any) -> None:
    prompt = product(1, 1, length=30)[0]
    first = get_or_prefill(store, prompt, llama)
    assert (first.tokens, first.reused_tokens) == (len(prompt), 0)
    second = get_or_prefill(store, torch.tensor([[*prompt, 5, 6]]), llama, chunk=1)
    assert (second.tokens, second.reused_tokens) == (len(prompt) + 2, len(prompt))
    assert second.cache.get_seq_length() == len(prompt) + 2
    assert sum(second.tiers.values()) == len(prompt)
    assert holds_what_it_would_compute(store, llama, [*prompt, 5, 6])
    third = get_or_prefill(store, prompt, llama, namespace=b"other")
    assert third.reused_tokens == 0


def test_mistakes_are_told_before_anything_is_computed(store: KVStore, llama: Any) -> None:
    with pytest.raises(ValueError, match="tokens"):
        warmup(store, llama, [[1, 2], [-1]])
    with pytest.raises(IdentityMismatch, match="another identity"):
        warmup(store, tiny("llama", seed=3), [[1, 2]])
    with pytest.raises(ValueError, match="training mode"):
        warmup(store, tiny("llama").train(), [[1, 2]])
    with pytest.raises(IdentityMismatch, match="another identity"):
        get_or_prefill(store, [1, 2], tiny("llama", seed=3))
    assert len(store) == 0
