"""Blocks that are only copied, all of a get at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_stores import BLOCK, LAYOUT, config, identity, is_exact, put, tokens_of

from kvstore import KVStore
from kvstore.codecs import KVView
from kvstore.codecs.view import Packed
from kvstore.read import copies
from kvstore.timing import Timing, Where

TOKENS = tokens_of(1, 10 * BLOCK + 3)
BLOCKS = 11


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens where the pieces of each call go."""
    made: list[list[int]] = []
    unpack_all = KVView.unpack_all

    def noted(view: KVView, pieces: list[Packed]) -> None:
        made.append([piece.at for piece in pieces])
        unpack_all(view, pieces)

    monkeypatch.setattr(KVView, "unpack_all", noted)
    return made


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_all_blocks_of_a_get_are_copied_by_one_call(tier: str, tmp_path: Path, calls: list[list[int]]) -> None:
    settings = config(host=(1 << 20) * (tier == "host"), threads=4)
    with KVStore(tmp_path / "store", identity(), settings) as store:
        put(store, TOKENS)
        store.flush()
        hit = store.get(TOKENS)
        assert hit is not None
        assert hit.tiers == {tier: len(TOKENS)}
        assert is_exact(hit, TOKENS)
        assert calls == [list(range(0, len(TOKENS), BLOCK))]
        part = store.get(TOKENS[: 2 * BLOCK + 1])
        assert part is not None
        assert is_exact(part, TOKENS[: 2 * BLOCK + 1])  # the beginning of a block
        decoded = store.metrics.timings.by_place(Timing.DECODE)
        assert decoded[Where(tier, "raw")].total == BLOCKS + 3


def test_what_is_a_lot_is_copied_while_the_rest_is_read(
    tmp_path: Path, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "ENOUGH_BYTES", 4 * BLOCK * LAYOUT.bytes_per_token)
    with KVStore(tmp_path / "store", identity(), config(host=0)) as store:
        put(store, TOKENS)
        store.flush()
        hit = store.get(TOKENS)
        assert hit is not None
        assert is_exact(hit, TOKENS)
        assert [len(places) for places in calls] == [4, 4, 3]


@pytest.mark.parametrize("codec", ["splitzip", "zstd"])
def test_what_is_coded_is_decoded_block_by_block(codec: str, tmp_path: Path, calls: list[list[int]]) -> None:
    with KVStore(tmp_path / "store", identity(), config(host=0, codec=codec)) as store:
        put(store, TOKENS)
        store.flush()
        hit = store.get(TOKENS)
        assert hit is not None
        assert is_exact(hit, TOKENS)
        assert not calls


def test_layers_that_come_later_are_not_copied_with_the_first(
    tmp_path: Path, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.read.get.free_processors", lambda: 1)
    with KVStore(tmp_path / "store", identity(), config(host=0)) as store:
        put(store, TOKENS)
        store.flush()
        hit = store.get(TOKENS, lazy=True)
        assert hit is not None
        assert is_exact(hit, TOKENS)
        assert not calls
