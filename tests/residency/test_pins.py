"""Finding 12: pins filled the disk, puts promised what could not be, nothing unpinned, and expiry was quadratic."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds
from faultfs import Fault, FaultFS
from kvcases import GatedFS, kv_of, open_store, quick_directory, same_kv, tokens
from threadruns import HANGS_S

from kvstore import KVStore, PutResult, StoreConfig, TierConfig
from kvstore.config import KIB
from kvstore.errors import ConfigError, ReadOnlyStore
from kvstore.residency.pins import Pins

RECORD = 4096
DISK = {"host": TierConfig(0), "disk": TierConfig(8 * 64 * KIB, "raw")}
MEMORY = {"host": TierConfig(24 * RECORD, "raw"), "disk": TierConfig(0)}
BOTH = pytest.mark.parametrize("settings", [DISK, MEMORY], ids=["disk", "memory"])


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


def put(store: KVStore, ids: np.ndarray, **settings: Any) -> PutResult:
    return store.put(ids, kv_of(ids), **settings)


def stored(store: KVStore, ids: np.ndarray) -> int:
    hit = store.get(ids)
    assert hit is None or same_kv(hit.layers, kv_of(ids[: hit.tokens]))
    return 0 if hit is None else hit.tokens


def pin_many(store: KVStore, count: int = 60) -> list[int]:
    """Pins sequences of three records each; the seeds of those whose pin was taken."""
    taken = []
    for seed in range(count):
        if put(store, tokens(20, seed), pin=True).pinned:
            taken.append(seed)
        store.flush()
    return taken


def crowd(store: KVStore, count: int = 80) -> None:
    for seed in range(1000, 1000 + count):
        put(store, tokens(20, seed))
        store.flush()


def pins(store: KVStore) -> dict[str, int]:
    assert store.check().problems == ()
    return store.stats()["pins"]


@BOTH
def test_finding_12_pins_leave_space_for_everything_else(tmp_path: Path, settings: dict) -> None:
    with open_store(tmp_path, **settings) as store:
        taken = pin_many(store)
        found = pins(store)
        assert 0 < len(taken) == found["sequences"] < 60
        assert found["budget"] - 3 * RECORD < found["bytes"] == 3 * RECORD * len(taken) <= found["budget"]
        assert store.stats()["counters"]["refused_pins"] == 60 - len(taken)
        for seed in range(2000, 2030):
            assert put(store, tokens(20, seed)).dropped_blocks == 0
            assert store.flush().dropped_blocks == 0
            assert stored(store, tokens(20, seed)) == 20
        assert {stored(store, tokens(20, seed)) for seed in taken} == {20}


@BOTH
def test_a_refused_pin_stores_the_sequence_all_the_same(tmp_path: Path, settings: dict) -> None:
    with open_store(tmp_path, **{**settings, "pinned_share": 0}) as store:
        done = put(store, tokens(20), pin=True)
        assert (done.pinned, done.new_blocks, done.dropped_blocks) == (False, 3, 0)
        assert stored(store, tokens(20)) == 20
        store.flush()
        crowd(store)
        assert stored(store, tokens(20)) == 0


def test_finding_12_a_put_that_pins_leave_no_space_for_says_so(tmp_path: Path) -> None:
    """As after opening with a smaller budget."""
    with open_store(tmp_path, **{**DISK, "disk": TierConfig(32 * 64 * KIB, "raw"), "pinned_share": 0.9}) as store:
        taken = pin_many(store, 120)
    small = {**DISK, "disk": TierConfig(8 * 64 * KIB, "raw")}
    with open_store(tmp_path, **small) as store:
        assert pins(store)["bytes"] > pins(store)["budget"]
        done = put(store, tokens(20, 5000))
        assert (done.new_blocks, done.dropped_blocks) == (0, 3)
        assert store.stats()["counters"]["dropped_no_room"] == 3
        assert not put(store, tokens(20, 5000), pin=True).pinned
        assert put(store, tokens(20, taken[0]), pin=True).pinned  # it is already
        for seed in taken:
            assert store.unpin(tokens(20, seed))
        assert put(store, tokens(20, 5000)).new_blocks == 3
        assert store.flush().dropped_blocks == 0
        assert stored(store, tokens(20, 5000)) == 20


def test_a_store_whose_pins_are_above_its_budget_says_so_and_gives_back_what_is_deleted(tmp_path: Path) -> None:
    with open_store(tmp_path, **{**DISK, "disk": TierConfig(64 * 64 * KIB, "raw"), "pinned_share": 0.9}) as store:
        taken = pin_many(store, 240)
    small = {**DISK, "disk": TierConfig(16 * 64 * KIB, "raw")}
    with open_store(tmp_path, **small) as store:
        budget = small["disk"].bytes
        assert store.stats()["counters"]["fallback_over_budget"] == 1
        assert store.stats()["disk"]["used_bytes"] > budget
        for seed in taken[20:]:
            store.delete(tokens(20, seed))
        assert store.stats()["disk"]["used_bytes"] <= budget
        assert {stored(store, tokens(20, seed)) for seed in taken[:20]} == {20}
    with open_store(tmp_path, **small) as store:
        assert "fallback_over_budget" not in store.stats()["counters"]


@BOTH
def test_finding_12_what_is_unpinned_is_evicted_in_turn(tmp_path: Path, settings: dict) -> None:
    with open_store(tmp_path, **settings) as store:
        assert put(store, tokens(20), pin=True).pinned
        store.flush()
        assert not store.unpin(tokens(20)[:19] + 1)
        assert store.unpin(tokens(20))
        assert not store.unpin(tokens(20))
        assert pins(store) | {"budget": 0} == {"sequences": 0, "bytes": 0, "budget": 0}
        assert stored(store, tokens(20)) == 20
        crowd(store)
        assert stored(store, tokens(20)) == 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_an_unpinned_sequence_stays_unpinned_after_a_restart(tmp_path: Path, policy: str) -> None:
    with open_store(tmp_path, eviction=policy, **DISK) as store:
        put(store, tokens(20), pin=True)
        put(store, tokens(20, seed=1), pin=True)
        store.flush()
        assert store.unpin(tokens(20))
    with open_store(tmp_path, eviction=policy, **DISK) as store:
        assert pins(store)["sequences"] == 1
        crowd(store)
        assert [stored(store, tokens(20, seed)) for seed in (0, 1)] == [0, 20]


def test_what_is_unpinned_while_it_is_queued_is_stored_without_a_pin(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs, **DISK) as store:
        fs.shut()
        put(store, tokens(3, seed=9))
        assert fs.waiting.wait(HANGS_S)
        put(store, tokens(20), pin=True)
        assert store.unpin(tokens(20))
        fs.gate.set()
    with open_store(tmp_path, **DISK) as store:
        assert stored(store, tokens(20)) == 20
        assert pins(store)["sequences"] == 0


def test_a_shared_beginning_is_kept_until_its_last_pin_ends(tmp_path: Path) -> None:
    one, two = np.concatenate([tokens(16), tokens(4, 1)]), np.concatenate([tokens(16), tokens(4, 2)])
    with open_store(tmp_path, **DISK) as store:
        put(store, one, pin=True)
        put(store, two, pin=True)
        store.flush()
        assert pins(store)["bytes"] == 4 * RECORD
        store.unpin(one)
        assert pins(store)["bytes"] == 3 * RECORD
        crowd(store)
        assert [stored(store, ids) for ids in (one, two)] == [16, 20]
        store.unpin(two)
        assert pins(store)["bytes"] == 0


def test_sequences_that_part_inside_of_a_pinned_block_have_pins_of_their_own(tmp_path: Path) -> None:
    ids = tokens(20)
    other = np.concatenate([ids[:18], tokens(2, 1)])
    with open_store(tmp_path, **DISK) as store:
        put(store, ids, pin=True)
        put(store, other)
        assert pins(store)["sequences"] == 1
        put(store, other, pin=True)
        assert pins(store)["sequences"] == 2
        assert store.unpin(other)
        assert store.unpin(ids)
        assert pins(store)["sequences"] == pins(store)["bytes"] == 0


@pytest.mark.parametrize("pin", [False, True])
def test_a_write_fails_of_what_parts_inside_of_a_pinned_block(tmp_path: Path, pin: bool) -> None:
    ids, fs = tokens(20), FaultFS()
    other = np.concatenate([ids[:18], tokens(2, 1)])
    with open_store(tmp_path, fs=fs, **DISK) as store:
        put(store, ids, pin=True)
        store.flush()
        fs.fault = Fault("pwritev", 1, errno.EIO, sticky=True)
        put(store, other, pin=pin)
        assert store.flush().dropped_blocks == 1
        fs.fault = None
        assert [stored(store, each) for each in (ids, other)] == [20, 18]
        assert pins(store)["sequences"] == 1
        assert store.unpin(ids)


def test_a_pinned_tail_can_be_unpinned_after_the_sequence_grew(tmp_path: Path) -> None:
    ids = tokens(20)
    with open_store(tmp_path, **DISK) as store:
        put(store, ids[:12], pin=True)
        assert not put(store, ids).pinned
        store.flush()
        assert pins(store)["sequences"] == 1
        assert not store.unpin(ids)
        assert store.unpin(ids[:12])
        assert pins(store)["bytes"] == 0


def test_pinned_bytes_are_those_on_disk_also_after_a_restart(tmp_path: Path) -> None:
    settings = {**DISK, "disk": TierConfig(32 * 64 * KIB, "zstd")}
    with open_store(tmp_path, **settings) as store:
        for seed in range(5):
            put(store, tokens(20, seed), pin=seed < 3)
            store.flush()
        before = pins(store)
        assert before["bytes"] == 9 * RECORD
    with open_store(tmp_path, **settings) as store:
        assert pins(store) == before


def test_finding_12_expiry_of_pinned_sequences_is_not_quadratic(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    path_of = Pins.__init__

    def counted(self: Pins, path: Any, *rest: Any) -> None:
        path_of(self, lambda record: looked.append(record) or path(record), *rest)  # type: ignore[func-returns-value]

    monkeypatch.setattr(Pins, "__init__", counted)
    with open_store(tmp_path, **{**DISK, "disk": TierConfig(64 * 64 * KIB, "raw")}) as store:
        for seed in range(100):
            put(store, np.concatenate([tokens(8), tokens(4, seed + 1)]), pin=True, ttl=100)
        store.flush()
        looked.clear()
        clock[0] = 200
        put(store, tokens(3, seed=999))
        assert pins(store)["sequences"] == 0
        assert len(looked) <= 100


def test_the_beginning_of_a_pinned_sequence_that_expired_can_be_evicted(tmp_path: Path, clock: list[float]) -> None:
    ids = tokens(20)
    with open_store(tmp_path, **DISK) as store:
        put(store, ids[:16])
        put(store, ids, ttl=100, pin=True)
        clock[0] = 200
        assert stored(store, ids) == 16
        crowd(store)
        assert stored(store, ids) == 0
        assert pins(store)["bytes"] == 0


@pytest.mark.parametrize("share", [-0.1, 0.91, float("nan"), True, "half"])
def test_a_share_that_leaves_no_space_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"pinned_share: expected 0 to 0\.9"):
        StoreConfig(pinned_share=share)


def test_unpin_checks_what_it_is_given(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="tokens"):
            store.unpin([-1])
        assert not store.unpin(tokens(20))
    with open_store(tmp_path, read_only=True) as reader, pytest.raises(ReadOnlyStore):
        reader.unpin(tokens(20))


class Sequences:
    """Paths of records in a tree, with holes, as the index has them."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.gone: set[int] = set()

    def path(self, record: int) -> list[int]:
        found = []
        while record:
            found.append(0 if record in self.gone else record)
            record = self.parent[record]
        return found[::-1] if found[:1] != [0] else []


@pytest.mark.parametrize("trial", range(30))
def test_pins_keep_what_their_paths_say(trial: int) -> None:
    rng, tree, pinned = random.Random(seeds.of("pins", trial)), Sequences(), set[int]()
    found = Pins(tree.path, size=lambda record: record)
    for number in range(1, 150):
        there = [record for record in tree.parent if record not in tree.gone]
        act = rng.random()
        if act < 0.5 or not there:
            tree.parent[number] = rng.choice([0, *list(tree.parent)[-8:]])
            found.arrived()
        elif act < 0.7:
            record = rng.choice(there)
            pinned.add(record)
            found.add(record)
        elif act < 0.8 and pinned:
            record = rng.choice(sorted(pinned))
            pinned.discard(record)
            freed = found.end(record)
            assert not set(freed) & {r for p in pinned for r in tree.path(p)}
        elif act < 0.9:
            record = rng.choice(there)
            tree.gone.add(record)
            pinned.discard(record)
            found.remove(record)
        elif tree.gone:  # the hole is filled by a record with a new number
            old = rng.choice(sorted(tree.gone))
            tree.gone.discard(old)
            tree.parent[1000 + number] = tree.parent.pop(old)
            for record, parent in tree.parent.items():
                tree.parent[record] = 1000 + number if parent == old else parent
            found.arrived()
        want = {record for end in pinned for record in tree.path(end) if record}
        ends, kept = found.snapshot()
        assert (ends, kept) == (pinned, {record: record for record in want})
        assert found.nbytes == sum(want)
    for record in sorted(pinned):
        found.end(record)
    assert (found.nbytes, found._nodes) == (0, {})
