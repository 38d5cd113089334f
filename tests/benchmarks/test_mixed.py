from __future__ import annotations

from pathlib import Path

import pytest
from benchmodules import load

mixed = load("workloads.mixed")
keyed = load("peers.stores.keyed")
RECORD = mixed.RECORD


@pytest.mark.parametrize("name", ["file", "lmdb", "sqlite"])
def test_a_peer_gives_what_it_was_given_until_it_is_deleted(tmp_path: Path, name: str) -> None:
    peer = keyed.KEYED[name][1](tmp_path / name, 8192, 10)
    value, out = memoryview(bytes(range(256)) * 32), memoryview(bytearray(8192))
    peer.put("a", value)
    peer.put("a", value)
    assert peer.get("a", out)
    assert out == value
    assert keyed.file_bytes(tmp_path / name) >= 8192
    peer.delete("a")
    peer.delete("never")
    assert not peer.get("a", out)
    peer.close()


def test_the_oldest_conversations_of_a_peer_make_room(tmp_path: Path) -> None:
    peer = mixed.PeerStore(tmp_path / "file", "file", 10 * RECORD)
    for session in range(5):
        for turn in range(3):
            peer.put(session, 0, turn)
        if session:
            assert peer.get(1, 0, 3)  # a use: 0 and 2 are older than 1
    assert [peer.get(session, 0, 3) for session in range(5)] == [False, True, False, True, True]
    found = peer.finish()
    assert found["live_bytes"] == 9 * RECORD <= found["file_bytes"] < 10 * RECORD


def test_a_load_counts_what_it_did(tmp_path: Path) -> None:
    load_ = mixed.Load(mixed.PeerStore(tmp_path / "file", "file", 100 * RECORD), 3)
    load_.fill(1)
    filled = load_._put_bytes
    found = load_.run(threads=2, seconds=0.05, seed=1)
    assert found["put_bytes"] == len(found["put"]) * RECORD == load_._put_bytes - filled
    assert found["hits"] == len(found["get"]) + len(found["resume"])
    assert not found["misses"]
