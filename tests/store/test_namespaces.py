"""Namespaces share nothing; log-probabilities reach the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcases import kv_of, open_store, put, random_kv, same_kv, tokens

from kvstore import KVStore

# ---- namespaces ----------------------------------------------------------------------------------------------------


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    ids = tokens(20)
    mine, theirs = random_kv(20, seed=1), random_kv(20, seed=2)
    with open_store(tmp_path) as store:
        assert store.put(ids, mine, namespace=b"mine").new_blocks == 3
        assert store.get(ids) is None
        assert store.get(ids, namespace=b"theirs") is None
        assert store.put(ids, theirs, namespace=b"theirs").new_blocks == 3
    with open_store(tmp_path) as store:
        assert same_kv(store.get(ids, namespace=b"mine").layers, mine)
        assert same_kv(store.get(ids, namespace=b"theirs").layers, theirs)
        assert store.contains(ids, namespace=b"mine") == 20
        assert store.delete(ids, namespace=b"mine") == 3
        assert store.contains(ids, namespace=b"mine") == 0
        assert store.contains(ids, namespace=b"theirs") == 20
        assert store.prefetch(ids, namespace=b"mine").result() == 0


def test_only_configured_namespaces_are_taken(tmp_path: Path) -> None:
    ids = tokens(3)
    with open_store(tmp_path, namespaces=(b"a", b"b")) as store:
        store.put(ids, kv_of(ids), namespace=b"a")
        assert store.get(ids, namespace=b"a").tokens == 3
        for call in (
            lambda: store.put(ids, kv_of(ids), namespace=b"c"),
            lambda: store.get(ids),
            lambda: store.contains(ids, namespace=b"c"),
            lambda: store.prefetch(ids, namespace=b"c"),
            lambda: store.delete(ids, namespace=b"c"),
            lambda: store.session("s", namespace=b"c"),
        ):
            with pytest.raises(ValueError, match=r"namespace: .* is not one of the configured namespaces"):
                call()


@pytest.mark.parametrize("configured", [(), (b"a",)])
def test_a_namespace_that_is_neither_text_nor_bytes_is_refused_by_name(
    tmp_path: Path, configured: tuple[bytes, ...]
) -> None:
    with open_store(tmp_path, namespaces=configured) as store:
        for namespace in (5, None, ["a"], "\ud800"):
            with pytest.raises(ValueError, match="namespace: expected text"):
                store.get([1], namespace=namespace)


@pytest.mark.parametrize("configured", [(), ("k\u00f6ln",), ("k\u00f6ln".encode(),)])
def test_text_is_its_utf_8_bytes_in_every_call(tmp_path: Path, configured: tuple[str | bytes, ...]) -> None:
    ids, text = tokens(20), "k\u00f6ln"
    name = text.encode()
    with open_store(tmp_path, namespaces=configured) as store:
        store.put(ids, kv_of(ids), namespace=text, pin=True)
        assert store.contains(ids, namespace=name) == store.get(ids, namespace=name).tokens == 20
        assert store.prefetch(ids, namespace=text).result() == store.explain(ids, namespace=text).tokens == 20
        store.session("s", namespace=text).save(ids, kv_of(ids))
        assert store.session("s", namespace=name).resume().tokens == 20
        (row,) = store.sessions()
        assert store.session("s", namespace=row.namespace).exists
        assert len(store.clusters(namespace=text)) == 1
        assert store.unpin(ids, namespace=text)
        assert store.delete(ids, namespace=text) == 3
        assert store.delete_namespace(text) == 0
        assert not store.sessions()


# ---- probabilities -------------------------------------------------------------------------------------------------


def bits_of(store: KVStore, ids: np.ndarray) -> float:
    """What the index knows about the information in a prefix."""
    from kvstore.core.keys import namespace_digest

    return store._residency.index.match(namespace_digest(b""), ids, touch=False).bits


def test_logprobs_reach_the_index_and_survive_a_restart(tmp_path: Path) -> None:
    ids = tokens(20)
    logprobs = -np.arange(20) * np.log(2.0)  # 0, 1, 2, ... bits
    with open_store(tmp_path) as store:
        store.put(ids, kv_of(ids), logprobs=logprobs)
        assert bits_of(store, ids) == pytest.approx(190)
    with open_store(tmp_path) as store:
        assert bits_of(store, ids) == pytest.approx(190)


def test_of_a_fork_the_beginning_and_each_end_keep_their_own_bits(tmp_path: Path) -> None:
    ids, other = tokens(16), tokens(16)
    other[8:] = tokens(8, seed=5)
    with open_store(tmp_path) as store:
        for sequence, end in ((ids, 1.0), (other, 3.0)):
            put(store, sequence, logprobs=np.repeat([-0.5, -end], 8) * np.log(2.0))
    with open_store(tmp_path) as store:
        assert [bits_of(store, x) for x in (ids[:8], ids, other)] == pytest.approx([4, 12, 28])


def test_logprobs_may_be_a_tensor_with_a_gradient(store: KVStore) -> None:
    ids = tokens(4)
    store.put(ids, kv_of(ids), logprobs=torch.full((4,), -np.log(2.0), dtype=torch.float32, requires_grad=True))
    assert bits_of(store, ids) == pytest.approx(4)


def test_without_logprobs_every_token_has_sixteen_bits(store: KVStore) -> None:
    put(store, tokens(20))
    assert bits_of(store, tokens(20)) == 320


@pytest.mark.parametrize("bad", [[0.0] * 19, [[0.0] * 20], [1.0] * 20, [float("nan")] * 20, "x"])
def test_logprobs_that_do_not_fit_are_refused_and_nothing_is_stored(store: KVStore, bad: Any) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        put(store, tokens(20), logprobs=bad)
    assert store.contains(tokens(20)) == 0
