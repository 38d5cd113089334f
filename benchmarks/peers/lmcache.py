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
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import drop_page_cache, scratch

ROUNDS = 8


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: stores as acknowledged, stores with a sync at the end, loads with the page cache dropped,
    loads from the page cache."""

    store: float
    store_synced: float
    load_cold: float
    load_warm: float

    @classmethod
    def median(cls, runs: list[Speeds]) -> Speeds:
        return cls(
            *(
                statistics.median(getattr(run, name) for run in runs)
                for name in ("store", "store_synced", "load_cold", "load_warm")
            )
        )


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
