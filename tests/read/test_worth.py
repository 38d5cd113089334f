"""Load or recompute in a store: what a get leaves out, what it says of it, and that it goes on looking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import profile_stores
import pytest
from small_stores import IDENTITY, config, kv_of, put, scratch, stored, tokens_of

from kvstore import Hit, KVStore, Reason

TEXT = tokens_of(1, 30)  # blocks of 4 tokens
SLOW, FAST = [(4096, 1e6), (65536, 1e6)], [(4096, 1e-6), (65536, 1e-6)]


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch() as folder:
        with KVStore(folder, IDENTITY, config()) as store:
            put(store, TEXT)
            store.session("alice").save(TEXT, kv_of(TEXT))
        yield folder


def opened(path: Path, disk: list[tuple[int, float]], **settings: Any) -> KVStore:
    """A store that knows that a token takes a second to compute, and how fast its disk is."""
    store = KVStore(path, IDENTITY, config(**settings))
    store.gate.observe_prefill(1000, 1000.0)
    store.gate.check("disk", disk)
    return store


def counters(store: KVStore) -> dict[str, float]:
    found: dict[str, float] = store.stats()["counters"]
    return found


def test_a_store_that_was_told_nothing_loads_everything(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        store.gate.check("disk", SLOW)
        assert stored(store, TEXT) == 30
        assert "get_withheld_tokens" not in counters(store)


def test_a_disk_that_pays_is_read(path: Path) -> None:
    with opened(path, FAST) as store:
        assert stored(store, TEXT) == 30
        hit = store.get(TEXT)
        assert (hit.withheld, hit.reason) == (0, Reason.STORED)


def test_a_disk_that_does_not_pay_is_a_counted_miss(path: Path) -> None:
    with opened(path, SLOW) as store:
        assert store.get(TEXT) is None
        found = counters(store)
        assert (found["get_misses"], found["short_not_worth"], found["get_withheld_tokens"]) == (1, 1, 30)
        assert found.get("short_never_put", 0) == 0
        assert store.contains(TEXT) == 30
        assert store.check(deep=True).ok


def test_explain_says_so_and_changes_nothing(path: Path) -> None:
    with opened(path, SLOW) as store:
        found = store.explain(TEXT)
        assert (found.tokens, found.reason) == (0, Reason.NOT_WORTH)
        assert "loading it is expected to take longer" in found.why
        assert counters(store).get("short_not_worth", 0) == 0
        longer = store.explain([*TEXT.tolist(), 1, 2])
        assert [block.reason for block in longer.blocks][-1] is not Reason.NOT_WORTH
    with opened(path, FAST) as store:
        assert store.explain(TEXT).tokens == 30


def test_what_is_in_memory_is_returned_without_what_is_not(path: Path) -> None:
    with opened(path, SLOW) as store:
        assert store.prefetch(TEXT[:8]).result() == 8
        store.gate.check("disk", SLOW)
        hit = store.get(TEXT)
        assert (hit.tokens, hit.withheld, hit.reason, hit.tiers) == (8, 22, Reason.NOT_WORTH, {"host": 8})
        assert store.explain(TEXT).tokens == 8
        assert stored(store, TEXT) == 8


@pytest.mark.parametrize("ask", [lambda s: s.get(TEXT, gate=False), lambda s: s.session("alice").resume()])
def test_all_of_it_comes_where_the_gate_is_not_asked(path: Path, ask: Any) -> None:
    with opened(path, SLOW) as store:
        hit: Hit = ask(store)
        assert (hit.tokens, hit.withheld) == (30, 0)


def test_the_setting_turns_it_off_and_a_call_turns_it_on(path: Path) -> None:
    with opened(path, SLOW, gate="off") as store:
        assert store.explain(TEXT).tokens == 30
        assert store.get(TEXT).tokens == 30
    with opened(path, SLOW, gate="off") as store:
        assert store.get(TEXT, gate=True) is None


def test_a_rate_in_the_settings_is_enough(path: Path) -> None:
    with KVStore(path, IDENTITY, config(prefill_tokens_per_s=1.0)) as store:
        assert store.stats()["gate"]["disk_latency_s"] >= 0  # a short read was timed when it was opened
        store.gate.check("disk", SLOW)
        assert store.get(TEXT) is None


def test_a_tier_of_which_nothing_is_known_is_timed_before_the_decision(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        store.gate.observe_prefill(1000, 1000.0)
        assert store.gate.lacks("disk")
        assert store.get(TEXT).tokens == 30
        assert not store.gate.lacks("disk")


def test_a_disk_that_became_fast_again_is_noticed_in_the_background(path: Path) -> None:
    now = [100.0]
    store = opened(path, SLOW)
    with store:
        store.gate.clock = lambda: now[0]
        store.gate.check("disk", SLOW)
        now[0] += 60
        assert store.get(TEXT) is None  # and the read is timed meanwhile
    latency, _ = store.gate.load.line("disk")  # close waits for it
    assert latency < 1e5


def test_what_is_known_lives_as_long_as_the_store(path: Path) -> None:
    opened(path, FAST).close()
    with KVStore(path, IDENTITY, config()) as store:
        assert store.gate.prefill_seconds(1000) == pytest.approx(1000, rel=0.01)
        store.gate.check("disk", SLOW)
        assert store.get(TEXT) is None
    before = (path / "gate.json").read_bytes()
    KVStore(path, IDENTITY, config()).close()
    assert (path / "gate.json").read_bytes() == before  # nothing new was seen
    (path / "gate.json").write_bytes(before[:-9])
    with KVStore(path, IDENTITY, config()) as store:
        assert counters(store)["damaged_estimates"] == 1
        assert stored(store, TEXT) == 30


def test_a_store_that_was_told_nothing_leaves_no_file(path: Path) -> None:
    with KVStore(path, IDENTITY, config()) as store:
        assert stored(store, TEXT) == 30
    assert not (path / "gate.json").exists()


def test_a_store_whose_budget_is_used_up_keeps_no_estimates(path: Path) -> None:
    store = opened(path, FAST)
    free = store.stats()["disk"]["budget"] - store.stats()["disk"]["used_bytes"]
    (path / "ballast").write_bytes(b"x" * int(free))
    store.close()
    assert not (path / "gate.json").exists()


@pytest.mark.parametrize(("reads", "said"), [(FAST, 1), ([(4096, 0.01), (65536, 0.16)], 0)])
def test_a_codec_slower_than_the_disk_is_said_when_the_store_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[int, float]], said: int
) -> None:
    folder, tokens = path / "other", profile_stores.tokens_of(1, 64)
    with profile_stores.open_store(folder, profile_stores.save(0, path)) as store:
        store.put(tokens, profile_stores.kv_of(tokens))
    monkeypatch.setattr("kvstore.read.worth.timed_reads", lambda *_: reads)
    with profile_stores.open_store(folder) as store:
        assert counters(store).get("slow_codec", 0) == said
