"""Blocks coded against others with the same tokens (members of families): written by themselves, read bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import family_stores
import numpy as np
import pytest
import small_stores
import torch
from family_stores import BLOCK, IDENTITY, behind, config, counter, join, members, passage, stored

from kvstore import KVStore

TEXT = passage(1)  # four blocks
OTHER = passage(2)
_EDITED = TEXT.copy()
_EDITED[50] += 1

VARIANTS = {
    "another beginning of a block": behind(10, TEXT),
    "shifted inside of blocks": behind(10, TEXT, 13),
    "moved to the front": join(TEXT[2 * BLOCK :], passage(11, 40)),
    "a token edited": behind(10, _EDITED, 5),
    "tokens inserted": join(passage(10, 7), TEXT[:70], passage(12, 9), TEXT[70:]),
    "tokens left out": join(passage(10, 7), TEXT[:40], TEXT[61:]),
    "passages reordered": join(OTHER, passage(10, 11), TEXT),
    "ends inside a block": behind(10, TEXT[:100], 20),
}


def filled(path: Path, **settings: object) -> KVStore:
    """A store with two passages, flushed."""
    store = KVStore(path, IDENTITY, config(**settings))  # type: ignore[arg-type]
    family_stores.put(store, TEXT)
    family_stores.put(store, OTHER)
    store.flush()
    assert members(store) == 0
    return store


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_with_the_tokens_of_others_become_members_and_come_back(path: Path, name: str) -> None:
    tokens = VARIANTS[name]
    with filled(path) as store:
        family_stores.put(store, tokens)
        assert stored(store, tokens) == len(tokens)  # from the queue, or while it is written
        store.flush()
        assert members(store) >= 1
        assert counter(store, "member_records") == members(store) == len(family_stores.member_entries(store))
        for wanted in (tokens, TEXT, OTHER):
            assert stored(store, wanted) == len(wanted)
        family_stores.families_hold(store)
        small_stores.all_is_well(store)
    with KVStore(path, IDENTITY, config()) as store:
        assert members(store) >= 1
        for wanted in (tokens, TEXT, OTHER):
            assert stored(store, wanted) == len(wanted)
        assert counter(store, "quarantined_records") == counter(store, "lost_members") == 0


def test_a_first_block_can_be_a_member(path: Path) -> None:
    tokens = VARIANTS["moved to the front"]
    with filled(path) as store:
        family_stores.put(store, tokens)
        store.flush()
        assert any(entry.start == 0 for entry in family_stores.member_entries(store))
        assert stored(store, tokens) == len(tokens)


@pytest.mark.parametrize("host", [0, 1 << 20])
def test_any_beginning_of_a_member_is_exact(path: Path, host: int) -> None:
    tokens = VARIANTS["tokens inserted"]
    with filled(path, host=host) as store:
        family_stores.put(store, tokens)
        store.flush()
        assert members(store) >= 2
        for limit in range(1, len(tokens) + 1, 3):
            assert stored(store, tokens, max_tokens=limit) == limit


def test_a_fork_inside_a_member_takes_its_beginning(path: Path) -> None:
    tokens = behind(10, TEXT)
    fork = tokens.copy()
    fork[2 * BLOCK + 5 :] += 1
    with filled(path) as store:
        family_stores.put(store, tokens)
        store.flush()
        assert any(entry.start == 2 * BLOCK for entry in family_stores.member_entries(store))
        assert stored(store, fork) == 2 * BLOCK + 5


def test_families_take_fewer_bytes_than_blocks_that_stand_alone(path: Path) -> None:
    sizes = {}
    for donors in (True, False):
        with filled(path.with_name(str(donors)), donors=donors) as store:
            for number in range(10, 16):
                family_stores.put(store, behind(number, TEXT))
            store.flush()
            sizes[donors] = family_stores.disk_bytes(store)
            assert (members(store) > 0) == donors
    # Two families and six beginnings; of 32 blocks 24 are members, of half the pages at most.
    assert sizes[True] < 0.7 * sizes[False]


@pytest.mark.parametrize("settings", [{"donors": False}, {"codec": "raw"}, {"codec": "splitzip"}, {"codec": "zstd"}])
def test_nothing_becomes_a_member_where_it_is_not_asked_for(path: Path, settings: dict[str, object]) -> None:
    tokens = behind(10, TEXT)
    with filled(path, **settings) as store:
        family_stores.put(store, tokens)
        store.flush()
        assert members(store) == counter(store, "member_records") == 0
        assert stored(store, tokens) == len(tokens)


@pytest.mark.parametrize("settings", [{"donors": False}, {"codec": "raw"}, {"codec": "zstd"}, {"host": 1 << 20}])
def test_members_are_read_and_their_donors_deleted_under_other_settings(
    path: Path, settings: dict[str, object]
) -> None:
    tokens = behind(10, TEXT)
    with filled(path) as store:
        family_stores.put(store, tokens)
    with KVStore(path, IDENTITY, config(**settings)) as store:  # type: ignore[arg-type]
        found = members(store)
        assert found >= 3
        assert stored(store, tokens) == len(tokens)
        assert store.delete(TEXT) == 4
        assert counter(store, "recoded_members") == found
        assert stored(store, tokens) == len(tokens)
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, tokens) == len(tokens)
        assert members(store) == 0


def test_blocks_of_another_namespace_are_no_donors(path: Path) -> None:
    tokens = behind(10, TEXT)
    with filled(path) as store:
        family_stores.put(store, tokens, b"other")
        store.flush()
        assert members(store) == 0
        family_stores.put(store, TEXT, b"other")  # the same passage twice: there they meet
        store.flush()
        assert members(store) >= 3
        owner = store._residency.disk.namespaces  # type: ignore[union-attr]
        assert len(owner) == 2
        for entry in family_stores.member_entries(store):
            donors = store._residency.disk.catalog.get(entry.donors)  # type: ignore[union-attr]
            assert {donor.namespace for donor in donors if donor} == {entry.namespace}
        assert stored(store, tokens, b"other") == len(tokens)
        assert stored(store, TEXT, b"other") == len(TEXT)


def test_blocks_with_an_end_of_life_are_no_donors(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        family_stores.put(store, TEXT, ttl=3600)
        store.flush()
        tokens = behind(10, TEXT)
        family_stores.put(store, tokens)
        store.flush()
        assert members(store) == 0
        family_stores.put(store, behind(11, TEXT))  # the control: that one found the block that stands alone
        store.flush()
        assert members(store) >= 3


def test_blocks_with_an_end_of_life_may_be_members(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = behind(10, TEXT)
    with filled(path) as store:
        family_stores.put(store, tokens, ttl=3600)
        store.flush()
        assert members(store) >= 3
        ahead = time.time() + 7200
        monkeypatch.setattr(time, "time", lambda: ahead)
        assert stored(store, tokens) == 0
        store._residency.expire()
        assert members(store) == 0
        assert stored(store, TEXT) == len(TEXT)
        small_stores.all_is_well(store)


def test_tails_are_no_donors_and_may_be_members(path: Path) -> None:
    short = passage(20, 2 * BLOCK - 1)
    with filled(path) as store:
        family_stores.put(store, short)
        family_stores.put(store, join(passage(21, BLOCK), short[BLOCK:]))  # the tail's tokens, and no whole block's
        store.flush()
        assert members(store) == 0
        grown = behind(22, TEXT[: 2 * BLOCK - 1])
        family_stores.put(store, grown)
        store.flush()
        assert [len(entry.tokens) for entry in family_stores.member_entries(store)] == [BLOCK, BLOCK - 1]
        assert stored(store, grown) == len(grown)
        longer = behind(22, TEXT)
        family_stores.put(store, longer)  # replaces the tail, a member
        store.flush()
        assert [len(entry.tokens) for entry in family_stores.member_entries(store)] == [BLOCK] * 4
        assert stored(store, longer) == len(longer)
        family_stores.families_hold(store)
        small_stores.all_is_well(store)


def test_short_runs_and_noise_stand_alone(path: Path) -> None:
    with filled(path) as store:
        family_stores.put(store, join(passage(10, 20), TEXT[:12], passage(11, 32)))
        family_stores.put(store, passage(12))
        store.flush()
        assert members(store) == 0


def test_a_block_that_saves_too_little_stands_alone_and_may_be_a_donor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = behind(10, TEXT)
    unlike = small_stores.kv_of(tokens, layout=family_stores.LAYOUT)  # any bits, whatever the tokens
    with filled(path) as store:
        store.put(tokens, unlike)
        store.flush()
        assert members(store) == 0
        assert counter(store, "donors_rejected") >= 3
        rejected = [entry.record for entry in small_stores.catalog_entries(store) if entry.start and entry.record > 8]
        assert len(rejected) == 4
        assert all(record in store._residency.content for record in rejected)  # type: ignore[operator]


def test_a_prefetched_member_is_decoded_against_its_donors(path: Path) -> None:
    tokens = behind(10, TEXT)
    with filled(path) as store:
        family_stores.put(store, tokens)
    with KVStore(path, IDENTITY, config(host=1 << 20)) as store:
        assert store.prefetch(tokens).result() == len(tokens)
        hit = store.get(tokens)
        assert hit is not None
        assert hit.tiers == {"host": len(tokens)}
        assert family_stores.is_exact(hit, tokens)
        store._engine.assembler.reader.clear()
        assert stored(store, tokens) == len(tokens)


def test_members_and_donors_of_one_put_are_exact_while_they_are_queued(path: Path) -> None:
    """Everything in one group: donors are taken from the queue."""
    everything = [TEXT, OTHER, *VARIANTS.values()]
    with KVStore(path, IDENTITY, config()) as store:
        for tokens in everything:
            family_stores.put(store, tokens)
        for tokens in everything:
            assert stored(store, tokens) == len(tokens)
        store.flush()
        assert members(store) >= len(VARIANTS)
        for tokens in everything:
            assert stored(store, tokens) == len(tokens)
        family_stores.families_hold(store)


def test_values_of_any_bits_come_back(path: Path) -> None:
    """NaN, infinities and zeros of both signs where donors have numbers, and the other way round."""
    special = np.array([0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001], np.uint16)
    tokens = behind(10, TEXT)
    kv = family_stores.kv_of(tokens)
    rng = np.random.default_rng(3)
    for layer in kv:
        for tensor in layer:
            bits = tensor.view(torch.int16).numpy().view(np.uint16)
            where = rng.random(bits.shape) < 0.01
            bits[where] = rng.choice(special, int(where.sum()))
    with filled(path) as store:
        store.put(tokens, kv)
        store.flush()
        assert members(store) >= 3
        hit = store.get(tokens)
        assert hit is not None
        for found, wanted in zip(hit.layers, kv, strict=True):
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a[0].contiguous().view(torch.int16), b.view(torch.int16))


def test_stats_count_members_and_donors(path: Path) -> None:
    with filled(path) as store:
        assert store.stats()["families"] == {"members": 0, "donors": 0}
        family_stores.put(store, behind(10, TEXT))
        store.flush()
        assert store.stats()["families"] == {"members": 4, "donors": 4}
        family_stores.put(store, behind(11, TEXT, 8))
        store.flush()
        families = store.stats()["families"]
        assert families["donors"] == 4
        assert families["members"] > 4
