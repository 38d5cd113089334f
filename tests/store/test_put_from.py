"""Puts whose cache begins in the middle of the sequence, for what is before is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcases import BLOCK, Layers, assert_hit, kv_of, open_store, put, tokens
from windowcases import WINDOWED

from kvstore import KVStore, LayoutMismatch


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "store") as opened:
        yield opened


def from_token(layers: Layers, start: int) -> Layers:
    return [(k[:, start:], v[:, start:]) for k, v in layers]


@pytest.mark.parametrize("ends", [(16, 40), (16, 24, 37), (8, 9 * BLOCK + 1)])
def test_pieces_make_the_whole(store: KVStore, ends: tuple[int, ...]) -> None:
    ids, start = tokens(ends[-1]), 0
    for end in ends:
        done = store.put(ids[:end], from_token(kv_of(ids[:end]), start), start=start)
        assert (done.tokens, done.new_tokens) == (end, end - start)
        start = end
    assert_hit(store.get(ids), ids, ends[-1])
    store.flush()
    assert_hit(store.get(ids), ids, ends[-1])


def test_a_piece_that_overlaps_what_is_stored_adds_the_rest(store: KVStore) -> None:
    ids = tokens(40)
    put(store, ids[:20])  # two blocks and a tail of four
    done = store.put(ids, from_token(kv_of(ids), 16), start=16)
    assert done.new_blocks == 3
    assert_hit(store.get(ids), ids, 40)


@pytest.mark.parametrize("stored", [0, 8, 15, 20])
def test_nothing_is_stored_behind_a_gap(store: KVStore, stored: int) -> None:
    """With 20 tokens stored, the third block must be replaced, and the piece does not have its beginning."""
    ids, start = tokens(40), 20 if stored == 20 else 16
    if stored:
        put(store, ids[:stored])
    done = store.put(ids, from_token(kv_of(ids), start), start=start)
    assert (done.new_tokens, done.new_blocks, done.dropped_blocks) == (0, 0, 0)
    assert done.missing_from == stored // 8 * 8
    assert store.stats()["counters"]["put_gaps"] == 1
    assert store.contains(ids) == stored
    if stored:
        assert_hit(store.get(ids), ids, stored)


def test_a_piece_that_does_not_fit_its_start_is_refused(store: KVStore) -> None:
    ids = tokens(24)
    put(store, ids[:16])
    with pytest.raises(LayoutMismatch, match="tokens=8"):
        store.put(ids, kv_of(ids), start=16)
    for start in (-1, 24, 1.5, True):
        with pytest.raises(ValueError, match="start"):
            store.put(ids, kv_of(ids), start=start)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start: a pin needs"):
        store.put(ids, from_token(kv_of(ids), 16), start=16, pin=True)
    assert store.contains(ids) == 16


def test_windows_need_the_whole_cache(tmp_path: Path) -> None:
    ids = tokens(24)
    with open_store(tmp_path / "windows", WINDOWED) as store:
        with pytest.raises(ValueError, match="start: a layout with windows"):
            store.put(ids, [], start=8)
