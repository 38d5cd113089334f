"""Quotas and reservations: a noisy namespace pays for itself, a reserved one keeps what is reserved, to the byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_stores
import pytest
from kvcases import quick_directory
from small_stores import IDENTITY, SEGMENT, all_is_well, config, disk_use, kv_of, put, stored, tokens_of

from kvstore import ConfigError, KVStore, StoreConfig, TenantConfig
from kvstore.eviction import POLICIES
from kvstore.tiers.disk.budget import BESIDE_BYTES
from kvstore.tiers.disk.tier import DiskTier

BUDGET = 16 * SEGMENT
RECORD = 4096
LENGTH = 64  # tokens of a sequence: 16 records
SEQUENCE = LENGTH // 4 * RECORD
ANN, BOB = b"ann", b"bob"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


def open_with(path: Path, tenants: dict[Any, TenantConfig], disk: int = BUDGET, **settings: Any) -> KVStore:
    # A block of this layout has 128 bytes, and takes a page on disk: groups are small, as those of real caches are.
    settings = {"host": 0, "group_bytes": 4096, **settings}
    return KVStore(path, IDENTITY, config(disk=disk, tenants=tenants, **settings))


def counter(store: KVStore, name: str) -> float:
    return store.stats()["counters"].get(name, 0)


def used(store: KVStore, name: str) -> int:
    return int(store.stats()["namespaces"].get(name, {"bytes": 0})["bytes"])


def fill(store: KVStore, namespace: bytes, first: int, count: int, **options: Any) -> None:
    """Puts `count` sequences that share nothing."""
    for number in range(first, first + count):
        put(store, tokens_of(number, LENGTH), namespace, **options)
    store.flush()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_idle_tenant_keeps_its_reservation_while_another_puts_ten_times_the_budget(
    tmp_path: Path, policy: str
) -> None:
    tenants = {"ann": TenantConfig(reserved_bytes=9 * SEQUENCE)}
    kept = [tokens_of(number, LENGTH) for number in range(9)]
    with open_with(tmp_path, tenants, eviction=policy) as store:
        for number, ids in enumerate(kept[:-1]):
            store.session(f"s{number}", namespace="ann").save(ids, kv_of(ids, ANN))
        put(store, kept[-1], ANN)
        store.flush()
        assert used(store, "ann") == 9 * SEQUENCE
        for number in range(100, 100 + 10 * BUDGET // SEQUENCE):
            put(store, tokens_of(number, LENGTH), BOB)
        store.flush()
        assert used(store, "ann") == 9 * SEQUENCE
        assert counter(store, "disk_evicted_records") > 9 * BUDGET // RECORD
        assert counter(store, "dropped_no_space") == counter(store, "fallback_reservation") == 0
        assert disk_use(tmp_path) <= BUDGET + BESIDE_BYTES
        all_is_well(store)
    with open_with(tmp_path, tenants, eviction=policy) as store:
        assert [stored(store, ids, ANN) for ids in kept] == [LENGTH] * 9
        assert store.session("s3", namespace="ann").resume().tokens == LENGTH
        assert used(store, "ann") == 9 * SEQUENCE
        all_is_well(store, deep=True)


def test_above_its_reservation_a_tenant_loses_down_to_it_and_no_byte_more(tmp_path: Path) -> None:
    reserved = 3 * SEQUENCE + RECORD
    with open_with(tmp_path, {ANN: TenantConfig(reserved_bytes=reserved)}) as store:
        fill(store, ANN, 0, 8)
        fill(store, BOB, 100, 3 * BUDGET // SEQUENCE)
        assert used(store, "ann") == reserved
        assert [stored(store, tokens_of(number, LENGTH), ANN) for number in range(8)] == [0] * 4 + [4] + [LENGTH] * 3
        all_is_well(store)


def test_two_tenants_keep_what_is_theirs_beside_a_third(tmp_path: Path) -> None:
    tenants = {ANN: TenantConfig(reserved_bytes=4 * SEQUENCE), BOB: TenantConfig(reserved_bytes=4 * SEQUENCE)}
    with open_with(tmp_path, tenants) as store:
        for round_ in range(3):
            fill(store, ANN, 100 * round_, 6)
            fill(store, BOB, 100 * round_, 6)
            fill(store, b"noise", 100 * round_, 2 * BUDGET // SEQUENCE)
            assert used(store, "ann") >= 4 * SEQUENCE
            assert used(store, "bob") >= 4 * SEQUENCE
            all_is_well(store)
        last = [stored(store, tokens_of(200 + number, LENGTH), ANN) for number in range(2, 6)]
        assert last == [LENGTH] * 4


def test_members_and_their_donors_stay_together_within_a_reservation(tmp_path: Path) -> None:
    theme = [family_stores.passage(number) for number in range(3)]
    mine = [family_stores.behind(10 * n + m, text) for n, text in enumerate(theme) for m in range(4)]

    def opened(reserved: int) -> KVStore:
        tenants = {ANN: TenantConfig(reserved_bytes=reserved)}
        settings = family_stores.config(disk=BUDGET, tenants=tenants, group_bytes=64 << 10)
        return KVStore(tmp_path, family_stores.IDENTITY, settings)

    with opened(0) as store:
        for ids in mine:
            family_stores.put(store, ids, ANN)
            store.flush()
        assert store.stats()["families"]["members"] >= 16
        taken = used(store, "ann")
    with opened(taken) as store:
        for number in range(100, 100 + 10 * BUDGET // (10 * RECORD * 4)):
            text = family_stores.passage(number)
            for beginning in range(4):
                family_stores.put(store, family_stores.behind(1000 + 10 * number + beginning, text), BOB)
        store.flush()
        assert counter(store, "disk_evicted_records") > 100
        assert counter(store, "dropped_no_space") == counter(store, "fallback_reservation") == 0
        assert used(store, "ann") == taken
        all_is_well(store)
    with opened(taken) as store:
        for ids in mine:
            hit = store.get(ids, namespace=ANN)
            assert hit is not None
            assert hit.tokens == len(ids)
            assert family_stores.is_exact(hit, ids, ANN)
        all_is_well(store, deep=True)


def test_the_budget_of_the_disk_is_kept_even_against_a_reservation(tmp_path: Path) -> None:
    tenants = {ANN: TenantConfig(reserved_bytes=9 * SEQUENCE)}
    with open_with(tmp_path, tenants, session_bytes=BUDGET * 3 // 4) as store:
        fill(store, ANN, 0, 9)
        for number in range(25):  # their tokens take most of the disk
            store.session(f"s{number}").point_to(tokens_of(100 + number, 3000))
            store.flush()
        assert counter(store, "fallback_reservation") > 0
        assert disk_use(tmp_path) <= BUDGET + BESIDE_BYTES
        all_is_well(store)


def test_what_others_may_not_give_up_is_not_taken_from_a_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_with(tmp_path, {ANN: TenantConfig(reserved_bytes=2 * SEQUENCE)}) as store:
        fill(store, ANN, 0, 2)
        fill(store, BOB, 100, 2, pin=True)
        assert store.stats()["pins"]["sequences"] == 2
        monkeypatch.setattr(DiskTier, "capacity", 2 * SEQUENCE)  # less than there is, and enough for what is reserved
        assert store._residency.evict() == []
        monkeypatch.setattr(DiskTier, "capacity", 2 * SEQUENCE - 1)
        (gone,) = store._residency.evict()
        assert counter(store, "fallback_reservation") == 1
        store._residency._remove_entries([gone])
        assert used(store, "ann") == 2 * SEQUENCE - RECORD
        monkeypatch.undo()
        all_is_well(store)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_called_the_counts_agree(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    tenants = {
        ANN: TenantConfig(reserved_bytes=20 * RECORD, quota_bytes=40 * RECORD),
        BOB: TenantConfig(quota_bytes=30 * RECORD),
    }
    host = chance.choice([0, 40_000])
    if host:
        tenants[b"noise"] = TenantConfig(host_quota_bytes=host // 2, host_reserved_bytes=host // 4)
    settings: dict[str, Any] = {
        "disk": 5 * SEGMENT, "host": host, "eviction": chance.choice(sorted(POLICIES)),
    }  # fmt: skip
    store = open_with(tmp_path, tenants, **settings)
    try:
        for _ in range(60):
            namespace = chance.choice([ANN, BOB, b"noise"])
            ids = tokens_of(chance.randrange(6), LENGTH)[: chance.randrange(1, LENGTH)]
            match chance.choice("pppppssgdufr"):
                case "p":
                    put(store, ids, namespace, pin=chance.random() < 0.1)
                case "s":
                    store.session(chance.choice("ab"), namespace=namespace).save(ids, kv_of(ids, namespace))
                case "g":
                    stored(store, ids, namespace)
                case "d":
                    store.delete(ids, namespace=namespace)
                case "u":
                    store.unpin(ids, namespace=namespace)
                case "f":
                    store.flush()
                case "r":
                    store.close()
                    store = open_with(tmp_path, tenants, **settings)
            all_is_well(store)
            assert used(store, "ann") <= 40 * RECORD
            assert used(store, "bob") <= 30 * RECORD
    finally:
        store.close()


# ---- quotas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tenant_at_its_quota_gives_up_its_own(tmp_path: Path, policy: str) -> None:
    tenants = {"ann": TenantConfig(quota_bytes=4 * SEQUENCE)}
    with open_with(tmp_path, tenants, eviction=policy) as store:
        fill(store, BOB, 0, 3)
        for number in range(12):
            fill(store, ANN, number, 1)
            assert used(store, "ann") <= 4 * SEQUENCE
        assert used(store, "ann") == 4 * SEQUENCE
        assert [stored(store, tokens_of(number, LENGTH), BOB) for number in range(3)] == [LENGTH] * 3
        assert counter(store, "dropped_quota") == 0
        assert stored(store, tokens_of(11, LENGTH), ANN) == LENGTH
        all_is_well(store, deep=True)


def test_many_puts_of_one_group_keep_the_quota(tmp_path: Path) -> None:
    with open_with(tmp_path, {ANN: TenantConfig(quota_bytes=3 * SEQUENCE)}) as store:
        fill(store, ANN, 0, 20)
        assert used(store, "ann") <= 3 * SEQUENCE
        assert stored(store, tokens_of(19, LENGTH), ANN) == LENGTH
        all_is_well(store)


def test_of_a_put_above_the_quota_the_beginning_is_kept_and_the_rest_counted(tmp_path: Path) -> None:
    with open_with(tmp_path, {ANN: TenantConfig(quota_bytes=10 * RECORD)}, host=1 << 20) as store:
        fill(store, ANN, 0, 1)
        assert counter(store, "dropped_quota") == 6
        assert stored(store, tokens_of(0, LENGTH), ANN) == 40
        assert used(store, "ann") == 10 * RECORD
        all_is_well(store)
        fill(store, ANN, 1, 1)
        assert stored(store, tokens_of(1, LENGTH), ANN) == 40
        assert stored(store, tokens_of(0, LENGTH), ANN) == 0
        all_is_well(store)
    with open_with(tmp_path, {}) as store:
        assert stored(store, tokens_of(1, LENGTH), ANN) == 40
        all_is_well(store, deep=True)


def test_a_growing_sequence_stays_within_its_quota(tmp_path: Path) -> None:
    ids = tokens_of(5, 200)
    with open_with(tmp_path, {ANN: TenantConfig(quota_bytes=20 * RECORD)}, host=1 << 20) as store:
        for end in range(3, 200, 7):
            put(store, ids[:end], ANN)
            store.flush()
            assert used(store, "ann") <= 20 * RECORD
            all_is_well(store)
        assert stored(store, ids, ANN) == 80


def test_a_lower_quota_holds_from_the_open_on(tmp_path: Path) -> None:
    with open_with(tmp_path, {}) as store:
        fill(store, ANN, 0, 5)
    with open_with(tmp_path, {ANN: TenantConfig(quota_bytes=2 * SEQUENCE)}) as store:
        assert used(store, "ann") == 2 * SEQUENCE
        assert [stored(store, tokens_of(number, LENGTH), ANN) for number in range(5)] == [0] * 3 + [LENGTH] * 2
        all_is_well(store)


def test_what_is_pinned_stays_and_the_put_is_dropped(tmp_path: Path) -> None:
    with open_with(tmp_path, {ANN: TenantConfig(quota_bytes=2 * SEQUENCE)}) as store:
        fill(store, ANN, 0, 2, pin=True)
        fill(store, ANN, 2, 1)
        assert counter(store, "dropped_quota") == 16
        assert [stored(store, tokens_of(number, LENGTH), ANN) for number in range(3)] == [LENGTH, LENGTH, 0]
        all_is_well(store)
        store.unpin(tokens_of(0, LENGTH), namespace=ANN)
        fill(store, ANN, 3, 1)
        assert [stored(store, tokens_of(number, LENGTH), ANN) for number in (0, 1, 3)] == [0, LENGTH, LENGTH]
        all_is_well(store)


# ---- host memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "disk"), [("lru", BUDGET), *((policy, 0) for policy in sorted(POLICIES))], ids=str)
def test_host_memory_keeps_what_is_reserved_and_no_more_than_the_quota(tmp_path: Path, policy: str, disk: int) -> None:
    tenants = {
        # What leaves the disk leaves host memory, too.
        ANN: TenantConfig(reserved_bytes=min(disk, 3 * SEQUENCE), host_reserved_bytes=3 * SEQUENCE),
        BOB: TenantConfig(host_quota_bytes=2 * SEQUENCE + RECORD),
    }
    with open_with(tmp_path, tenants, disk, host=8 * SEQUENCE, eviction=policy) as store:
        fill(store, ANN, 0, 3)
        for number in range(5):
            fill(store, BOB, 100 + number, 1)
            fill(store, b"noise", 200 + 8 * number, 8)
            found = store.stats()["namespaces"]
            assert found["ann"]["host_bytes"] == 3 * SEQUENCE
            assert found["bob"]["host_bytes"] <= 2 * SEQUENCE + RECORD
            all_is_well(store)
        for number in range(3):
            hit = store.get(tokens_of(number, LENGTH), namespace=ANN)
            assert hit is not None
            assert hit.tiers == {"host": LENGTH}
        assert store.stats()["host"]["bytes"] <= 8 * SEQUENCE


def test_above_its_reservation_a_tenant_loses_host_memory_down_to_it(tmp_path: Path) -> None:
    tenants = {ANN: TenantConfig(host_reserved_bytes=2 * SEQUENCE + RECORD)}
    with open_with(tmp_path, tenants, 0, host=6 * SEQUENCE) as store:
        fill(store, ANN, 0, 5)
        fill(store, BOB, 100, 20)
        assert store.stats()["namespaces"]["ann"]["host_bytes"] == 2 * SEQUENCE + RECORD
        assert [stored(store, tokens_of(number, LENGTH), ANN) for number in range(5)] == [0, 0, 4, LENGTH, LENGTH]
        all_is_well(store)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_reservations_must_fit_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reserved_bytes: .* in all, and at most"):
        open_with(
            tmp_path / "new",
            {"a": TenantConfig(reserved_bytes=BUDGET // 2), "b": TenantConfig(reserved_bytes=BUDGET // 3)},
        )
    assert not (tmp_path / "new").exists()
    with open_with(tmp_path / "old", {}):
        pass
    with pytest.raises(ConfigError, match="reserve less"):
        open_with(tmp_path / "old", {"a": TenantConfig(reserved_bytes=BUDGET - SEGMENT)})
    with open_with(tmp_path / "old", {"a": TenantConfig(reserved_bytes=BUDGET // 2)}) as store:
        assert store.stats()["namespaces"]["a"]["reserved_bytes"] == BUDGET // 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tenants": {"a": 5}}, "expected a mapping"),
        ({"tenants": [("a", TenantConfig())]}, "expected a mapping"),
        ({"tenants": {5: TenantConfig()}}, "expected namespaces as text or bytes"),
        ({"tenants": {"a": TenantConfig()}, "namespaces": ("b",)}, "not one of the configured"),
        ({"tenants": {"a": TenantConfig(reserved_bytes=9 << 30)}}, "above disk.bytes"),
        ({"tenants": {"a": TenantConfig(host_reserved_bytes=2 << 30)}}, "above host.bytes"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StoreConfig(**settings)


@pytest.mark.parametrize(
    "bad",
    [{"quota_bytes": 0}, {"quota_bytes": 5, "reserved_bytes": 6}, {"reserved_bytes": -1}, {"host_quota_bytes": "1"}],
)
def test_a_tenant_that_does_not_fit_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tenants"):
        TenantConfig(**bad)


def test_tenants_are_read_from_toml_and_the_environment(tmp_path: Path) -> None:
    wanted = StoreConfig(tenants={"ann": TenantConfig(quota_bytes=1 << 30, reserved_bytes=1 << 20)})
    file = tmp_path / "store.toml"
    file.write_text("[tenants.ann]\nquota_bytes = 1073741824\nreserved_bytes = 1048576\n")
    assert StoreConfig.from_toml(file) == wanted
    text = '{"ann": {"quota_bytes": 1073741824, "reserved_bytes": 1048576}}'
    assert StoreConfig.from_env({"KVSTORE_TENANTS": text}) == wanted
    for bad in ("{", "[]", '{"ann": 5}', '{"ann": {"quota": 5}}', '{"ann": {"quota_bytes": "five"}}'):
        with pytest.raises(ConfigError, match=r"TENANTS|tenants"):
            StoreConfig.from_env({"KVSTORE_TENANTS": bad})
