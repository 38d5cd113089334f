"""LMCache's own benchmark of its disk backend, `lmcache bench l2` with `fs_native`, run beside ours.

It lives in an environment of its own (requirements-peers.txt), so it is a program here, not a library. Each run gets
a fresh folder: in a used one its stores skip what exists, and its loads fail where the size differs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import MIB, Rows, drop_page_cache, scratch
from benchmarks.peers.stores.ours import PUT, Ours

ROUNDS = 8


class Speeds(NamedTuple):
    """Bytes per second: stores as acknowledged, stores with a sync at the end, loads with the page cache dropped,
    loads from the page cache."""

    store: float
    store_synced: float
    load_cold: float
    load_warm: float

    @classmethod
    def median(cls, runs: list[Speeds]) -> Speeds:
        return cls(*(statistics.median(of) for of in zip(*runs, strict=True)))


def bench(executable: Path, folder: Path, record: int, batch: int) -> Speeds:
    """One run: `ROUNDS` batches of `batch` records of `record` bytes. Raises `RuntimeError` with what it printed."""
    with scratch("lmcache", folder) as base:
        total = ROUNDS * batch * record
        os.sync()  # what others left dirty is not its to write
        store_s = _run(executable, base, record, batch, "store")
        begin = time.perf_counter()
        os.sync()
        sync_s = time.perf_counter() - begin
        drop_page_cache(base)
        cold_s = _run(executable, base, record, batch, "load")
        warm_s = _run(executable, base, record, batch, "load")
    return Speeds(total / store_s, total / (store_s + sync_s), total / cold_s, total / warm_s)


def compare(rows: Rows, folder: Path, name: str, record: int, executable: Path, quick: bool) -> None:
    """Rows of its benchmark and of the same done with the store, in turns."""
    theirs, mine, kept = [], [], []
    for number in range(1 if quick else 5):
        theirs.append(bench(executable, folder, record, PUT // record))
        mine.append(like_lmcache(folder / f"ours-{number}", record))
        kept.append(acknowledged(folder / f"kept-{number}", record))
    their, our = Speeds.median(theirs), Speeds.median(mine)
    referenced, case = statistics.median(kept), f"store/as-lmcache/{name}"
    rows.add(case, "store_referenced_GBps", referenced / 1e9, "GB/s", "lmcache fs_native", referenced / their.store)
    for key in ("store", "store_synced", "load_cold", "load_warm"):
        ours, other = getattr(our, key), getattr(their, key)
        rows.add(case, f"{key}_GBps", ours / 1e9, "GB/s", "lmcache fs_native", ours / other)
        rows.add(f"lmcache/{name}", f"{key}_GBps", other / 1e9, "GB/s")


def acknowledged(path: Path, record: int) -> float:
    """Bytes per second of puts of a model's cache, whose tensors the store keeps instead of copying them."""
    ours = Ours(path, record, 1024 * MIB)
    ours.sequence(ROUNDS + 1)
    begin = _put_all(ours)
    seconds = time.perf_counter() - begin
    ours.store.close()
    return ROUNDS * PUT / seconds


def _put_all(ours: Ours) -> float:
    """A warm-up batch and then all the others. Returns when the others began."""
    ours.put()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        ours.put()
    return begin


def like_lmcache(path: Path, record: int) -> Speeds:
    """What `lmcache bench l2` does, done with a store: as many bytes, the same batches and sizes, a warm-up batch,
    tensors whose owner may reuse them after the put, and then the loads.

    The store was used before, so the memory it copies to is there; so is the buffer of the other, made at its start.
    """
    ours = Ours(path, record, 1024 * MIB, copied=True)
    ours.sequence(2 * ROUNDS)
    ours.write(ROUNDS * PUT)
    begin = _put_all(ours)
    store_s = time.perf_counter() - begin
    ours.store.flush()
    synced_s = time.perf_counter() - begin
    ours.store.close()
    drop_page_cache(path)
    loads = []
    for tier in ("disk", "host"):
        ours = Ours(path, record, 1024 * MIB, host=512 * MIB if tier == "host" else 0)
        measured = range(ROUNDS + 1, 2 * ROUNDS + 1)
        ours.get(ROUNDS, "disk")
        for number in measured if tier == "host" else ():
            ours.prefetch(number)
        ours.sequence(measured.stop)
        begin = time.perf_counter()
        for number in measured:
            ours.get(number, tier)
        loads.append(ROUNDS * PUT / (time.perf_counter() - begin))
        ours.store.close()
    return Speeds(ROUNDS * PUT / store_s, ROUNDS * PUT / synced_s, *loads)


def _run(executable: Path, base: Path, record: int, batch: int, only: str) -> float:
    """Seconds that its measured rounds took (its warm-up round and its start left out)."""
    command = [str(executable), "bench", "l2", "--format", "json", "--only", only, "--rounds", str(ROUNDS)]
    command += ["--l2-adapter", json.dumps({"type": "fs_native", "base_path": str(base.absolute())})]
    command += ["--num-keys", str(batch), "--data-size-kb", str(record // 1024)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"LMCACHE_DISABLE_BANNER": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    begin, end = done.stdout.find("\n{"), done.stdout.rfind("\n}")
    if done.returncode or begin < 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    result = json.loads(done.stdout[begin : end + 2])["metrics"]["op_0"]
    if result["total_success"] != ROUNDS * batch or result["rounds_timed_out"]:
        raise RuntimeError(f"{' '.join(command)}: {result['total_success']} of {ROUNDS * batch} succeeded")
    return float(result["duration_avg_ms"]) / 1000 * ROUNDS
