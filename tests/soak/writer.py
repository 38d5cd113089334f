"""The writer of a soak: one process, one life. Eight threads work, are interrupted and brought to rest again; the store
is checked, closed and opened; children are forked. What is wrong goes to a file, and so does what was counted.

    python writer.py FOLDER WORLD LIFE SEED SECONDS END CALM

END: close, leave (without close), work (to be killed). CALM: 1 for no interrupts.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from workers import Worker, pid_bytes, resting
from worlds import NUMBERS, THREADS, WORLDS, World

from kvstore import KVStore

ROUND_S = 4.0  # of work between two rests
CHILD_S = 60.0  # that a forked child may take


class Writer:
    def __init__(self, folder: Path, world: World, life: int, seed: int, calm: bool) -> None:
        self.folder, self.world, self.life, self.calm = folder, world, life, calm
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        pins = folder / f"pins-{world.name}"
        kept = {int(line) for line in pins.read_text().split()} if pins.exists() else set()
        self.store = self._opened(kept)
        pins.write_text("")
        for number in kept:
            self.store.delete(world.tokens(number, world.lengths[0]))
            self.store.unpin(world.tokens(number, world.lengths[0]))
            self.store.delete(world.tokens(number, world.lengths[0]))
        self.workers = [Worker(world, lambda: self.store, i, self.rng.getrandbits(60), pins) for i in range(THREADS)]
        # What earlier lives put may still be there, whatever its length.
        for worker in self.workers:
            every = range(THREADS * NUMBERS)
            worker.longest = {(n, k): world.longest for n in (b"", b"other") for k in every}
            worker.pin(self.store)
            worker.start()

    def _opened(self, pinned: set[int]) -> KVStore:
        """Opens the store. Whatever was pinned and flushed is there."""
        store = self.world.open(self.folder)
        self.counts["openings"] += 1
        for number in pinned:
            tokens = self.world.tokens(number, self.world.lengths[0])
            hit = store.get(tokens)
            if hit is None or hit.tokens < len(tokens) or not self.world.exact(hit, tokens):
                self.wrong(f"pinned sequence {number} is gone after opening")
        self._check(store, "after opening")
        return store

    def _check(self, store: KVStore, when: str) -> None:
        for problem in store.check().problems:
            self.wrong(f"check {when}: {problem}")

    def wrong(self, text: str) -> None:
        with (self.folder / "violations.jsonl").open("a") as file:
            file.write(json.dumps({"life": self.life, "world": self.world.name, "wrong": text}) + "\n")

    def live(self, seconds: float, rest_at_the_end: bool) -> None:
        end, ended = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < end or not rest_at_the_end:
            for worker in self.workers:
                worker.resume()
            disturber = threading.Thread(target=self._disturb, args=(ended,), daemon=True)
            disturber.start()
            time.sleep(ROUND_S * (0.5 + self.rng.random()))
            ended.set()
            disturber.join()
            ended.clear()
            self._rest()

    def _rest(self) -> None:
        for text in resting(self.workers):
            self.wrong(text)
        self._check(self.store, "at rest")
        self.store.flush()
        if self.store.stats()["queue"]["bytes"] != 0:
            self.wrong(f"the queue holds {self.store.stats()['queue']} after a flush")
        if self.rng.random() < 0.3:
            self._reopen()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._sample()

    def _reopen(self) -> None:
        """Closes and opens: it holds what it held."""
        names = [(n, k) for worker in self.workers for (n, k), most in worker.longest.items() if most][:400]
        before = {name: self.store.contains(self.world.tokens(name[1]), namespace=name[0]) for name in names}
        self.store.close()
        self.store = self._opened(set().union(*(worker.pinned for worker in self.workers)))
        for (namespace, number), held in before.items():
            found = self.store.contains(self.world.tokens(number), namespace=namespace)
            if found != held and found < held:
                self.counts["shorter"] += 1
                self.counts["shorter_tokens"] += held - found
        self.counts["held"] += sum(before.values())

    def _sample(self) -> None:
        stats = self.store.stats()
        counts = sum((worker.counts for worker in self.workers), Counter(self.counts))
        row = {
            "t": time.time(), "who": "writer", "pid": os.getpid(), "life": self.life, "world": self.world.name,
            **pid_bytes(os.getpid()), "counts": counts, "disk": stats["disk"]["bytes"],
            "evicted": stats["counters"].get("disk_evicted_records", 0),
        }  # fmt: skip
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    # ---- what happens to a program ----

    def _disturb(self, ended: threading.Event) -> None:
        rng = random.Random(self.rng.getrandbits(60))
        while not ended.wait(rng.random() * 0.3):
            if rng.random() < 0.02:
                self._fork(rng)
            elif not self.calm:
                rng.choice(self.workers).interrupt()

    def _fork(self, rng: random.Random) -> None:
        """A child reads the store, and ends as programs do or is killed; it never hangs."""
        wanted = rng.randrange(THREADS * NUMBERS)
        pid = os.fork()
        if pid == 0:
            os._exit(self._as_child(wanted))
        end = time.monotonic() + CHILD_S
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.02)
        if found[0] == 0:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            self.wrong("a forked child hangs")
        elif found[1] != 0:
            self.wrong(f"a forked child ended with status {found[1]}")
        self.counts["forks"] += 1

    def _as_child(self, wanted: int) -> int:
        try:
            with self.world.open(self.folder, read_only=True) as reader:
                tokens = self.world.tokens(wanted)
                hit = reader.get(tokens)
                return 0 if hit is None or self.world.exact(hit, tokens) else 3
        except BaseException:
            return 4


def main() -> None:
    folder, name, life, seed, seconds, end, calm = sys.argv[1:]
    world = next(world for world in WORLDS if world.name == name)
    writer = Writer(Path(folder), world, int(life), int(seed), calm == "1")
    writer.live(float(seconds), rest_at_the_end=end != "work")
    for text in resting(writer.workers):
        writer.wrong(text)
    if end == "close":
        writer.store.close()
    os._exit(0) if end == "leave" else sys.exit(0)


if __name__ == "__main__":
    main()
