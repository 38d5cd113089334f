"""What a store says of its contents, and what its names are at the top level."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small_stores import config, identity, put, tokens_of

import kvstore
from kvstore import Hit, KVLayout, KVStore, ModelIdentity, StoreNotFound, errors, stored_identity
from kvstore.core.keys import NamespaceDigest, namespace_digest
from kvstore.stored import stored_bytes


def test_the_inventory_names_every_sequence_and_what_they_share(tmp_path: Path) -> None:
    base = tokens_of(1, 8)
    fork = np.concatenate([base, tokens_of(2, 6)])
    other = np.concatenate([base, tokens_of(3, 3)])
    with KVStore(tmp_path, identity(), config()) as store:
        for tokens in (base, fork, other):
            put(store, tokens)
        put(store, base, namespace=b"a", ttl=1000.0, pin=True)
        store.flush()
        found = store.inventory()
        assert [(len(s.tokens), s.blocks) for s in found.sequences] == [(14, 4), (11, 3), (8, 2)]
        assert found.sequences[0].tokens.tolist() == fork.tolist()
        apart = found.sequences[2]
        assert apart.namespace == namespace_digest(b"a")
        assert apart.pinned
        assert apart.expires > time.time()
        assert [(p.tokens.tolist(), p.sequences, p.saved_tokens) for p in found.prefixes] == [(base.tolist(), 2, 8)]
        assert sum(use.records for use in found.codecs.values()) == len(store) == 7
        assert sum(use.bytes for use in found.codecs.values()) == store.stats()["disk"]["bytes"]
        assert store.get(base, namespace=apart.namespace).tokens == 8  # type: ignore[union-attr]
    with KVStore(tmp_path, identity(), config(), read_only=True) as reader:
        assert [s.tokens.tolist() for s in reader.inventory().sequences] == [s.tokens.tolist() for s in found.sequences]


def test_a_sequence_is_in_the_store_if_all_of_it_is(tmp_path: Path) -> None:
    with KVStore(tmp_path, identity(), config()) as store:
        assert store
        assert len(store) == 0
        put(store, tokens_of(1, 6))
        assert tokens_of(1, 6) in store
        assert tokens_of(1, 5) in store
        assert tokens_of(1, 7) not in store


def test_a_batch_of_one_is_a_sequence(tmp_path: Path) -> None:
    tokens = tokens_of(1, 6)
    with KVStore(tmp_path, identity(), config()) as store:
        put(store, tokens)
        assert store.contains(torch.from_numpy(tokens.astype(np.int64))[None]) == 6
        assert store.put(tokens[None], store.get(tokens).cache()).new_tokens == 0  # type: ignore[union-attr]


def test_a_store_says_whose_it_is(tmp_path: Path) -> None:
    named = ModelIdentity("m", "1", "00", "", KVLayout.uniform(2, 1, 4, rope='{"theta": 1}'))
    KVStore(tmp_path / "s", named, config()).close()
    assert stored_identity(tmp_path / "s") == named
    KVStore(tmp_path / "s", ModelIdentity("m", "1", "00", "later", named.layout), config()).close()
    assert stored_identity(tmp_path / "s").tokenizer == "later"
    assert stored_bytes(tmp_path / "s") > 0
    (tmp_path / "empty").mkdir()
    for missing in ("empty", "none"):
        with pytest.raises(StoreNotFound, match="name the folder of a store"):
            stored_identity(tmp_path / missing)


def test_a_digest_of_a_namespace_has_32_bytes() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        namespace_digest(NamespaceDigest(b"short"))


def test_every_error_is_at_the_top_level() -> None:
    raised = {
        name for name, each in vars(errors).items() if isinstance(each, type) and each.__module__ == errors.__name__
    }
    assert raised <= set(kvstore.__all__)
    assert all(getattr(kvstore, name) is getattr(errors, name) for name in raised)
    assert kvstore.__version__


def test_a_hit_prints_no_tensors() -> None:
    layers = ((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),)
    assert "tensor" not in repr(Hit(tokens=3, tiers={"disk": 3}, seconds=0.001, layers=layers))
