"""How much memory a store takes in all, at its busiest and afterwards: `python -m benchmarks.memory [--quick]`.

Each case is a process of its own. It puts sequences of 2,048 tokens (SmolLM2's layout, 47 MB raw, tensors that the
store must copy) as fast as it can, gets them again, one at a time, does nothing for half a minute, then closes the
store and keeps the object. Memory is what the process has more than before it opened the store, without the pages of
files (`RssAnon`), looked at every few milliseconds; the ratio is to `host.bytes`. What a get returns counts as long as
the program has it. `learning`: a store without a host tier that learns a profile from 40,960 tokens, at its busiest and
afterwards.

Quick: less of everything, no half minute, and nothing is learned.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB, Rows, arguments, scratch
from benchmarks.open import memory
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig

TOKENS = 2_048
LAYERS, HEADS, DIM = 30, 3, 64
IDENTITY = ModelIdentity("benchmark", "", "", "", KVLayout.uniform(LAYERS, HEADS, DIM))
CASES: dict[str, dict[str, Any]] = {
    "default": {"learn": "off"},
    "small": {
        "host": TierConfig(128 * MIB, "splitzip"),
        "write_queue_bytes": 64 * MIB,
        "group_bytes": 16 * MIB,
        "learn": "off",
    },
    "learning": {"host": TierConfig(0), "learn": "off"},
}
LEARNED_FROM = 20  # sequences
IDLE_S = 35.0  # after half a minute less is kept


def main() -> None:
    parser = arguments("The memory that a store takes in all.")
    parser.add_argument("--only", nargs="+", choices=CASES, help="cases (all; no learning where --quick)")
    parser.add_argument("--seconds", type=float, help="of puts, and of gets (10; 2 where --quick)")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: build/scratch)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seconds = args.seconds or (2.0 if args.quick else 10.0)
    if args.case is not None:
        taken = learning(args.dir) if args.case == "learning" else work(args.case, args.dir, args.seconds, args.quick)
        print(json.dumps(taken))
        return
    rows = Rows("memory", args.json)
    for name in args.only or [name for name in CASES if name != "learning" or not args.quick]:
        with scratch("memory", args.dir) as folder:
            command = [sys.executable, "-m", "benchmarks.memory", "--case", name, "--dir", str(folder / "store")]
            command += ["--seconds", str(args.seconds), *(["--quick"] if args.quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        host = StoreConfig(**CASES[name]).host.bytes
        for phase, taken in json.loads(done.stdout).items():
            case = f"{name}/{phase}"
            if host:
                rows.add(case, "memory", taken / MIB, "MiB", "host.bytes", taken / host)
            else:
                rows.add(case, "memory", taken / MIB, "MiB")
    rows.main_exit()


class Watch:
    """The most memory that this process has had since the last look, less what it had before. Bytes."""

    def __init__(self) -> None:
        self._before = self._most = memory()["RssAnon"]
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def look(self) -> int:
        with self._lock:
            now = memory()["RssAnon"]
            most, self._most = max(self._most, now), now
            return most - self._before

    def _run(self) -> None:
        while True:
            with self._lock:
                self._most = max(self._most, memory()["RssAnon"])
            time.sleep(0.005)


def work(name: str, path: Path, seconds: float, quick: bool) -> dict[str, int]:
    """Bytes of memory by phase."""
    kv = made(0)
    with KVStore(path.with_name("first"), IDENTITY):
        pass  # what is imported does not count
    watch, taken = Watch(), {}
    store = KVStore(path, IDENTITY, StoreConfig(**CASES[name]))
    taken["open"] = watch.look()
    count = repeated(lambda number: store.put(sequence(number), kv), seconds)
    taken["puts"] = watch.look()
    store.flush()
    watch.look()
    repeated(lambda number: store.get(sequence(number % count)), seconds)
    taken["gets"] = watch.look()
    if not quick:
        time.sleep(IDLE_S)
        watch.look()
        time.sleep(0.1)
        taken["idle"] = watch.look()
    store.close()
    watch.look()
    taken["closed"] = watch.look()
    return taken


def learning(path: Path) -> dict[str, int]:
    """Bytes of memory while a profile is learned, and afterwards."""
    store = KVStore(path, IDENTITY, StoreConfig(**CASES["learning"]))
    for number in range(LEARNED_FROM):
        store.put(sequence(number), made(number))
    store.flush()
    time.sleep(IDLE_S)
    watch = Watch()
    status = store.learn()
    if status.state != "adopted":
        raise RuntimeError(f"expected a store that learned, found {status}")
    busiest = watch.look()
    return {"busiest": busiest, "afterwards": watch.look()}


def repeated(call: Callable[[int], object], seconds: float) -> int:
    """Calls with 0, 1, 2 and so on, so long; returns how often."""
    until, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        call(number)
        number += 1
    return number


def sequence(number: int) -> np.ndarray:
    """Token ids `[2048]`, uint32."""
    return np.random.default_rng(number).integers(0, 1 << 15, TOKENS, dtype=np.uint32)


def made(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer (K, V), each of which follows from the layer before and from itself, so far as to be worth learning."""
    chance, width = torch.Generator().manual_seed(number), HEADS * DIM
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(0)) / 8
    rows, layers = torch.randn(TOKENS, width, generator=chance), []
    for _ in range(LAYERS):
        rows = 0.1 * rows @ mix + 0.9 * rows + 0.3 * torch.randn(TOKENS, width, generator=chance)
        layers.append((_heads(rows), _heads(rows @ mix)))
    return layers


def _heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(TOKENS, HEADS, DIM).transpose(0, 1).bfloat16()


if __name__ == "__main__":
    main()
