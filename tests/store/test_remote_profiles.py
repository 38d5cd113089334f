"""Records that need a profile are read by stores that never had it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import profile_stores as stores
import remotestores as rs
import small_stores as small

from kvstore import KVStore, RemoteConfig
from kvstore.tiers.remote.opening import open_engine

TOKENS = stores.tokens_of(1, 3 * 64)
LONG_S = 60.0


def _open(path: Path, remote: RemoteConfig | None, codec: str = "entropy", **settings: Any) -> KVStore:
    disk = 1024 * small.SEGMENT
    config = small.config(disk=disk, host=0, codec=codec, block_tokens=64, remote=remote, **settings)
    return KVStore(path, small.IDENTITY, config)


def _fill(tmp_path: Path, remote: RemoteConfig) -> None:
    with _open(tmp_path / "a", remote, "predictive", profile=stores.save(0, tmp_path)) as store:
        store.put(TOKENS, stores.kv_of(TOKENS))
        assert store.flush(remote=True).remote_due == 0
        counts = rs.counters(store)
        assert (counts["remote_written_profiles"], counts["remote_written_records"]) == (1, 3)


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
    engine = open_engine(remote.url)
    (name,) = [name for name in engine.list("kvs1/", LONG_S) if "/profile/" in name]
    engine.delete([name], LONG_S)
    engine.put_if_absent(name, [stores.save(1, tmp_path).read_bytes()], LONG_S)
    with _open(tmp_path / "b", remote) as store:
        assert stores.stored(store, TOKENS) == 0
        counts = rs.counters(store)
        assert (counts["remote_damaged"], counts["unknown_profile"] > 0) == (1, True)
        assert not list((tmp_path / "b").glob("profiles/*.safetensors"))
