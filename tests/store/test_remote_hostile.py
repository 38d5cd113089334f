"""Values that lie: whoever may write to the remote tier may write anything. A get makes a counted miss of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import remotestores as rs
import small_stores as small

from kvstore import KVStore, ModelIdentity
from kvstore.core.record import FLAG_STATES, Donor, RecordHeader, parse, seal
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.opening import open_engine

TOKENS = small.tokens_of(1, 5 * small.BLOCK)
LONG_S = 60.0
BAD = 2  # the block that is tampered with


def _values(engine: RemoteEngine) -> dict[int, str]:
    """The names of the values, by the block they are of."""
    found = {}
    for name in engine.list("kvs1/", LONG_S):
        if "/profile/" not in name:
            found[_read(engine, name)[1].start // small.BLOCK] = name
    return found


def _read(engine: RemoteEngine, name: str) -> tuple[bytearray, RecordHeader]:
    buffer = bytearray(1 << 16)
    size = engine.get_into(name, memoryview(buffer), LONG_S)
    assert size is not None
    return buffer[:size], parse(memoryview(buffer[:size]), size)


def _replace(engine: RemoteEngine, name: str, value: bytes | bytearray) -> None:
    engine.delete([name], LONG_S)
    assert engine.put(name, [bytes(value)], LONG_S)


def _sealed(value: bytearray, header: RecordHeader, **changes: object) -> bytes:
    """The same record with other fields, and checksums that fit them, as a forger would make it."""
    changed = replace(header, **changes)  # type: ignore[arg-type]
    payload = value[header.payload_offset : header.record_bytes]
    forged = bytearray(changed.payload_offset) + payload
    seal(changed, memoryview(forged))
    return bytes(forged)


def _flipped(at: int) -> Callable[[bytearray, RecordHeader], bytes]:
    def flip(value: bytearray, header: RecordHeader) -> bytes:
        value[at if at >= 0 else len(value) + at] ^= 1
        return bytes(value)

    return flip


def _forged(**changes: object) -> Callable[[bytearray, RecordHeader], bytes]:
    return lambda value, header: _sealed(value, header, **changes)


TAMPERED: dict[str, Callable[[bytearray, RecordHeader], bytes]] = {
    "a bit of the header": _flipped(200),
    "a bit of the tokens": _flipped(270),
    "a bit of the payload": _flipped(-3),
    "cut short": lambda value, header: bytes(value[:-1]),
    "cut in the header": lambda value, header: bytes(value[:100]),
    "empty": lambda value, header: b"",
    "longer": lambda value, header: bytes(value) + b"\0" * 64,
    "huge": lambda value, header: bytes(1 << 20),
    "another namespace's": _forged(namespace=b"n" * 32),
    "another parent's": _forged(parent=b"p" * 32),
    "another key": _forged(key=b"k" * 32),
    "another place": _forged(start=0),
    "other tokens": _forged(tokens=np.arange(4, dtype=np.uint32)),
    "a tail": lambda value, header: _sealed(value, header, tokens=header.tokens[:3]),
    "donors claimed": _forged(donors=(Donor(1, b"d" * 32),)),
    "a codec of members": _forged(codec=3),
    "an unknown codec": _forged(codec=999),
    "a profile that nobody has": _forged(profile=b"p" * 16),
    "states claimed": _forged(flags=FLAG_STATES),
    "another layout": lambda value, header: _sealed(value, header, layer_sizes=(sum(header.layer_sizes),)),
    "raw bytes that do not fit": _forged(raw_bytes=7),
    "loss claimed": _forged(error_bound=0.5),
    "an error bound that is no number": _forged(error_bound=float("nan")),
    "expired": _forged(expiry=1.0),
    "an end that is no number": _forged(expiry=float("nan")),
    "bits that are no number": _forged(bits=float("nan")),
    "bits without end": _forged(bits=float("inf")),
}


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """A remote tier with one sequence."""
    url = f"memory:{tmp_path.name}"
    rs.filled(tmp_path / "a", rs.settings(url), TOKENS)
    return url


def _prefix(tmp_path: Path, url: str) -> tuple[int, dict[str, float]]:
    with rs.open_store(tmp_path / "b", rs.settings(url, deadline_s=60.0)) as store:
        tokens = small.stored(store, TOKENS)
        store.flush()
        assert store.check(deep=True).problems == ()
        return tokens, rs.counters(store)


@pytest.mark.parametrize("how", TAMPERED)
def test_a_value_that_is_not_the_record_ends_the_prefix(tmp_path: Path, shared: str, how: str) -> None:
    engine = open_engine(shared)
    name = _values(engine)[BAD]
    _replace(engine, name, TAMPERED[how](*_read(engine, name)))
    tokens, counts = _prefix(tmp_path, shared)
    assert tokens == BAD * small.BLOCK
    why = ("remote_damaged", "remote_expired", "unknown_codec", "unknown_profile")
    assert sum(counts.get(name, 0) for name in why) >= 1
    assert counts["short_remote"] == 1


def test_values_in_each_others_place_are_misses(tmp_path: Path, shared: str) -> None:
    engine = open_engine(shared)
    names = _values(engine)
    one, other = (_read(engine, names[number])[0] for number in (1, 3))
    _replace(engine, names[1], other)
    _replace(engine, names[3], one)
    tokens, counts = _prefix(tmp_path, shared)
    assert (tokens, counts["remote_damaged"]) == (small.BLOCK, 2)


def test_a_value_replayed_from_another_namespace_is_a_miss(tmp_path: Path) -> None:
    url = f"memory:{tmp_path.name}"
    with rs.open_store(tmp_path / "a", rs.settings(url)) as store:
        small.put(store, TOKENS, b"ann")
        store.flush(remote=True)
        ann = _values(open_engine(url))
        small.put(store, TOKENS, b"bob")
        store.flush(remote=True)
    engine = open_engine(url)
    bob = set(_names(engine)) - set(ann.values())
    for name in bob:
        start = _read(engine, name)[1].start // small.BLOCK
        _replace(engine, name, _read(engine, ann[start])[0])
    with rs.open_store(tmp_path / "b", rs.settings(url)) as store:
        assert store.get(TOKENS, namespace=b"bob") is None
        assert small.stored(store, TOKENS, b"ann") == len(TOKENS)


def _names(engine: RemoteEngine) -> list[str]:
    return list(engine.list("kvs1/", LONG_S))


def test_a_value_of_another_identity_is_a_miss(tmp_path: Path, shared: str) -> None:
    """Moved to where this identity's values are, and even made to claim the right keys."""
    other = ModelIdentity("other", "1", "11", "", small.LAYOUT)
    engine = open_engine(shared)
    mine = _values(engine)
    with KVStore(tmp_path / "o", other, small.config(remote=rs.settings(shared))) as store:
        small.put(store, TOKENS)
        store.flush(remote=True)
    foreign = [name for name in _names(engine) if name not in mine.values()]
    assert len(foreign) == len(mine)
    for name in foreign:
        value, header = _read(engine, name)
        _replace(engine, mine[header.start // small.BLOCK], value)
    assert _prefix(tmp_path, shared)[0] == 0


def test_what_is_refused_is_not_asked_for_again_at_once(tmp_path: Path, shared: str) -> None:
    engine = open_engine(shared)
    name = _values(engine)[0]
    _replace(engine, name, b"nothing")
    with rs.open_store(tmp_path / "b", rs.settings(shared, miss_s=1000.0)) as store:
        assert [store.get(TOKENS) for _ in range(3)] == [None] * 3
        assert rs.counters(store)["remote_damaged"] == 1


def test_nothing_is_deleted_by_a_get(tmp_path: Path, shared: str) -> None:
    engine = open_engine(shared)
    names = _values(engine)
    for name in names.values():
        value, _ = _read(engine, name)
        _replace(engine, name, value[:-5])
    before = sorted(_names(engine))
    _prefix(tmp_path, shared)
    assert sorted(_names(engine)) == before
