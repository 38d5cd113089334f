"""Eight processes that put to one store and get from it, beside one process with eight threads.

`python -m benchmarks.writers [--quick] [--workers 8] [--codec splitzip]`. One process owns the store (`SharedKVStore`),
the others hand it what they put in shared memory, and read the files directly. The peer is `KVStore` in one process
that does the same work with as many threads. There is no host tier in either, so that every get reads the disk. Caches
have the shape of SmolLM2's, 512 tokens each, and no two are alike; processes and tensors are there before the clock
starts.

- put: every worker puts its sequences; then one flush. Raw bytes a second, until all is durable.
- get: every worker gets the sequences of all workers. Raw bytes a second.
- both: half of the workers put and half get.
- grown: puts of sequences of which all but the last 64 tokens are stored: what a turn of a session costs, in
  milliseconds a put.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments, scratch, together
from kvstore import KVLayout, KVStore, ModelIdentity, SharedKVStore, StoreConfig, TierConfig
from kvstore.config import GIB

LAYOUT = KVLayout.uniform(30, 3, 64)
IDENTITY = ModelIdentity("shape of SmolLM2-135M", "", "", "", LAYOUT)
TOKENS = 512
TURN = 64
WAIT_S = 600.0


def main() -> None:
    parser = arguments("Several processes write one store.")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="processes, or threads (8)")
    parser.add_argument("--codec", default="auto", help="codec of the disk tier (auto)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each measurement (5)")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: build/scratch)")
    args = parser.parse_args()
    rows = Rows("writers", args.json)
    rounds, each = args.rounds or (2 if args.quick else 5), 1 if args.quick else 4
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(16 * GIB, args.codec), gate="off", learn="off")
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for team in (Threads, Processes) if number % 2 else (Processes, Threads):
            with scratch(args.dir) as folder:
                for case, value in measure(team(folder, config, args.workers), args.workers, each).items():
                    found.setdefault((team.name, case), []).append(value)
    for case in ("put", "get", "both", "grown"):
        ours, theirs = (statistics.median(found[name, case]) for name in (Processes.name, Threads.name))
        unit = "ms" if case == "grown" else "GB/s"
        rows.add(f"{args.workers} {Processes.name}", case, ours, unit, Threads.name, ours / theirs)
        rows.add(f"{args.workers} {Threads.name}", case, theirs, unit)
    rows.main_exit()


def measure(team: Any, workers: int, each: int) -> dict[str, float]:
    """GB/s of each case, and milliseconds of a put that adds a turn."""
    nbytes = TOKENS * LAYOUT.bytes_per_token
    try:
        team.run([("prepare", i, each) for i in range(workers)])
        put = team.run([("put", 0)] * workers)
        put += team.run([("flush",)])
        get = team.run([("get", [(w, i, 0) for w in range(workers) for i in range(each)])] * workers)
        half = workers // 2
        reads = [(w, i, 0) for w in range(workers) for i in range(each)][: each * 4]
        both = team.run([("put", 1)] * half + [("get", reads)] * (workers - half))
        both += team.run([("flush",)])
        grown = team.run([("grow", 0)] * workers)
        return {
            "put": workers * each * nbytes / put / 1e9,
            "get": workers * workers * each * nbytes / get / 1e9,
            "both": (half * each + (workers - half) * len(reads)) * nbytes / both / 1e9,
            "grown": grown * 1e3 / (workers * each),
        }
    finally:
        team.close()


class Worker:
    """What one process or thread does with an open store."""

    def __init__(self, store: KVStore | SharedKVStore) -> None:
        self._store = store
        self._kv: list[Any] = []
        self._number = 0

    def do(self, job: Sequence[Any]) -> float:
        """Does a job; returns the seconds."""
        call: Callable[..., None] = getattr(self, f"_{job[0]}")
        begin = time.perf_counter()
        call(*job[1:])
        return time.perf_counter() - begin

    def _prepare(self, number: int, each: int) -> None:
        self._number = number
        for i in range(each):
            made = torch.Generator().manual_seed(1000 * number + i)
            self._kv.append(_random_kv(TOKENS + TURN, made))

    def _put(self, round_: int) -> None:
        for i, kv in enumerate(self._kv):
            self._store.put(
                tokens_of(self._number, i, round_)[:TOKENS], [(k[:, :TOKENS], v[:, :TOKENS]) for k, v in kv]
            )

    def _grow(self, round_: int) -> None:
        for i, kv in enumerate(self._kv):
            self._store.put(tokens_of(self._number, i, round_), kv)

    def _get(self, which: list[tuple[int, int, int]]) -> None:
        for worker, i, round_ in which:
            hit = self._store.get(tokens_of(worker, i, round_)[:TOKENS], reserve=0)
            if hit is None or hit.tokens != TOKENS:
                raise RuntimeError(f"a sequence of worker {worker} is missing")

    def _flush(self) -> None:
        if self._store.flush().dropped_blocks:
            raise RuntimeError("blocks were dropped")


def tokens_of(worker: int, number: int, round_: int) -> np.ndarray[Any, Any]:
    rest = np.random.default_rng([worker, number, round_]).integers(0, 49_152, TOKENS + TURN, dtype=np.uint32)
    return rest


def _random_kv(count: int, made: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Normal values, which code about as caches do."""
    return [
        (torch.randn(3, count, 64, generator=made).bfloat16(), torch.randn(3, count, 64, generator=made).bfloat16())
        for _ in range(30)
    ]


class Threads:
    """One process that has the store open, and as many threads as there are workers."""

    name = "threads of one process"

    def __init__(self, folder: Path, config: StoreConfig, workers: int) -> None:
        self._store = KVStore(folder / "store", IDENTITY, config)
        self._workers = [Worker(self._store) for _ in range(workers)]

    def run(self, jobs: list[Any]) -> float:
        """Seconds from the start of all jobs to the end of the last."""
        return together([partial(worker.do, job) for worker, job in zip(self._workers, jobs, strict=False)])

    def close(self) -> None:
        self._store.close()


class Processes:
    """As many processes, each with the store open; the first owns it and works, too."""

    name = "processes"

    def __init__(self, folder: Path, config: StoreConfig, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.writers"])
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, folder / "store", config), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
            self._answer(mine)

    def run(self, jobs: list[Any]) -> float:
        """Seconds from the start of all jobs to the end of the last."""
        begin = time.perf_counter()
        pairs = list(zip(self._pipes, jobs, strict=False))
        for pipe, job in pairs:
            pipe.send(job)
        for pipe, _ in pairs:
            self._answer(pipe)
        return time.perf_counter() - begin

    def _answer(self, pipe: Connection) -> None:
        if not pipe.poll(WAIT_S):
            raise TimeoutError("a worker does not answer")
        answer = pipe.recv()
        if answer is not None:
            raise RuntimeError(answer)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in reversed(self._processes):
            process.join(WAIT_S)


def _serve(pipe: Connection, folder: Path, config: StoreConfig) -> None:
    torch.set_num_threads(1)
    with SharedKVStore(folder, IDENTITY, config) as store:
        worker = Worker(store)
        pipe.send(None)
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            try:
                worker.do(job)
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
            else:
                pipe.send(None)


if __name__ == "__main__":
    main()
