"""A store of caches with windows learns, too: each group of layers from the blocks that have all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import learncases
import pytest
import small_stores
from kvcases import same_kv
from learncases import DIM, HEADS, LENGTH

from kvstore import KVLayout, KVStore, LayerLayout, ModelIdentity
from kvstore.codecs.group_sections import profile_of_group
from kvstore.codecs.profile import Profile
from kvstore.learning import trial

WINDOW = 129  # the last two blocks of a sequence have all of the layers with windows
FULL, SLIDING = LayerLayout(HEADS, DIM, DIM), LayerLayout(HEADS, DIM, DIM, "sliding", WINDOW)
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
LAYOUT = KVLayout((SLIDING, FULL, SLIDING, FULL), "bfloat16", json.dumps(ROPES, sort_keys=True))
IDENTITY = ModelIdentity("windows", "1", "00", "", LAYOUT)
PREDICTIVE = 2


def open_store(path: Path) -> KVStore:
    return KVStore(path, IDENTITY, learncases.config())


def cache_of(tokens: Any, whole: bool) -> learncases.Layers:
    """A sequence's cache, with all tokens or with those that layers keep."""
    full, sliding = (json.dumps(ROPES[kind]) for kind in ("full_attention", "sliding_attention"))
    layers = learncases.kv_of(tokens, ropes=(sliding, full, sliding, full))
    firsts = [0 if whole else layer.first_kept(len(tokens)) for layer in LAYOUT.layers]
    return [(k[:, first:], v[:, first:]) for (k, v), first in zip(layers, firsts, strict=True)]


def fill(store: KVStore, numbers: range, whole: bool) -> None:
    for number in numbers:
        tokens = learncases.tokens_of(number)
        store.put(tokens, cache_of(tokens, whole))
    store.flush()


def comes_back(store: KVStore, numbers: range) -> bool:
    for number in numbers:
        tokens = learncases.tokens_of(number)
        hit = store.get(tokens)
        if hit is None or hit.tokens < LENGTH:
            return False
        if not same_kv([(k[0], v[0]) for k, v in hit.layers], cache_of(tokens, whole=False)):
            return False
    return True


def test_what_is_learned_codes_old_and_new_blocks_of_every_group(tmp_path: Path) -> None:
    path, long = tmp_path / "store", range(50, 52)
    with open_store(path) as store:
        fill(store, range(learncases.ENOUGH), whole=True)
        fill(store, long, whole=False)
        before = store.stats()["disk"]["bytes"]
        status = store.learn()
        assert status.state == "adopted", status
        assert status.after > 1.05 * status.before
        assert store.stats()["disk"]["bytes"] < 0.95 * before
        fill(store, range(60, 61), whole=False)
        assert set(learncases.codecs_on_disk(store)) == {PREDICTIVE}
        assert not {name for name in store.stats()["counters"] if name.startswith(("fallback", "recoding_refused"))}
        small_stores.all_is_well(store, deep=True)
    with open_store(path) as store:
        assert comes_back(store, range(learncases.ENOUGH))
        assert comes_back(store, long)
        assert comes_back(store, range(60, 61))
    (file,) = (path for path in (path / "profiles").iterdir() if path.name != "newest")
    profile = Profile.load(file)
    for number, layers in enumerate((2, 2)):
        part = profile_of_group(profile, number)
        assert len(part.layout.layers) == layers
        assert part.sections == ("levels", "lossless")
        assert len(part.section("lossless")["seen_tokens"]) > 0.9 * learncases.VOCABULARY


def test_a_group_is_learned_from_blocks_that_lack_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts show the last tokens alone of layers with windows: it takes more of them."""
    monkeypatch.setattr(trial, "LEAST_TOKENS", 2 * LENGTH)
    with open_store(tmp_path / "store") as store:
        fill(store, range(learncases.ENOUGH), whole=False)
        status = store.learn()
        assert (status.state, status.blocks) == ("waiting", 0)
        fill(store, range(learncases.ENOUGH, 2 * learncases.ENOUGH), whole=False)
        status = store.learn()
        assert status.state == "adopted", status
        assert comes_back(store, range(2 * learncases.ENOUGH))


def test_states_are_not_learned(tmp_path: Path) -> None:
    layout = KVLayout((FULL,), "bfloat16", places=(1,), model_layers=2, states=(0,))
    with KVStore(tmp_path, ModelIdentity("states", "1", "00", "", layout), learncases.config()) as store:
        assert store.learning.state == "unsuited"
        assert "without states" in store.learning.why
