"""A store that learns from its own blocks: what it adopts, what becomes of old and new records, when it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import learncases
import pytest
import small_stores
import torch
from awaiting import calls_of

from kvstore import KVStore, TierConfig
from kvstore.config import MIB
from kvstore.errors import ConfigError, ReadOnlyStore
from kvstore.learning import learner as learning

ENTROPY, PREDICTIVE, DONOR = 7, 2, 3
BLOCKS = learncases.LENGTH // 64 * learncases.ENOUGH


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with enough to learn from; to be copied."""
    path = tmp_path_factory.mktemp("filled") / "store"
    with learncases.open_store(path) as store:
        learncases.fill(store)
    return path


@pytest.fixture
def path(filled: Path, tmp_path: Path) -> Path:
    small_stores.shutil.copytree(filled, tmp_path / "store")
    return tmp_path / "store"


def test_what_is_learned_is_adopted_and_all_that_is_stored_takes_less(path: Path) -> None:
    with learncases.open_store(path) as store:
        before = store.stats()["disk"]["bytes"]
        status = store.learn()
        assert status.state == "adopted", status
        assert status.after > 1.05 * status.before
        assert store.stats()["learning"]["profile_bytes"] == status.profile_bytes > 0
        counters = store.stats()["counters"]
        assert counters["learned_profiles"] == 1
        assert counters["recoded_records"] == BLOCKS
        assert before - store.stats()["disk"]["bytes"] == counters["recoded_saved_bytes"] > 0.05 * before
        assert set(learncases.codecs_on_disk(store)) == {PREDICTIVE}
        assert learncases.is_whole(store, range(learncases.ENOUGH))
        small_stores.all_is_well(store, deep=True)


def test_memory_that_was_freed_goes_back_after_work_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(learning, "give_back_freed", lambda: given.append(1))
    with learncases.open_store(path) as store:
        assert store.learn().state == "adopted"
        assert given == [1]
        learner = store._engine.learner
        assert learner is not None
        learner._work(learning.silent, at_once=False)  # as every two seconds; there is nothing to do
        assert given == [1]


def test_new_records_are_coded_with_it_and_so_they_are_after_the_next_open(path: Path) -> None:
    with learncases.open_store(path) as store:
        store.learn()
        learncases.fill(store, first=100, count=1)
    with learncases.open_store(path) as store:
        status = store.stats()["learning"]
        assert (status["adopted"], status["adopted_at"] > 0) == (1, True)
        learncases.fill(store, first=200, count=1)
        assert set(learncases.codecs_on_disk(store)) == {PREDICTIVE}
        assert all(
            learncases.is_whole(store, numbers)
            for numbers in (range(learncases.ENOUGH), range(100, 101), range(200, 201))
        )


def test_what_does_not_get_smaller_is_not_adopted(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, noise=1.0)
        status = store.learn()
        assert status.state == "not worth it", status
        assert status.after < 1.05 * status.before
        assert set(learncases.codecs_on_disk(store)) == {ENTROPY}
        assert not (tmp_path / "store" / "profiles").exists()
        assert "learned_profiles" not in store.stats()["counters"]


def test_too_few_blocks_teach_nothing(tmp_path: Path) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        learncases.fill(store, count=2)
        status = store.learn()
        assert (status.state, status.blocks) == ("waiting", 0)
        assert "too few" in status.why


def test_a_profile_that_takes_more_of_the_budget_than_it_saves_is_not_adopted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learncases.open_store(path) as store:
        monkeypatch.setattr(learning, "LEAST_GAIN", 0.9)
        assert store.learn().state == "not worth it"
        assert not (path / "profiles").exists()


def test_records_that_memory_holds_stay_as_they_are_on_disk(path: Path) -> None:
    with learncases.open_store(path, host=64 * MIB) as store:
        store.prefetch(learncases.tokens_of(3)).result()
        status = store.learn()
        assert "in memory" in status.why
        codecs = learncases.codecs_on_disk(store)
        assert codecs.count(ENTROPY) == learncases.LENGTH // 64
        assert codecs.count(PREDICTIVE) == BLOCKS - learncases.LENGTH // 64


def test_members_are_decoded_from_donors_that_were_recoded(path: Path) -> None:
    with learncases.open_store(path) as store:
        shared = learncases.tokens_of(4)
        later = learncases.np.concatenate([learncases.tokens_of(300, 64), shared[64:256]])
        kv = learncases.kv_of(learncases.tokens_of(4))
        first = learncases.kv_of(learncases.tokens_of(300, 64))
        joined = [
            tuple(learncases.torch.cat([a, b[:, 64:256]], 1) for a, b in zip(one, two, strict=True))
            for one, two in zip(first, kv, strict=True)
        ]
        store.put(later, joined)
        store.flush()
        assert DONOR in learncases.codecs_on_disk(store)
        assert store.learn().state == "adopted"
        assert set(learncases.codecs_on_disk(store)) == {DONOR, PREDICTIVE}
        hit = store.get(later)
        assert hit is not None
        assert hit.tokens == len(later)
        for got, want in zip(hit.layers, joined, strict=True):
            assert all(learncases.torch.equal(a[0], b) for a, b in zip(got, want, strict=True))
        small_stores.all_is_well(store, deep=True)


def test_a_reader_that_is_open_meanwhile_reads_what_another_process_recoded(path: Path) -> None:
    with KVStore(path, learncases.IDENTITY, learncases.config(), read_only=True) as reader:
        assert learncases.is_whole(reader, range(2))
        with pytest.raises(ReadOnlyStore, match="read_only"):
            reader.learn()
        program = "from kvstore.learning import trial; trial.LEAST_TOKENS = 2048; from kvstore.cli import main; main()"
        command = [sys.executable, "-c", program, "learn", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        assert "adopted: a profile of" in done.stdout
        assert learncases.is_whole(reader, range(learncases.ENOUGH))
        assert set(learncases.codecs_on_disk(reader)) == {PREDICTIVE}


def test_the_profile_counts_in_the_budget_of_the_disk(path: Path) -> None:
    with learncases.open_store(path) as store:
        learncases.fill(store, first=learncases.ENOUGH, count=12)
    budget = small_stores.disk_use(path) + 50_000  # not enough for the profile
    with learncases.open_store(path, disk=TierConfig(budget, "auto")) as store:
        assert store.learn().state in ("adopted", "recoding")
        assert store.stats()["disk"]["used_bytes"] <= budget
    assert small_stores.disk_use(path) <= budget


def test_a_store_learns_by_itself_while_nobody_calls_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_TOKENS", 2048)
    monkeypatch.setattr(learning, "_TICK_S", 0.05)
    monkeypatch.setattr(learning, "_BEGIN_S", 0.0)
    with calls_of(learning.Learner, "_recode", 1) as recoded, learncases.open_store(path, learn="auto") as store:
        assert recoded.wait(60)
        assert set(learncases.codecs_on_disk(store)) == {PREDICTIVE}
        assert learncases.is_whole(store, range(learncases.ENOUGH))


def test_closing_ends_what_is_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_TOKENS", 2048)
    monkeypatch.setattr(learning, "_TICK_S", 0.01)
    monkeypatch.setattr(learning, "_BEGIN_S", 0.0)
    with calls_of(learning, "choose", 1) as chosen:
        store = learncases.open_store(path, learn="auto")
        assert chosen.wait(60)
        store.close()
    learner = store._engine.learner
    assert learner is not None
    assert learner._thread is not None
    assert not learner._thread.is_alive()
    with learncases.open_store(path) as again:
        small_stores.all_is_well(again, deep=True)
        assert learncases.is_whole(again, range(learncases.ENOUGH))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"disk": TierConfig(64 * MIB, "entropy")}, "settings name"),
        ({"disk": TierConfig(0)}, "without a disk"),
    ],
)
def test_a_store_with_nothing_to_learn_says_why(tmp_path: Path, settings: dict, why: str) -> None:
    with (
        learncases.open_store(tmp_path / "store", host=MIB, **settings) as store,
        pytest.raises(ConfigError, match=why),
    ):
        store.learn()


def test_an_error_while_learning_is_counted_and_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(learning, "run", fails)
    with learncases.open_store(path) as store:
        assert store.learn().state == "failed"
        assert store.stats()["counters"]["learning_failed"] == 1
        assert learncases.is_whole(store, range(2))


@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_caches_that_are_all_alike_are_not_worth_it_until_others_come(tmp_path: Path, value: float) -> None:
    with learncases.open_store(tmp_path / "store") as store:
        for number in range(learncases.ENOUGH):
            tokens = learncases.tokens_of(number)
            store.put(tokens, [tuple(torch.full_like(x, value) for x in pair) for pair in learncases.kv_of(tokens)])
        store.flush()
        status = store.learn()
        assert status.state == "not worth it", status
        assert status.why == "the blocks are too much alike to fit a predictor to them"
        assert "learning_failed" not in store.stats()["counters"]
        learncases.fill(store, first=100, count=2 * learncases.ENOUGH)
        assert store.learn().state == "adopted"
