"""What a store learns from blocks that are coded against others: how what they differ in goes on."""

from __future__ import annotations

from pathlib import Path

import learncases
import pytest
import small_stores

from kvstore import KVStore
from kvstore.learning import differences
from kvstore.learning.members import MemberReader

FAMILIES = [(number, variant) for variant in range(2) for number in range(learncases.ENOUGH)]
NEW = (0, 7)  # a family that is put when all is learned


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "LEAST_ROWS", 1024)


def put_families(store: KVStore, families: list[tuple[int, int]]) -> None:
    for number, variant in families:
        tokens, layers = learncases.behind(number, variant)
        store.put(tokens, layers)
    store.flush()


def sections(store: KVStore) -> tuple[str, ...]:
    learner = store._engine.learner
    assert learner is not None
    described = learner._reader.profiles.described
    return () if described is None else described.sections


def new_member_bytes(store: KVStore) -> int:
    """What the blocks of one more family take."""
    before = store.stats()["counters"].get("member_bytes", 0)
    put_families(store, [NEW])
    return int(store.stats()["counters"]["member_bytes"] - before)


def all_come_back(store: KVStore, families: list[tuple[int, int]]) -> bool:
    return learncases.is_whole(store, range(learncases.ENOUGH)) and all(
        learncases.comes_back(store, *learncases.behind(*family)) for family in families
    )


def test_a_store_with_members_learns_their_differences_with_the_rest(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store)
        put_families(store, FAMILIES)
        assert store.learn().state == "adopted"
        assert sections(store) == ("donor", "levels", "lossless")
        learned = new_member_bytes(store)
        assert all_come_back(store, [*FAMILIES, NEW])
        small_stores.all_is_well(store, deep=True)
    with learncases.open_store(tmp_path / "store") as store:
        assert all_come_back(store, [*FAMILIES, NEW])
    with learncases.open_store(tmp_path / "other") as store:
        learncases.fill(store)
        assert store.learn().state == "adopted"
        assert sections(store) == ("levels", "lossless")
        assert learned < new_member_bytes(store)
        assert all_come_back(store, [NEW])


def test_members_that_come_later_are_learned_from_later(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store)
        assert store.learn().state == "adopted"
        put_families(store, FAMILIES)
        assert sections(store) == ("levels", "lossless")
        before = store.learning
        assert store.learn().state == "adopted"
        assert sections(store) == ("donor", "levels", "lossless")
        assert store.learning.profile_bytes > before.profile_bytes
        assert store.learning.after == before.after
        assert store.stats()["counters"]["learned_profiles"] == 2
        put_families(store, [NEW])
        assert all_come_back(store, [*FAMILIES, NEW])
        small_stores.all_is_well(store, deep=True)


def test_a_member_is_read_with_its_donors_or_not_at_all(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, count=1)
        put_families(store, [(0, 0)])
        learner = store._engine.learner
        assert learner is not None
        members = MemberReader(learner._reader)
        found = list(members.newest_first(learner._next_record(), lambda: None))
        assert len(found) == learncases.LENGTH // 64
        member = members.read(found[0])
        assert member is not None
        assert member.rows == 64
        (k, v), *_ = member.differences()
        assert k.shape == v.shape == (64, learncases.HEADS * learncases.DIM)
        assert 0.01 < abs(v).mean() < 0.5
        store.delete(learncases.tokens_of(0))
        assert members.read(found[0]) is None
