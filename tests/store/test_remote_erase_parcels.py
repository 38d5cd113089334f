"""What is erased is gone from parcels, too, and what stood before it there is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remotestores as rs
import small_stores as small
from remotecases import LONG_S

from kvstore import KVStore, RemoteConfig
from kvstore.errors import RemoteUnavailable
from kvstore.tiers.remote.engines.memory import MemoryEngine
from kvstore.tiers.remote.opening import open_engine

BLOCK = small.BLOCK
TOKENS = small.tokens_of(1, 7 * BLOCK)
OTHER = np.concatenate([TOKENS[: 2 * BLOCK], small.tokens_of(2, 3 * BLOCK)])
KEY = b"k" * 32


@pytest.fixture(params=["open", "sealed"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteConfig:
    url = rs.WithParcels(f"memory:{tmp_path.name}")
    return rs.settings(url, **({"key": KEY} if request.param == "sealed" else {}))


def _values(remote: RemoteConfig) -> dict[str, bytes]:
    engine, found = open_engine(remote.url), {}
    for name in engine.list("kvs1/", LONG_S):
        buffer = bytearray(1 << 16)
        size = engine.get_into(name, memoryview(buffer), LONG_S)
        found[name] = bytes(buffer[:size])
    return found


def _stored(path: Path, remote: RemoteConfig, tokens: Any) -> int:
    with rs.open_store(path, remote) as store:
        return small.stored(store, tokens)


def _put(store: KVStore, *sequences: Any) -> None:
    for tokens in sequences:
        small.put(store, tokens)
        assert store.flush(remote=True).remote_due == 0


def _has(remote: RemoteConfig, tokens: Any) -> bool:
    return any(tokens.tobytes() in value for value in _values(remote).values())


def test_what_stood_before_it_in_its_parcel_stays(tmp_path: Path, remote: RemoteConfig) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, TOKENS, OTHER)
        before = _values(remote)
        result = store.delete(TOKENS, erase=True)
        assert (result.kept_blocks, result.remote_blocks, result.remote_left) == (2, 5, 0)
    after = _values(remote)
    assert len(before) == 4  # 4 + 3 blocks, and of the other 2 + 1 behind the two that both have
    assert len(after) == 3
    shorter = [name for name in after if len(after[name]) < len(before[name])]
    assert len(shorter) == 1
    assert all(after[name] == before[name] for name in after if name not in shorter)
    for number in range(2, 7):
        assert not _has(remote, TOKENS[number * BLOCK : (number + 1) * BLOCK])
    assert _stored(tmp_path / "b", remote, OTHER) == len(OTHER)
    assert _stored(tmp_path / "c", remote, TOKENS) == 2 * BLOCK


def test_of_what_branches_inside_of_a_group_one_goes(tmp_path: Path, remote: RemoteConfig) -> None:
    branches = [np.concatenate([TOKENS[: 3 * BLOCK], small.tokens_of(n, BLOCK)]) for n in (5, 6, 7)]
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, *branches)
        assert store.delete(branches[1], erase=True).remote_blocks == 1
        assert store.delete(branches[0], erase=True).remote_blocks == 1  # whose last block lies behind the common ones
    assert [_stored(tmp_path / f"b{i}", remote, t) // BLOCK for i, t in enumerate(branches)] == [3, 3, 4]


def test_what_is_not_here_any_more_goes_from_parcels(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    with rs.open_store(tmp_path / "b", remote) as store:
        assert store.delete(TOKENS, erase=True).remote_blocks == 7
    assert _values(remote) == {}


def test_behind_a_hole_it_goes_too(tmp_path: Path, remote: RemoteConfig) -> None:
    rs.filled(tmp_path / "a", remote, TOKENS)
    engine = open_engine(remote.url)
    name = max(_values(remote).items(), key=lambda item: len(item[1]))[0]
    engine.delete([name], LONG_S)
    with rs.open_store(tmp_path / "b", remote) as store:
        assert store.delete(TOKENS, erase=True).remote_blocks == 3
    assert _values(remote) == {}


def test_a_damaged_parcel_goes_as_a_whole(tmp_path: Path, remote: RemoteConfig) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, TOKENS, OTHER)
        engine = open_engine(remote.url)
        before = _values(remote)
        with rs.open_store(tmp_path / "b", remote) as other:
            assert small.stored(other, TOKENS) == len(TOKENS)
        for name, value in before.items():
            engine.delete([name], LONG_S)
            engine.put(name, [value[:8], b"?" * 8, value[16:]], LONG_S)
        store.delete(TOKENS, erase=True)
    for number in range(2, 7):
        assert not _has(remote, TOKENS[number * BLOCK : (number + 1) * BLOCK])


@pytest.mark.parametrize("call", ["delete", "exist", "get_parts_into"])
def test_what_may_still_be_there_is_told(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, TOKENS)

        def fail(self: MemoryEngine, *arguments: Any) -> Any:
            raise RemoteUnavailable("planned")

        with monkeypatch.context() as patch:
            patch.setattr(MemoryEngine, call, fail)
            result = store.delete(TOKENS, erase=True)
            assert result.remote_blocks == 0
            assert result.remote_left >= (2 if call == "get_parts_into" else 7)
        rs.until(lambda: store.delete(TOKENS, erase=True).remote_left == 0)
    assert _values(remote) == {}


def test_where_the_rest_cannot_be_written_again_it_is_a_miss(
    tmp_path: Path, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rs.open_store(tmp_path / "a", remote) as store:
        _put(store, TOKENS, OTHER)

        def fail(self: MemoryEngine, *arguments: Any) -> bool:
            raise RemoteUnavailable("planned")

        with monkeypatch.context() as patch:
            patch.setattr(MemoryEngine, "put", fail)
            result = store.delete(TOKENS, erase=True)
        assert (result.remote_blocks, result.remote_left) == (5, 0)
    assert _stored(tmp_path / "b", remote, OTHER) == 0
    assert not _has(remote, TOKENS[2 * BLOCK : 3 * BLOCK])
