"""Stores whose engine puts records together: other stores find what is in parcels, and nothing that is wrong there is
more than a miss."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small
from motos import make_bucket, shared_moto
from remotecases import LONG_S, S3_KEYS
from s3servers import s3_server

from kvstore import KVStore, RemoteConfig
from kvstore.core.keys import chain_keys, namespace_digest
from kvstore.core.record import HEADER_BYTES, parse
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.engines.faulty import FaultPlan
from kvstore.tiers.remote.engines.memory import MemoryEngine
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.parcel import HEAD_BYTES, ParcelHead

BLOCK, GROUP = small.BLOCK, rs.GROUP
TOKENS = small.tokens_of(1, 10 * BLOCK)
KEY = b"k" * 32


@pytest.fixture
def remote(tmp_path: Path) -> RemoteConfig:
    return rs.settings(rs.WithParcels(f"memory:{tmp_path.name}"))


def _names(remote: RemoteConfig) -> list[str]:
    return [name for name in open_engine(remote.url).list("kvs1/", LONG_S) if "/profile/" not in name]


def _heads(remote: RemoteConfig) -> dict[int, ParcelHead]:
    """The parcels there, by the number of their first block."""
    engine, found = open_engine(remote.url), {}
    for name in _names(remote):
        value, head = _read(engine, name)
        begin = parse(memoryview(value[HEAD_BYTES : HEAD_BYTES + head.sizes[0]]), head.sizes[0])
        found[begin.start // BLOCK] = head
    return found


def _read(engine: RemoteEngine, name: str) -> tuple[bytearray, ParcelHead]:
    buffer = bytearray(1 << 16)
    size = engine.get_into(name, memoryview(buffer), LONG_S)
    assert size is not None
    key = bytes.fromhex(name.rpartition("/")[2].removesuffix(".parcel"))
    return buffer[:size], ParcelHead.unpack(buffer[:HEAD_BYTES], key, 1 << 16)


def _lengths(remote: RemoteConfig) -> dict[int, int]:
    return {number: len(head.keys) for number, head in sorted(_heads(remote).items())}


def _stored(path: Path, remote: RemoteConfig, tokens: Any = TOKENS) -> int:
    """How many tokens a store that has nothing gets from there."""
    with rs.open_store(path, remote) as store:
        return small.stored(store, tokens)


def _calls(store: KVStore) -> float:
    return store.stats()["remote"]["engine_calls"]


def test_a_group_is_one_value_and_the_rest_another(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    assert all(name.endswith(".parcel") for name in _names(remote))
    assert _lengths(remote) == {0: 4, 4: 4, 8: 2}
    assert _stored(tmp_path / "b", remote) == len(TOKENS)


def test_a_get_takes_two_calls_for_each_parcel(tmp_path: Path) -> None:
    remote = rs.settings(rs.WithParcels(f"memory:{tmp_path.name}"), ttl_s=0.0)  # nothing is renewed
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", remote, host=0, disk=0) as store:
        assert small.stored(store, TOKENS) == len(TOKENS)
        assert _calls(store) == 2 * 3
        assert small.stored(store, TOKENS) == len(TOKENS)  # it knows where they are
        assert _calls(store) == 3 * 3


def test_s3_is_asked_less_for_32_blocks_of_which_8_make_a_parcel(tmp_path: Path) -> None:
    """As of 2,048 tokens of SmolLM2; docs/remote.md has these numbers."""
    tokens, requests = small.tokens_of(1, 32 * BLOCK), {}
    for group in (0, 8):
        with s3_server() as server:
            parcel_bytes = group * BLOCK * small.LAYOUT.bytes_per_token
            remote = rs.settings(server.url, settings={**S3_KEYS, "parcel_bytes": parcel_bytes})
            with rs.open_store(tmp_path / f"a{group}", remote) as store:
                before = server.requests
                small.put(store, tokens)
                assert store.flush(remote=True).remote_due == 0
                written = server.requests - before
            with rs.open_store(tmp_path / f"b{group}", remote) as store:
                before = server.requests
                assert small.stored(store, tokens) == len(tokens)
                requests[group] = written, server.requests - before
    assert requests == {0: (64, 64), 8: (9, 8)}


@pytest.mark.parametrize("server", ["ours"] + ["moto"] * (importlib.util.find_spec("moto") is not None))
def test_two_stores_share_an_s3_with_fewer_calls(tmp_path: Path, server: str) -> None:
    tokens, calls = small.tokens_of(1, 20 * BLOCK), {}
    with s3_server() as ours:
        url = ours.url
        if server == "moto":
            url = f"s3://parcels/shared?endpoint={shared_moto()}"
            make_bucket(shared_moto(), "parcels")
        for parcel_bytes in (0, 16 << 20):
            remote = rs.settings(
                url.replace("?", f"/{parcel_bytes}?"), settings={**S3_KEYS, "parcel_bytes": parcel_bytes}
            )
            rs.filled(tmp_path / f"a{parcel_bytes}", remote, tokens)
            with rs.open_store(tmp_path / f"b{parcel_bytes}", remote) as store:
                assert small.stored(store, tokens) == len(tokens)
                calls[parcel_bytes] = _calls(store)
                assert store.delete(tokens[: 18 * BLOCK], erase=True).remote_blocks == 20
                assert small.stored(store, tokens) == 0
    assert calls == {0: 1 + 20, 16 << 20: 2 + 2}


def test_turns_of_any_lengths_are_found(tmp_path: Path, remote: RemoteConfig) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        for count in (1, 3, 4, 9, 10):
            small.put(store, TOKENS[: count * BLOCK])
            assert store.flush(remote=True).remote_due == 0
        assert rs.counters(store)["remote_written_records"] == 10
    assert _lengths(remote) == {0: 1, 1: 2, 3: 1, 4: 4, 8: 1, 9: 1}
    assert _stored(tmp_path / "b", remote) == len(TOKENS)


@pytest.mark.parametrize("seed", range(12))
def test_sequences_that_share_any_blocks_are_all_found(tmp_path: Path, remote: RemoteConfig, seed: int) -> None:
    chance = random.Random(seed)
    sequences = [TOKENS]
    for number in range(2, 8):
        stem = chance.choice(sequences)[: chance.randrange(0, 9) * BLOCK]
        sequences.append(np.concatenate([stem, small.tokens_of(number, chance.randrange(1, 8) * BLOCK)]))
    for number, tokens in enumerate(sequences):
        rs.filled(tmp_path / f"a{number % 3}", remote, tokens)
    with rs.open_store(tmp_path / "b", remote, host=0, disk=0) as store:
        for tokens in sequences:
            assert small.stored(store, tokens) == len(tokens)
    blocks = {tokens[:end].tobytes() for tokens in sequences for end in range(BLOCK, len(tokens) + 1, BLOCK)}
    assert sum(len(head.keys) for name in _names(remote) for head in [_head(remote, name)]) == len(blocks)


def _head(remote: RemoteConfig, name: str) -> ParcelHead:
    return _read(open_engine(remote.url), name)[1]


def test_the_first_blocks_may_be_here_and_the_rest_in_their_parcel(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    for here in range(1, 10):
        with rs.open_store(
            tmp_path / f"b{here}", rs.settings(remote.url, settings=remote.settings, read_only=True)
        ) as store:
            small.put(store, TOKENS[: here * BLOCK])
            store.flush()
            assert rs.got(store, TOKENS).tiers == {"host": here * BLOCK, "remote": (10 - here) * BLOCK}
            assert store.explain(TOKENS).tokens == len(TOKENS)


def test_two_writers_of_one_group_at_once(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes a parcel after the other one looked: what that holds is there, and the rest makes the next one."""
    other = np.concatenate([TOKENS[: 2 * BLOCK], small.tokens_of(2, BLOCK)])
    put, is_first = MemoryEngine.put, [True]

    def late(self: MemoryEngine, *arguments: Any) -> bool:
        if is_first.pop() if is_first else False:
            rs.filled(tmp_path / "other", remote, other)
        return put(self, *arguments)

    monkeypatch.setattr(MemoryEngine, "put", late)
    with rs.open_store(tmp_path / "a", remote) as store:
        small.put(store, TOKENS)
        assert store.flush(remote=True).remote_due == 0
        counts = rs.counters(store)
        assert (counts["remote_present"], counts["remote_written_records"]) == (2, 8)
    assert _lengths(remote) == {0: 3, 2: 2, 4: 4, 8: 2}
    assert [_stored(tmp_path / f"b{len(t)}", remote, t) for t in (TOKENS, other)] == [len(TOKENS), len(other)]


def test_what_was_written_without_parcels_is_found_and_continued(tmp_path: Path, remote: RemoteConfig) -> None:
    plain = rs.settings(remote.url)
    rs.filled(tmp_path / "old", plain, TOKENS[: 5 * BLOCK])
    assert _stored(tmp_path / "b", remote) == 5 * BLOCK
    rs.filled(tmp_path / "new", remote, TOKENS)
    assert sorted(name.endswith(".parcel") for name in _names(remote)) == [False] * 5 + [True] * 2
    assert _stored(tmp_path / "c", remote) == len(TOKENS)


def test_a_store_without_parcels_never_asks_for_them(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    assert _stored(tmp_path / "b", rs.settings(remote.url)) == 0


def test_with_a_fleet_key_nothing_can_be_seen_or_moved(tmp_path: Path) -> None:
    url = rs.WithParcels(f"memory:{tmp_path.name}")
    rs.filled(tmp_path / "a", rs.settings(url, key=KEY), TOKENS)
    engine, (name, *_) = open_engine(str(url)), sorted(_names(rs.settings(url)))
    buffer = bytearray(1 << 16)
    assert engine.get_into(name, memoryview(buffer), LONG_S)
    assert not any(word in buffer for word in (b"KVSTPCL1", b"KVSTREC1", TOKENS[:BLOCK].tobytes()))
    assert _stored(tmp_path / "b", rs.settings(url, key=KEY)) == len(TOKENS)
    assert _stored(tmp_path / "c", rs.settings(url, key=b"o" * 32)) == 0
    assert _stored(tmp_path / "d", rs.settings(url)) == 0


def test_records_that_are_not_sealed_are_misses_for_the_fleet(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    assert _stored(tmp_path / "b", rs.settings(rs.WithParcels(remote.url), key=KEY)) == 0


def test_what_is_not_there_when_listed_takes_no_call(tmp_path: Path) -> None:
    remote = rs.settings(rs.WithParcels(f"memory:{tmp_path.name}"), list_s=3600.0)
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", remote) as store:
        store._engine.remote.tier.listing.refresh()
        before = _calls(store)
        assert store.get(small.tokens_of(2, 6 * BLOCK)) is None
        assert _calls(store) == before
        assert small.stored(store, TOKENS) == len(TOKENS)
        small.put(store, small.tokens_of(3, 6 * BLOCK))
        assert store.flush(remote=True).remote_due == 0
        store.delete(small.tokens_of(3, 6 * BLOCK))
        _forget(store, small.tokens_of(3, 6 * BLOCK))
        assert small.stored(store, small.tokens_of(3, 6 * BLOCK)) == 6 * BLOCK


# ---- what goes wrong there -------------------------------------------------------------------------------------------


def _replace(remote: RemoteConfig, number: int, change: Callable[[bytearray, ParcelHead], bytes | bytearray]) -> None:
    """Change the parcel that begins with a block."""
    engine, head = open_engine(remote.url), _heads(remote)[number]
    name = next(name for name in _names(remote) if head.keys[0].hex() in name)
    _put_instead(remote, name, change(*_read(engine, name)))


def _put_instead(remote: RemoteConfig, name: str, value: bytes | bytearray) -> None:
    engine = open_engine(remote.url)
    engine.delete([name], LONG_S)
    assert engine.put(name, [bytes(value)], LONG_S)


def _flipped(bit: int) -> Callable[[bytearray, ParcelHead], bytearray]:
    def flip(value: bytearray, head: ParcelHead) -> bytearray:
        value[bit // 8] ^= 1 << bit % 8
        return value

    return flip


def _with_head(**changes: Any) -> Callable[[bytearray, ParcelHead], bytes]:
    """The same records behind another head."""

    def change(value: bytearray, head: ParcelHead) -> bytes:
        keys, sizes = changes.get("keys", lambda x: x)(head.keys), changes.get("sizes", lambda x: x)(head.sizes)
        return ParcelHead(tuple(keys), tuple(sizes)).pack() + value[HEAD_BYTES:]

    return change


TAMPERED: dict[str, tuple[Callable[[bytearray, ParcelHead], bytes | bytearray], int]] = {
    "a bit of the head": (_flipped(8 * 20), 4),
    "a bit of the second record": (
        lambda value, head: _flipped(8 * (HEAD_BYTES + sum(head.sizes[:2]) - 1))(value, head),
        5,
    ),
    "empty": (lambda value, head: b"", 4),
    "no more than a part of the head": (lambda value, head: value[: HEAD_BYTES - 1], 4),
    "the head alone": (lambda value, head: value[:HEAD_BYTES], 4),
    "cut short in the third record": (lambda value, head: value[: HEAD_BYTES + sum(head.sizes[:3]) - 1], 6),
    "a record of its own": (lambda value, head: value[HEAD_BYTES : HEAD_BYTES + head.sizes[0]], 4),
    "more bytes than it says": (lambda value, head: bytes(value) + b"x" * 99, 10),
    "keys in another order": (_with_head(keys=lambda keys: [keys[0], keys[2], keys[1], keys[3]]), 5),
    "keys of others": (_with_head(keys=lambda keys: [keys[0], *[b"x" * 32, b"y" * 32, b"z" * 32]]), 5),
    "another first key": (_with_head(keys=lambda keys: [b"x" * 32, *keys[1:]]), 4),
    "sizes that are too small": (_with_head(sizes=lambda sizes: [sizes[0] - 1, *sizes[1:]]), 4),
    "sizes that are too large": (_with_head(sizes=lambda sizes: [*sizes[:2], sizes[2] + 1, sizes[3]]), 6),
    "sizes behind the end": (_with_head(sizes=lambda sizes: [*sizes[:3], sizes[3] + 99]), 10),  # all of it is there
    "sizes that take too much memory": (_with_head(sizes=lambda sizes: [*sizes[:3], 1 << 40]), 4),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_parcel_that_is_not_what_it_should_be_ends_the_prefix(
    tmp_path: Path, remote: RemoteConfig, what: str
) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    change, blocks = TAMPERED[what]
    _replace(remote, 4, change)
    with rs.open_store(tmp_path / "b", remote) as store:
        assert small.stored(store, TOKENS) == blocks * BLOCK
        counts = rs.counters(store)
        assert counts.get("remote_damaged", 0) >= (blocks < 10 and not what.startswith("keys"))
        assert counts.get("remote_read_errors", 0) == 0
        store.flush()
        assert store.check(deep=True).problems == ()
    before = _names(remote)
    assert sorted(_names(remote)) == sorted(before)  # nothing is removed by a get


def test_no_bit_of_a_parcel_makes_a_wrong_hit(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS[: 2 * BLOCK])
    (name,) = _names(remote)
    value, head = _read(open_engine(remote.url), name)
    in_use = set[int]()
    for offset, size in zip(head.offsets, head.sizes, strict=True):
        begin = HEAD_BYTES + offset
        header = parse(memoryview(value[begin : begin + size]), size)
        tables = HEADER_BYTES + 4 * (len(header.layer_sizes) + header.count)  # zeros stand between them and the payload
        in_use |= {begin + at for at in range(size) if not tables <= at < header.payload_offset}
    in_use |= set(range(HEAD_BYTES))
    with rs.open_store(tmp_path / "b", remote, host=0, disk=0) as store:
        for at in random.Random(1).sample(sorted(in_use), 300):
            changed = bytearray(value)
            changed[at] ^= 1 << random.randrange(8)
            _put_instead(remote, name, changed)
            _forget(store, TOKENS)
            assert small.stored(store, TOKENS) < 2 * BLOCK


def _forget(store: KVStore, tokens: Any) -> None:
    """The store believes nothing any more of these blocks."""
    tier, root = store._engine.remote.tier, store._engine.getter.lookup.root(namespace_digest(b""))
    tier.lost(list(chain_keys(root, tokens, BLOCK)))
    tier.beliefs.forget(None)


def test_a_parcel_that_went_is_a_miss_and_found_when_it_is_back(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", remote, host=0, disk=0) as store:
        assert small.stored(store, TOKENS) == len(TOKENS)
        engine = open_engine(remote.url)
        name = next(name for name in _names(remote) if _heads(remote)[4].keys[0].hex() in name)
        value, head = _read(engine, name)
        engine.delete([name], LONG_S)
        assert small.stored(store, TOKENS) == 4 * BLOCK
        assert rs.counters(store)["remote_gone"] == 1
        engine.put(name, [head.first(2).pack(), value[HEAD_BYTES : HEAD_BYTES + sum(head.sizes[:2])]], LONG_S)
        assert small.stored(store, TOKENS) == 6 * BLOCK


def test_a_damaged_record_is_not_read_again_at_once_and_written_anew_by_who_has_it(tmp_path: Path) -> None:
    url = rs.WithParcels(f"memory:{tmp_path.name}")
    remote = rs.settings(url, miss_s=1000.0)
    rs.filled(tmp_path / "a", remote, TOKENS)
    _replace(remote, 4, TAMPERED["a bit of the second record"][0])
    with rs.open_store(tmp_path / "b", remote) as store:
        assert [small.stored(store, TOKENS) for _ in range(3)] == [5 * BLOCK] * 3
        assert rs.counters(store)["remote_damaged"] == 1
        small.put(store, TOKENS)
        assert store.flush(remote=True).remote_due == 0
    assert _lengths(remote) == {0: 4, 4: 4, 5: 1, 8: 2}
    with rs.open_store(tmp_path / "c", remote, host=0, disk=0) as store:
        assert [small.stored(store, TOKENS) for _ in range(2)] == [5 * BLOCK, 10 * BLOCK]


def test_the_first_record_of_a_parcel_if_damaged_is_not_read_again_at_once(tmp_path: Path) -> None:
    remote = rs.settings(rs.WithParcels(f"memory:{tmp_path.name}"), miss_s=1000.0)
    rs.filled(tmp_path / "a", remote, TOKENS)
    _replace(remote, 4, lambda value, head: _flipped(8 * (HEAD_BYTES + head.sizes[0] - 1))(value, head))
    with rs.open_store(tmp_path / "b", remote) as store:
        assert [small.stored(store, TOKENS) for _ in range(3)] == [4 * BLOCK] * 3
        assert rs.counters(store)["remote_damaged"] == 1


def test_a_store_knows_where_what_it_missed_and_wrote_then_lies(tmp_path: Path) -> None:
    remote = rs.settings(rs.WithParcels(f"memory:{tmp_path.name}"), miss_s=1000.0, ttl_s=0.0)
    with rs.open_store(tmp_path / "a", remote) as store:
        assert store.get(TOKENS) is None
        small.put(store, TOKENS)
        assert store.flush(remote=True).remote_due == 0
        store.delete(TOKENS)
        before = _calls(store)
        assert small.stored(store, TOKENS) == len(TOKENS)
        assert _calls(store) - before == 3  # and for no head


def test_blocks_come_alone_where_something_else_has_the_name_of_their_parcel(
    tmp_path: Path, remote: RemoteConfig
) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    _replace(remote, 4, lambda value, head: b"garbage" * 200)
    with rs.open_store(tmp_path / "b", remote) as store:
        small.put(store, TOKENS)
        assert store.flush(remote=True).remote_due == 0
    assert sorted(name.endswith(".parcel") for name in _names(remote)) == [False] + [True] * 4
    assert _stored(tmp_path / "c", remote) == len(TOKENS)


@pytest.mark.parametrize(
    "plan",
    [
        {"failing": 0.3},
        {"missing": 0.3},
        {"truncated": 0.3},
        {"flipped": 0.3},
        {"swapped": 0.3},
        {"ghosts": 0.3},
        {"failing": 0.1, "full": 0.2, "flipped": 0.1, "missing": 0.1},
    ],
    ids=lambda plan: "+".join(plan),
)
def test_a_server_with_faults_gives_shorter_hits_and_no_wrong_ones(
    tmp_path: Path, remote: RemoteConfig, plan: dict[str, float]
) -> None:
    url = rs.WithParcels(remote.url)
    faulty = rs.settings(url, settings={"faults": FaultPlan(seed=3, **plan)}, flush_timeout_s=20.0)
    sequences = [TOKENS, *(np.concatenate([TOKENS[: n * BLOCK], small.tokens_of(n, 4 * BLOCK)]) for n in (2, 3, 5, 8))]
    with rs.open_store(tmp_path / "a", faulty) as store:
        for tokens in sequences:
            small.put(store, tokens)
            store.flush(remote=True)
    with rs.open_store(tmp_path / "b", faulty, host=0, disk=0) as store:
        found = [small.stored(store, tokens) for _ in range(6) for tokens in sequences]
    with rs.open_store(tmp_path / "c", remote) as store:
        for tokens in sequences:
            small.stored(store, tokens)
    assert sum(found) < 6 * sum(map(len, sequences))


@pytest.mark.parametrize("belief_s", [0.0, 30.0])
def test_what_the_disk_gives_up_is_written_once(tmp_path: Path, remote: RemoteConfig, belief_s: float) -> None:
    """Also of sequences that share blocks, and where the store is to believe nothing that it was told."""
    url, chance, sequences = rs.WithParcels(remote.url), random.Random(3), list[Any]()
    evicting = rs.settings(url, upload="eviction", queue_bytes=1 << 26, flush_timeout_s=60.0, belief_s=belief_s)
    for number in range(1, 60):
        stem = chance.choice(sequences)[: chance.randrange(0, 6) * BLOCK] if sequences else TOKENS[:0]
        sequences.append(np.concatenate([stem, small.tokens_of(number + 9, 8 * BLOCK)]))
    with rs.open_store(tmp_path / "a", evicting, host=0, disk=6 * small.SEGMENT) as store:
        for tokens in sequences:
            small.put(store, tokens)
            store.flush()
        assert store.flush(remote=True).remote_due == 0
        counts = rs.counters(store)
        assert counts["disk_evicted_records"] > 200
        assert counts.get("dropped_remote_left", 0) < 10  # what left while it was read came later by itself
    heads = [_head(remote, name) for name in _names(remote)]
    keys = [key for head in heads for key in head.keys]
    assert counts["remote_written_records"] == len(keys) > 200
    assert len(keys) == len(set(keys)) or not belief_s  # who believes nothing may write a block a second time
    assert len(heads) == counts["remote_written_parcels"] < len(keys)
    with rs.open_store(tmp_path / "b", remote, host=0, disk=0) as store:
        assert sum(small.stored(store, tokens) for tokens in sequences) > 0.9 * sum(map(len, sequences))
