"""Records that need a profile are read by stores that never had it."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import profile_stores as stores
import pytest
import remotestores as rs
import small_stores as small
from faultfs import FaultFS

from kvstore import KVStore, Reason, RemoteConfig
from kvstore.tiers import profiles
from kvstore.tiers.remote import profiles as remote_profiles
from kvstore.tiers.remote.opening import open_engine

TOKENS = stores.tokens_of(1, 3 * 64)
LONG_S = 60.0


def _open(
    path: Path, remote: RemoteConfig | None, codec: str = "entropy", fs: FaultFS | None = None, **settings: Any
) -> KVStore:
    disk = 1024 * small.SEGMENT
    config = small.config(disk=disk, host=0, codec=codec, block_tokens=64, remote=remote, **settings)
    return KVStore(path, small.IDENTITY, config, fs=fs)


def _fill(tmp_path: Path, remote: RemoteConfig) -> None:
    with _open(tmp_path / "a", remote, "predictive", profile=stores.save(0, tmp_path)) as store:
        store.put(TOKENS, stores.kv_of(TOKENS))
        assert store.flush(remote=True).remote_due == 0
        counts = rs.counters(store)
        assert (counts["remote_written_profiles"], counts["remote_written_records"]) == (1, 3)


def _lose_profile(remote: RemoteConfig) -> str:
    """The server gives up the profile alone, as one may that has no room; returns its name there."""
    engine = open_engine(remote.url)
    (name,) = [name for name in engine.list("kvs1/", LONG_S) if "/profile/" in name]
    assert engine.delete([name], LONG_S) == 1
    return name


class NoRoom(FaultFS):
    """Takes no profile while it `is_full`."""

    is_full = True

    def open(self, path: Any, flags: int) -> int:
        if self.is_full and "profiles" in str(path) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)


def test_a_profile_comes_with_the_first_record_that_needs_it_and_stays(tmp_path: Path) -> None:
    remote = rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0)
    _fill(tmp_path, remote)
    with _open(tmp_path / "b", remote) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)
        assert rs.counters(store)["remote_read_profiles"] == 1
        assert store.flush().durable_blocks == 3
        assert store.check(deep=True).problems == ()
    with _open(tmp_path / "b", None) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)
        assert set(store.blocks().labels.tolist()) == {"predictive"}
        small.put(store, np.arange(5, dtype=np.uint32))  # new records are coded as before
        store.flush()
        assert set(store.blocks().labels.tolist()) == {"entropy", "predictive"}


def test_a_profile_that_is_another_is_refused(tmp_path: Path) -> None:
    remote = rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0)
    _fill(tmp_path, remote)
    name, engine = _lose_profile(remote), open_engine(remote.url)
    engine.put(name, [stores.save(1, tmp_path).read_bytes()], LONG_S)
    with _open(tmp_path / "b", remote) as store:
        assert stores.stored(store, TOKENS) == 0
        counts = rs.counters(store)
        assert (counts["remote_damaged"], counts["unknown_profile"] > 0) == (1, True)
        assert not list((tmp_path / "b").glob("profiles/*.safetensors"))


def test_a_profile_that_the_server_lost_is_written_with_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_profiles, "_WRITER_S", 0.0)
    remote = rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0)
    other = stores.tokens_of(2, 64)
    with _open(tmp_path / "a", remote, "predictive", profile=stores.save(0, tmp_path)) as store:
        store.put(TOKENS, stores.kv_of(TOKENS))
        assert store.flush(remote=True).remote_due == 0
        _lose_profile(remote)
        store.put(other, stores.kv_of(other))
        assert store.flush(remote=True).remote_due == 0
        assert rs.counters(store)["remote_written_profiles"] == 2
    with _open(tmp_path / "b", remote) as store:
        assert stores.stored(store, other) == len(other)


def test_a_profile_that_the_server_lost_is_written_by_who_reads_with_it(tmp_path: Path) -> None:
    remote = rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0)
    _fill(tmp_path, remote)
    with _open(tmp_path / "b", replace(remote, promote="second")) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)
    _lose_profile(remote)  # when "b" looks no more
    with _open(tmp_path / "c", remote) as store:  # it lacks the profile, and nobody brings it
        assert store.get(TOKENS) is None
        counts = rs.counters(store)
        assert (counts["unknown_profile"] > 0, counts["short_remote"]) == (True, 1)
        assert "remote_late" not in counts
    with _open(tmp_path / "b", remote) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)
        rs.until(lambda: rs.counters(store).get("remote_written_profiles") == 1)
    with _open(tmp_path / "d", remote) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)


def test_records_whose_profile_the_disk_refuses_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_AGAIN_S", 0.0)
    remote = rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0)
    _fill(tmp_path, remote)
    fs = NoRoom()
    with _open(tmp_path / "b", remote, fs=fs) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)
        assert store.flush().durable_blocks == 0
        counts = rs.counters(store)
        assert (counts["remote_not_kept"], counts["disk_write_errors"] > 0) == (3, True)
        fs.is_full = False
        assert stores.stored(store, TOKENS) == len(TOKENS)
        assert store.flush().durable_blocks == 3
    with _open(tmp_path / "b", None) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)


def _without_profiles(tmp_path: Path, remote: RemoteConfig) -> Path:
    """A store of records whose profile it lost."""
    _fill(tmp_path, remote)
    shutil.rmtree(tmp_path / "a" / profiles.FOLDER)
    return tmp_path / "a"


def test_a_profile_that_the_folder_lost_comes_from_the_server(tmp_path: Path) -> None:
    remote = rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0)
    path = _without_profiles(tmp_path, remote)
    with _open(path, remote) as store:
        assert store.get(TOKENS) is None
        rs.until(lambda: rs.counters(store).get("remote_read_profiles") == 1)
        assert stores.stored(store, TOKENS) == len(TOKENS)
        assert store.put(TOKENS, stores.kv_of(TOKENS)).new_tokens == 0
    with _open(path, None) as store:
        assert stores.stored(store, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("start", [0, 64])
def test_a_put_replaces_what_cannot_be_decoded(tmp_path: Path, start: int) -> None:
    path = _without_profiles(tmp_path, rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0))
    with _open(path, None) as store:
        report = store.check(deep=True)
        assert (report.problems, report.verified_records, report.unreadable_records) == ((), 3, 3)
        layers = [(k[:, start:], v[:, start:]) for k, v in stores.kv_of(TOKENS)]
        assert store.put(TOKENS, layers, start=start).new_tokens == 0  # nobody knows yet that it is of no use
        assert store.get(TOKENS) is None
        assert store.explain(TOKENS).reason is Reason.UNREADABLE
        new = len(TOKENS) - start
        assert store.put(TOKENS, layers, start=start).new_tokens == new
        assert rs.counters(store)["replaced_unreadable"] == new // 64
        store.flush()
        report = store.check(deep=True)
        assert (report.problems, report.unreadable_records) == ((), start // 64)
        assert stores.stored(store, TOKENS) == (0 if start else len(TOKENS))


def test_what_takes_the_place_of_a_block_lives_as_long(tmp_path: Path) -> None:
    path = _without_profiles(tmp_path, rs.settings(f"memory:{tmp_path.name}", deadline_s=60.0))
    with _open(path, None) as store:
        assert store.get(TOKENS) is None
        assert store.put(TOKENS, stores.kv_of(TOKENS), ttl=60.0).new_tokens == len(TOKENS)
        store.flush()
        assert {block.expires for block in store.explain(TOKENS).blocks} == {0.0}
    with _open(path, None) as store:
        assert {block.expires for block in store.explain(TOKENS).blocks} == {0.0}
