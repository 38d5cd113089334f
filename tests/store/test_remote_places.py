"""Caches with windows and states by way of a remote tier: another store goes on where the one that put them would."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rc
import seeds
from kvcases import kv_of, open_store, tokens
from length import part
from placecases import LAYOUTS, got, is_exact, put
from statecases import HYBRID, cache_of
from windowcases import ONLY_SLIDING, WINDOWED, kept

from kvstore import KVLayout, RemoteConfig, TierConfig
from kvstore.config import MIB
from kvstore.core.explanation import Reason
from kvstore.core.places import Place
from kvstore.errors import RemoteUnavailable
from kvstore.tiers.remote.cleaning import orphans, to_remove
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.faulty import FaultPlan
from kvstore.tiers.remote.engines.memory import MemoryEngine
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.survey import survey


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KVLayout:
    return LAYOUTS[request.param]


@pytest.fixture
def remote(tmp_path: Path) -> RemoteConfig:
    return rc.settings(f"memory:{tmp_path.name}")


def filled(path: Path, layout: KVLayout, remote: RemoteConfig, *sequences: Any) -> list[int]:
    """Put sequences and write them to the remote tier; returns what the store itself would give of each."""
    with open_store(path, layout, remote=remote) as store:
        for ids in sequences:
            put(store, ids, layout)
            assert store.flush(remote=True).remote_due == 0
        return [store.contains(ids) for ids in sequences]


def test_a_machine_that_has_nothing_goes_on_where_the_other_would(
    tmp_path: Path, layout: KVLayout, remote: RemoteConfig
) -> None:
    sequences = [tokens(count, seed=count) for count in (1, 7, 8, 21, 40, 100)]
    assert filled(tmp_path / "a", layout, remote, *sequences) == [1, 7, 8, 21, 40, 100]
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        for ids in sequences:
            longer = np.concatenate([ids, tokens(30, seed=99)])
            hit = store.get(longer)
            assert hit is not None
            assert (hit.tokens, hit.tiers) == (len(ids), {"remote": len(ids)})
            assert is_exact(hit, ids, layout)
        store.flush()
        assert store.check(deep=True).problems == ()
    with open_store(tmp_path / "b", layout) as store:  # and keeps it
        assert [got(store, ids, layout) for ids in sequences] == [len(ids) for ids in sequences]


def test_the_turns_of_a_conversation_are_places_of_their_own(
    tmp_path: Path, layout: KVLayout, remote: RemoteConfig
) -> None:
    ids, turns = tokens(150, seed=3), (61, 64, 80, 133)
    filled(tmp_path / "a", layout, remote, *(ids[:count] for count in turns))
    other = np.concatenate([ids[:81], tokens(50, seed=4)])
    with open_store(tmp_path / "local", layout) as local:
        for count in turns:
            put(local, ids[:count], layout)
        for number, asked in enumerate((ids, ids[:132], ids[:79], ids[:63], other)):
            with open_store(tmp_path / f"b{number}", layout, remote=remote) as store:
                at = got(store, asked, layout)
                want = local.contains(asked)
                assert at == want or (not layout.states and at == max(t for t in turns if t <= want))


def test_local_blocks_come_first_and_the_rest_from_there(
    tmp_path: Path, layout: KVLayout, remote: RemoteConfig
) -> None:
    ids = tokens(100, seed=5)
    filled(tmp_path / "a", layout, remote, ids[:61], ids)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        assert got(store, ids[:70], layout) == 61
        store.flush()
        hit = store.get(ids)
        assert hit is not None
        assert is_exact(hit, ids, layout)
        assert (hit.tokens, hit.tiers["remote"] < 100) == (100, True)
        store.flush()
        assert store.check(deep=True).problems == ()
    with open_store(tmp_path / "b", layout) as store:
        assert [got(store, ids[:70], layout), got(store, ids, layout)] == [61, 100]


def test_a_cache_that_kept_everything_can_be_used_behind_every_block(tmp_path: Path, remote: RemoteConfig) -> None:
    ids = tokens(100)
    with open_store(tmp_path / "a", WINDOWED, remote=remote) as store:
        store.put(ids, kv_of(ids, WINDOWED))
        assert store.flush(remote=True).remote_due == 0
    with open_store(tmp_path / "b", WINDOWED, remote=remote) as store:
        for count, want in ((7, 0), (77, 72), (99, 96), (100, 100)):
            assert got(store, ids[:count], WINDOWED) == want


def test_each_block_is_written_once_whoever_puts_it(tmp_path: Path, layout: KVLayout, remote: RemoteConfig) -> None:
    ids = tokens(100, seed=6)
    filled(tmp_path / "a", layout, remote, ids)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        put(store, ids, layout)
        assert store.flush(remote=True).remote_due == 0
        counts = rc.counters(store)
        assert counts.get("remote_written_records", 0) == 0


@pytest.mark.parametrize("upload", ["second use", "eviction"])
def test_places_are_written_as_the_policy_says(
    tmp_path: Path, layout: KVLayout, remote: RemoteConfig, upload: Any
) -> None:
    ids = tokens(45, seed=7)
    remote = replace(remote, upload=upload)
    with open_store(tmp_path / "a", layout, remote=remote, disk=TierConfig(2 * MIB, "zstd")) as store:
        put(store, ids, layout)
        store.flush(remote=True)
        assert "remote_written_records" not in rc.counters(store)
        if upload == "second use":
            assert got(store, ids, layout) == 45
        other = 1000
        while upload == "eviction" and store.contains(ids) == 45:
            put(store, tokens(300, seed=other), layout)
            store.flush()
            other += 1
        assert store.flush(remote=True).remote_due == 0
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        assert got(store, ids, layout) == 45


def test_harm_is_a_counted_miss(tmp_path: Path, layout: KVLayout, remote: RemoteConfig) -> None:
    engine, cases = open_engine(remote.url), list(product(("place", "record"), ("bit", "short", "gone", "another")))
    sequences = [tokens(45, seed=800 + number) for number in range(len(cases))]
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        for ids, (kind, harm) in zip(sequences, cases, strict=True):
            before = set(engine.list("kvs1/", 60))
            for count in (24, 45):
                put(store, ids[:count], layout)
                assert store.flush(remote=True).remote_due == 0
            new = sorted(set(engine.list("kvs1/", 60)) - before)
            assert any(name.endswith((".mark", ".place")) for name in new)
            do_harm(engine, [n for n in new if n.endswith(".place") == (kind == "place") and ".mark" not in n], harm)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        for number, (ids, (_, harm)) in enumerate(zip(sequences, cases, strict=True)):
            damaged = rc.counters(store).get("remote_damaged", 0)
            assert (store.get(ids), rc.counters(store)["get_misses"]) == (None, number + 1)
            assert (rc.counters(store).get("remote_damaged", 0) > damaged) == (harm != "gone")
        store.flush()
        assert store.check(deep=True).problems == ()


def do_harm(engine: RemoteEngine, names: list[str], harm: str) -> None:
    values = [read(engine, name) for name in names]
    engine.delete(names, 60)
    for number, name in enumerate(names):
        value = bytearray(values[number])
        value[len(value) // 2] ^= harm == "bit"
        if harm != "gone":
            engine.put(name, [{"short": value[:-3], "another": values[number - 1]}.get(harm, value)], 60)


def read(engine: RemoteEngine, name: str) -> bytes:
    value = bytearray(1 << 20)
    size = engine.get_into(name, memoryview(value), 60)
    assert size is not None
    return bytes(value[:size])


def test_what_does_not_come_leaves_what_is_here(tmp_path: Path, layout: KVLayout, remote: RemoteConfig) -> None:
    ids = tokens(100, seed=9)
    filled(tmp_path / "a", layout, remote, ids[:61], ids)
    engine = open_engine(remote.url)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        put(store, ids[:61], layout)
        store.flush(remote=True)
        engine.delete([name for name in engine.list("kvs1/", 60) if not name.endswith((".place", ".mark"))], 60)
        hit = store.get(ids)
        assert hit is not None
        assert (hit.tokens, hit.reason) == (61, Reason.REMOTE_GONE)
        assert is_exact(hit, ids, layout)


def test_where_a_record_of_the_last_place_is_gone_the_one_before_is_taken(
    tmp_path: Path, layout: KVLayout, remote: RemoteConfig
) -> None:
    ids = tokens(60, seed=17)
    filled(tmp_path / "a", layout, remote, ids[:29], ids)
    engine = open_engine(remote.url)
    engine.delete([value.name for value in survey(engine, 60) if value.is_record and value.depth == 56], 60)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        hit = store.get(ids)
        assert hit is not None
        assert (hit.tokens >= 29, hit.reason) == (True, Reason.REMOTE_GONE)
        assert is_exact(hit, ids, layout)


@pytest.mark.parametrize("name", ["place", "record"])
def test_a_read_that_fails_hides_nothing(
    tmp_path: Path, remote: RemoteConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, remote = tokens(21, seed=18), replace(remote, miss_s=3600.0)
    filled(tmp_path / "a", HYBRID, remote, ids)
    read, failed = MemoryEngine.get_into, list[str]()

    def fail_once(self: MemoryEngine, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        if not failed and key.endswith(".place") == (name == "place"):
            failed.append(key)
            raise RemoteUnavailable("not now")
        return read(self, key, buffer, timeout_s)

    monkeypatch.setattr(MemoryEngine, "get_into", fail_once)
    with open_store(tmp_path / "b", HYBRID, remote=remote) as store:
        assert (got(store, ids, HYBRID), len(failed)) == (0, 1)
        assert got(store, ids, HYBRID) == 21


def test_a_mark_is_read_where_it_led_somewhere(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that gives up what was not read for long would lose it otherwise: of marks, all else only asks."""
    ids = tokens(21, seed=19)
    filled(tmp_path / "a", HYBRID, remote, ids)
    read, names = MemoryEngine.get_into, list[str]()

    def noted(self: MemoryEngine, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        names.append(key)
        return read(self, key, buffer, timeout_s)

    monkeypatch.setattr(MemoryEngine, "get_into", noted)
    with open_store(tmp_path / "b", HYBRID, remote=remote) as store:
        assert got(store, ids, HYBRID) == 21
        rc.until(lambda: any(name.endswith(".mark") for name in names))


FORGED: dict[str, dict[str, Any]] = {
    "another key": {"key": bytes(32)},
    "another namespace": {"namespace": bytes(32)},
    "another end": {"end": 156},
    "blocks of another size": {"block_tokens": 9},
    "windows that are not there": {"cuts": (1 << 31,) * 20},
    "states of any size": {"state_bytes": 1 << 60},
    "many states": {"state_bytes": 50_000, "with_states": (True,) * 20},
    "no states": {"state_bytes": 0, "with_states": (False,) * 20},
    "states without bytes": {"state_bytes": 0},
}


@pytest.mark.parametrize("kind", ["sliding", "windows and states"])
def test_a_forged_place_is_a_counted_miss(tmp_path: Path, remote: RemoteConfig, kind: str) -> None:
    engine, layout = open_engine(remote.url), LAYOUTS[kind]
    sequences = {name: tokens(157, seed=900 + number) for number, name in enumerate(FORGED)}
    if kind == "sliding":
        del sequences["no states"], sequences["states without bytes"]  # so they are
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        for case, ids in sequences.items():
            before = set(engine.list("kvs1/", 60))
            put(store, ids, layout)
            assert store.flush(remote=True).remote_due == 0
            (name,) = (name for name in set(engine.list("kvs1/", 60)) - before if name.endswith(".place"))
            forged = replace(Place.unpack(read(engine, name)), **FORGED[case])
            engine.delete([name], 60)
            engine.put(name, [forged.pack()], 60)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        for number, ids in enumerate(sequences.values(), start=1):
            assert (store.get(ids), rc.counters(store)["remote_damaged"]) == (None, number)
    assert len(survey(engine, 60)) > len(sequences)


def test_a_server_that_says_that_all_is_there_keeps_no_get(tmp_path: Path, remote: RemoteConfig) -> None:
    """Marks and places behind every block: the search ends with the deadline of the get."""
    now, remote = [0.0], replace(remote, deadline_s=0.5, settings={"faults": FaultPlan(ghosts=1.0)})

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    with open_store(tmp_path / "a", HYBRID, remote=remote) as store:
        there = store._engine.remote
        assert there is not None
        there.tier.clock = clock
        assert store.get(tokens(4000, seed=30)) is None
        assert (there.tier.stats()["engine_calls"] < 60, now[0] < 1) == (True, True)  # of 500 blocks


def test_places_are_sealed_with_the_fleet_key(tmp_path: Path, remote: RemoteConfig) -> None:
    ids, sealed = tokens(21, seed=31), replace(remote, key=b"k" * 32)
    filled(tmp_path / "a", HYBRID, sealed, ids)
    with open_store(tmp_path / "b", HYBRID, remote=sealed) as store:
        assert got(store, ids, HYBRID) == 21
    with open_store(tmp_path / "c", HYBRID, remote=replace(remote, key=b"o" * 32)) as store:
        assert (store.get(ids), rc.counters(store)["remote_damaged"]) == (None, 1)


def test_an_erase_takes_out_all_that_leads_there(tmp_path: Path, layout: KVLayout, remote: RemoteConfig) -> None:
    ids = tokens(45, seed=10)
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        for count in (21, 45):
            put(store, ids[:count], layout)
            assert store.flush(remote=True).remote_due == 0
        if store.delete(ids, erase=True).kept_tokens:
            store.delete(ids[:21], erase=True)
        left = [name for name in open_engine(remote.url).list("kvs1/", 60) if not name.endswith(".mark")]
        assert left == []


def test_an_erase_spares_the_same_end_of_another_session(tmp_path: Path, remote: RemoteConfig) -> None:
    ids = tokens(21, seed=32)
    with open_store(tmp_path / "a", HYBRID, remote=remote) as store:
        for name in ("one", "two"):
            store.session(name).save(ids, cache_of(ids, HYBRID))
        assert store.flush(remote=True).remote_due == 0
        assert store.session("one").delete(blocks=True, erase=True).remote_blocks == 0
    with open_store(tmp_path / "b", HYBRID, remote=remote) as store:
        assert got(store, ids, HYBRID) == 21


def test_an_erase_asks_whatever_is_believed(tmp_path: Path, remote: RemoteConfig) -> None:
    """What another store put since the last listing goes, too."""
    ids, remote = tokens(45, seed=10), replace(remote, list_s=3600.0, miss_s=3600.0)
    with open_store(tmp_path / "a", HYBRID, remote=remote) as store:
        store._engine.remote.tier.listing.refresh()
        assert got(store, ids, HYBRID) == 0
        filled(tmp_path / "b", HYBRID, remote, ids[:21], ids)
        assert store.delete(ids, erase=True).remote_blocks > 0
    assert [name for name in open_engine(remote.url).list("kvs1/", 60) if not name.endswith(".mark")] == []


def test_explain_names_the_place(tmp_path: Path, layout: KVLayout, remote: RemoteConfig) -> None:
    ids = tokens(45, seed=11)
    filled(tmp_path / "a", layout, remote, ids)
    with open_store(tmp_path / "b", layout, remote=remote) as store:
        found = store.explain(np.concatenate([ids, tokens(9)]))
        assert found.tokens == 45
        assert {block.tiers for block in found.blocks if block.tiers} == {("remote",)}


def test_the_commands_know_places(tmp_path: Path, layout: KVLayout, remote: RemoteConfig) -> None:
    ids = tokens(45, seed=12)
    filled(tmp_path / "a", layout, remote, ids[:24], ids)
    engine = open_engine(remote.url)
    values = survey(engine, 60)
    assert ([value.problem for value in values if value.problem], orphans(values)) == ([], set())
    first = next(value for value in values if value.is_record and not value.depth)
    engine.delete([first.name], 60)
    left = survey(engine, 60)
    assert orphans(left) == {value.name for value in left}
    everything = to_remove(values, 0)
    assert len(everything) == len(values)
    at = {value.name: i for i, value in enumerate(everything)}
    assert all(
        at[value.name] < at[other.name]
        for value in values
        for other in values
        if other.is_record and value.parent == other.block
    )


@pytest.mark.parametrize("upload", ["put", "second use"])
@pytest.mark.parametrize("kind", ["mixed", "sliding"])
def test_an_end_inside_of_a_stored_block_is_a_place_too(
    tmp_path: Path, remote: RemoteConfig, kind: str, upload: Any
) -> None:
    """Nothing is stored for it: its tokens are the beginning of a block that is longer."""
    layout, ids, remote = LAYOUTS[kind], tokens(40, seed=14), replace(remote, upload=upload)
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        store.put(ids, kv_of(ids, layout))
        assert store.put(ids[:13], kept(ids[:13], layout)).new_tokens == 0
        assert store.flush(remote=True).remote_due == 0
        assert rc.counters(store)["remote_recoded_ends"] == 1
    with open_store(tmp_path / "b", layout, remote=remote) as other:
        assert [got(other, ids[:count], layout) for count in (12, 15)] == [8, 13]
        other.flush()
        assert other.check(deep=True).problems == ()
    with open_store(tmp_path / "a", layout, remote=remote) as store:
        store.delete(ids, erase=True)
        assert [name for name in open_engine(remote.url).list("kvs1/", 60) if not name.endswith(".mark")] == []


def test_such_an_end_lacks_what_its_block_lacks(tmp_path: Path, remote: RemoteConfig) -> None:
    ids = tokens(40, seed=15)
    with open_store(tmp_path / "a", ONLY_SLIDING, remote=remote) as store:
        store.put(ids, [(k[:, 8:], v[:, 8:]) for k, v in kv_of(ids, ONLY_SLIDING)])  # enough behind 27 tokens
        for count in (26, 30):
            store.put(ids[:count], kept(ids[:count], ONLY_SLIDING))
        assert store.flush(remote=True).remote_due == 0
        want = [store.contains(ids[:count]) for count in (29, 33)]
    with open_store(tmp_path / "b", ONLY_SLIDING, remote=remote) as other:
        assert [got(other, ids[:count], ONLY_SLIDING) for count in (25, 29, 33)] == [0, 26, 30]
        assert want == [29, 33]


def test_every_end_that_was_put_is_found_and_nothing_is_wrong(
    tmp_path: Path, layout: KVLayout, remote: RemoteConfig
) -> None:
    check_random(tmp_path, layout, remote, np.random.default_rng(seeds.of("places")), part(6), part(6))


def check_random(
    path: Path, layout: KVLayout, remote: RemoteConfig, rng: np.random.Generator, branches: int, asks: int
) -> None:
    """Sequences that part anywhere, put while they grow: a machine that keeps nothing of its own finds what the store
    that put them can go on with, at the ends of puts at least."""
    stems = [tokens(60, seed=20)]
    for seed in range(21, 20 + branches):
        stem = stems[rng.integers(len(stems))]
        stems.append(np.concatenate([stem[: rng.integers(1, 50)], tokens(60, seed=seed)])[:60])
    ends = [(stem, int(count)) for stem in stems for count in np.sort(rng.integers(1, 60, 4))]
    with open_store(path / "a", layout, remote=remote) as one:
        for stem, count in ends:
            put(one, stem[:count], layout)
            assert one.flush(remote=True).remote_due == 0
        with open_store(path / "b", layout, remote=replace(remote, promote="second")) as other:
            for stem in stems:
                for count in (*rng.integers(1, 60, asks).tolist(), 60):
                    asked = stem[:count]
                    same = (c for s, c in ends if c <= count and np.array_equal(s[:c], asked[:c]))
                    here = {c for c in range(1, count + 1) if one.contains(asked[:c]) == c}
                    at = got(other, asked, layout)
                    assert at in {0, *here}
                    assert at >= max(here.intersection(same), default=0)
