"""What a store learns of layer 0 from the tokens that it saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import learncases
import numpy as np
import pytest

from kvstore import KVStore
from kvstore.codecs.profile import Profile
from kvstore.learning.seen import BlocksGone, SeenTokens
from kvstore.learning.windows import BlockWindows
from kvstore.read.stored_block import BlockReader


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, count=1)
        yield store


def reader_of(store: KVStore) -> BlockReader:
    learner = store._engine.learner
    assert learner is not None
    return learner._reader


def look(store: KVStore, records: range = range(1, 4)) -> SeenTokens:
    return SeenTokens.of(records, reader_of(store).group(0), lambda: None)


def test_every_token_has_the_row_that_its_blocks_show(store: KVStore) -> None:
    tokens, seen = learncases.tokens_of(0)[:192], look(store)
    found, counts = np.unique(tokens, return_counts=True)
    assert np.array_equal(seen.tokens, found)
    assert np.array_equal(seen.once, counts == 1)
    assert seen.once.any()
    assert not seen.once.all()
    assert np.allclose(seen.rows, learncases.first_layer()[found], rtol=0, atol=0.02)  # bf16, rotated and back


def test_windows_name_rows_and_hide_those_of_tokens_that_were_seen_once(store: KVStore) -> None:
    seen, tokens = look(store), learncases.tokens_of(0)[:192]
    given = (learncases.LAYOUT, 64, ((1, 2, 3),), reader_of(store).group(0), lambda: None, seen)
    rows = BlockWindows.of_blocks(*given).tokens(0)
    assert np.array_equal(seen.tokens[rows], tokens)
    hidden = BlockWindows.of_blocks(*given, hide=True).tokens(0)
    assert np.array_equal(hidden, np.where(seen.once[rows], len(seen.tokens), rows))


def test_a_block_that_left_is_said(store: KVStore) -> None:
    with pytest.raises(BlocksGone):
        look(store, range(1, 1000))


def test_the_profile_knows_layer_0_of_what_was_seen_and_is_no_larger_for_the_rest(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store)
        assert store.learn().state == "adopted"
        (profile,) = (path for path in (tmp_path / "store" / "profiles").iterdir() if path.name != "newest")
        lossless = Profile.load(profile).section("lossless")
        assert "token_kv" not in lossless
        assert lossless["seen_kv"].shape == (len(lossless["seen_tokens"]), learncases.first_layer().shape[1])
        assert 0.9 * learncases.VOCABULARY < len(lossless["seen_tokens"]) <= learncases.VOCABULARY
