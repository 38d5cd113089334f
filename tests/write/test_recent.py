"""The exact recent window: with a lossy codec on disk the last tokens of a sequence stay exact until it has grown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import profilecases
import pytest
import small_stores
import torch

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.config import KIB, MIB
from kvstore.errors import ConfigError
from kvstore.tiers.disk.tier import DiskTier

LAYOUT = KVLayout.uniform(4, 2, 16)
IDENTITY = replace(profilecases.identity_of(LAYOUT), codec_family="lossy")
PROFILE = profilecases.profile_of(LAYOUT, "lossless", "lossy", "aqua")
BLOCK, WINDOW = 64, 128
LOSSY, EXACT = "predictive", "entropy"
Layers = list[tuple[torch.Tensor, torch.Tensor]]
TOKENS = np.random.default_rng(1).integers(0, 50, 600).astype(np.uint32)
FORK = np.concatenate([TOKENS[:320], 1 + TOKENS[320:]])


def open_store(folder: Path, codec: str = "predictive@2", host: str = "", **settings: Any) -> KVStore:
    given = folder / "profile"
    if not given.exists():
        PROFILE.save(given)
    settings = {"exact_recent_tokens": WINDOW, "donors": False, "segment_bytes": 512 * KIB, "threads": 1, **settings}
    memory = TierConfig(16 * MIB, host) if host else TierConfig(0)
    disk = TierConfig(64 * MIB, codec)
    return KVStore(folder / "store", IDENTITY, StoreConfig(host=memory, disk=disk, profile=given, **settings))


def kv_of(tokens: np.ndarray) -> Layers:
    """Of any prefix of a sequence the same."""
    generator = torch.Generator().manual_seed(int(tokens[330]) if len(tokens) > 330 else 0)
    first = torch.Generator().manual_seed(7)
    shape = (2 * len(LAYOUT.layers), 2, 600, 16)
    values = torch.randn(shape, generator=first)
    values[:, :, 320:] += torch.randn(shape, generator=generator)[:, :, 320:]
    rows = values[:, :, : len(tokens)].bfloat16()
    return list(zip(rows[::2], rows[1::2], strict=True))


def put(store: KVStore, tokens: np.ndarray) -> None:
    store.put(tokens, kv_of(tokens))
    store.flush()


def codecs(store: KVStore, tokens: np.ndarray) -> list[str | None]:
    """Of the blocks on disk of a sequence, the first first."""
    return [block.codec for block in store.explain(tokens).blocks]


def exact_tokens(store: KVStore, tokens: np.ndarray) -> int:
    """How many of the last tokens come back bit for bit."""
    hit = store.get(tokens)
    assert hit is not None
    assert hit.tokens == len(tokens)
    same = torch.ones(len(tokens), dtype=torch.bool)
    for pair, expected in zip(hit.layers, kv_of(tokens), strict=True):
        for a, b in zip(pair, expected, strict=True):
            same &= (a[0] == b).all(dim=2).all(dim=0)
    return int(same.flip(0).cumprod(0).sum())


def test_the_last_tokens_are_exact_and_become_lossy_as_the_sequence_grows(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, TOKENS[:256])
        assert codecs(store, TOKENS[:256]) == [LOSSY] * 2 + [EXACT] * 2
        assert exact_tokens(store, TOKENS[:256]) == WINDOW
        put(store, TOKENS[:270])  # a tail; what ends at token 142 or before is old
        assert codecs(store, TOKENS[:270]) == [LOSSY] * 2 + [EXACT] * 3
        put(store, TOKENS[:450])
        assert codecs(store, TOKENS[:450]) == [LOSSY] * 5 + [EXACT] * 3
        assert exact_tokens(store, TOKENS[:450]) == 450 - 320
        assert store.stats()["counters"]["aged_records"] == 2  # the tail was replaced before it was old
        small_stores.all_is_well(store, deep=True)


def test_what_was_exact_is_known_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, TOKENS[:256])
    with open_store(tmp_path) as store:
        assert exact_tokens(store, TOKENS[:256]) == WINDOW
        put(store, TOKENS[:512])
        assert codecs(store, TOKENS[:512]) == [LOSSY] * 6 + [EXACT] * 2
        assert store.stats()["counters"]["aged_records"] == 2
    with open_store(tmp_path) as store:
        assert exact_tokens(store, TOKENS[:512]) == WINDOW
        small_stores.all_is_well(store, deep=True)


def test_each_end_of_a_fork_has_its_own_window(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, TOKENS[:384])
        put(store, FORK[:512])
        assert codecs(store, TOKENS[:384]) == [LOSSY] * 5 + [EXACT]  # block 4 is old for the longer sequence
        assert codecs(store, FORK[:512]) == [LOSSY] * 6 + [EXACT] * 2


def test_a_block_stays_exact_where_the_disk_has_no_room_and_is_coded_with_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        put(store, TOKENS[:256])
        with monkeypatch.context() as patched:
            patched.setattr(DiskTier, "rewrite", lambda self, sealed: set())
            put(store, TOKENS[:512])
        assert codecs(store, TOKENS[:512]) == [LOSSY] * 2 + [EXACT] * 2 + [LOSSY] * 2 + [EXACT] * 2
        assert store.stats()["counters"]["fallback_aging"] == 2
        put(store, TOKENS[:576])
        assert codecs(store, TOKENS[:576]) == [LOSSY] * 7 + [EXACT] * 2


def test_growth_that_waits_in_the_queue_is_coded_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for end in range(128, 577, 64):
            store.put(TOKENS[:end], kv_of(TOKENS[:end]))
        store.flush()
        assert codecs(store, TOKENS[:576]) == [LOSSY] * 7 + [EXACT] * 2


@pytest.mark.parametrize("host", ["splitzip", "predictive@2"])
def test_memory_holds_what_is_recent_exactly(tmp_path: Path, host: str) -> None:
    with open_store(tmp_path, host=host) as store:
        put(store, TOKENS[:256])
        assert exact_tokens(store, TOKENS[:256]) >= WINDOW


def test_aqua_has_the_window_too_and_without_it_nothing_is_exact(tmp_path: Path) -> None:
    with open_store(tmp_path, "aqua@2") as store:
        put(store, TOKENS[:256])
        put(store, TOKENS[:320])
        assert codecs(store, TOKENS[:320]) == ["aqua"] * 3 + [EXACT] * 2
    (tmp_path / "without").mkdir()
    with open_store(tmp_path / "without", exact_recent_tokens=0) as store:
        put(store, TOKENS[:256])
        assert codecs(store, TOKENS[:256]) == [LOSSY] * 4
        assert exact_tokens(store, TOKENS[:256]) == 0


def test_it_goes_with_no_donor_step() -> None:
    with pytest.raises(ConfigError, match=r"exact_recent_tokens: .*donor_step"):
        StoreConfig(exact_recent_tokens=128, donor_step=0.5)
    with pytest.raises(ConfigError, match="exact_recent_tokens"):
        StoreConfig(exact_recent_tokens=-1)
