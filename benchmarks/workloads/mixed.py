"""Many threads that put, get and resume conversations at once, for `python -m benchmarks.mixed`.

A conversation grows by one block a put up to `TURNS` blocks; the next put of its session begins another one. Sessions
are chosen by Zipf's law. Ours evicts by itself; for a peer, the oldest conversations are deleted when the budget is
full.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.common import MIB, together
from benchmarks.peers.stores.keyed import KEYED, Keyed, file_bytes
from benchmarks.workloads.memory import limit_memory

RECORD = MIB // 2
BLOCK = 64  # tokens
TURNS = 8
TENSORS = 32  # K and V of 16 layers
MEAN = RECORD * (TURNS + 1) // 2  # bytes of a session
PUTS, RESUMES = 0.2, 0.1  # of all calls; the others are gets
SKEW = 1.0
# Room on disk for what the sessions hold, for conversations that others took the place of, and for recycling.
ROOM, LEAST_BUDGET = 1.25, 160 * MIB


@dataclass
class Session:
    """One session: its conversation, and how many blocks of it were put. `busy` is held by whoever puts."""

    conversation: int = 0
    turns: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)


class Subject(Protocol):
    """What is measured. Thread-safe, but for one put at a time to a session."""

    def put(self, session: int, conversation: int, turn: int) -> None:
        """Store block `turn` of a conversation whose blocks before are stored."""

    def get(self, session: int, conversation: int, turns: int) -> bool:
        """Bring the conversation into memory; False if some of it is gone."""

    def resume(self, session: int, conversation: int, turns: int) -> bool:
        """The same by the name of the session, which says what its conversation is."""

    def finish(self) -> dict[str, float]:
        """Make all durable; return live_bytes and file_bytes."""


class OurStore:
    """Sessions of a store, raw records."""

    def __init__(self, folder: Path, host: int, budget: int) -> None:
        from benchmarks.peers.stores.ours import identity_for, noise
        from kvstore import KVStore, StoreConfig, TierConfig

        identity = identity_for(RECORD)
        config = StoreConfig(
            host=TierConfig(host, "raw"),
            disk=TierConfig(budget, "raw"),
            write_queue_bytes=host // 4,
            group_bytes=host // 4,
            donors=False,
            learn="off",
        )
        self._store = KVStore(folder, identity, config)
        self._kv = noise(identity.layout, TURNS * BLOCK)

    @staticmethod
    def _tokens(session: int, conversation: int, turns: int) -> Any:
        first = (session * 1_000_003 + conversation) % (1 << 31)
        return np.arange(first, first + turns * BLOCK, dtype=np.uint32)

    def put(self, session: int, conversation: int, turn: int) -> None:
        tokens = self._tokens(session, conversation, turn + 1)
        kv = [(k[:, :, : len(tokens)], v[:, :, : len(tokens)]) for k, v in self._kv]
        if self._store.session(str(session)).save(tokens, kv).dropped_blocks:
            raise RuntimeError("a put was dropped: this disk is slower than the put's time limit")

    def get(self, session: int, conversation: int, turns: int) -> bool:
        hit = self._store.get(self._tokens(session, conversation, turns), reserve=0)
        return hit is not None and hit.tokens == turns * BLOCK

    def resume(self, session: int, conversation: int, turns: int) -> bool:
        hit = self._store.session(str(session)).resume(reserve=0)
        return hit is not None and hit.tokens >= turns * BLOCK

    def finish(self) -> dict[str, float]:
        self._store.flush()
        stats = self._store.stats()
        return {"live_bytes": stats["disk"]["bytes"], "file_bytes": stats["disk"]["used_bytes"]}


class PeerStore:
    """A peer, a value for each block and one for what a session stands for; the oldest conversations go when the budget
    is full, in the put that needs their room, as a program would do it.

    A get ends with a tensor of each layer's K and V, as ours does: views of what was read, made by one call. They lie
    in pieces, one for each block, which a model could not use as they are.
    """

    def __init__(self, folder: Path, kind: str, budget: int) -> None:
        self._peer: Keyed = KEYED[kind][1](folder, RECORD, budget // RECORD)
        self._folder, self._most = folder, int(budget * 0.9) // RECORD
        self._blocks: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()
        self._value = memoryview(np.random.default_rng(0).bytes(RECORD))
        self._here = threading.local()

    def put(self, session: int, conversation: int, turn: int) -> None:
        name, gone = (session, conversation), []
        with self._lock:
            self._blocks[name] = turn + 1
            self._blocks.move_to_end(name)
            self._count += 1
            while self._count > self._most:
                old, blocks = next(iter(self._blocks.items()))
                if old == name:
                    break
                del self._blocks[old]
                self._count -= blocks
                gone.append((old, blocks))
        for (other, number), blocks in gone:
            for block in range(blocks):
                self._peer.delete(f"{other}-{number}-{block}")
        self._peer.put(f"{session}-{conversation}-{turn}", self._value)
        note = json.dumps({"conversation": conversation, "turns": turn + 1}).encode().ljust(4096)
        self._peer.put(f"s{session}", memoryview(bytearray(note)))

    def get(self, session: int, conversation: int, turns: int) -> bool:
        name = (session, conversation)
        with self._lock:
            if name not in self._blocks:
                return False
            self._blocks.move_to_end(name)
        target = self._target()
        views = [target[block * RECORD : (block + 1) * RECORD] for block in range(turns)]
        found = [self._peer.get(f"{session}-{conversation}-{block}", out) for block, out in enumerate(views)]
        values = torch.frombuffer(target, dtype=torch.bfloat16, count=turns * RECORD // 2)
        return all(found) and len(values.view(turns, TENSORS, -1).unbind(1)) == TENSORS

    def resume(self, session: int, conversation: int, turns: int) -> bool:
        if not self._peer.get(f"s{session}", self._target()[:4096]):
            return False
        return self.get(session, conversation, turns)

    def _target(self) -> memoryview:
        target: memoryview | None = getattr(self._here, "target", None)
        if target is None:
            target = self._here.target = memoryview(bytearray(TURNS * RECORD))
        return target

    def finish(self) -> dict[str, float]:
        os.sync()
        return {"live_bytes": float(self._count * RECORD), "file_bytes": float(file_bytes(self._folder))}


class Load:
    """The sessions, and the threads that use them."""

    def __init__(self, subject: Subject, sessions: int) -> None:
        self._subject = subject
        self._sessions = [Session() for _ in range(sessions)]
        shares = 1 / np.arange(1, sessions + 1) ** SKEW
        self._shares = np.cumsum(shares / shares.sum())
        self._put_bytes = 0
        self._lock = threading.Lock()

    def fill(self, nbytes: int) -> None:
        """Put `nbytes` or more: to every session, with as many blocks as it has in the long run."""
        order = np.random.default_rng(0)
        while self._put_bytes < nbytes:
            for number in order.permutation(len(self._sessions)).tolist():
                for _ in range(int(order.integers(1, TURNS + 1))):
                    self._put(number, self._sessions[number])

    def run(self, threads: int, seconds: float, seed: int) -> dict[str, Any]:
        """Let so many threads work so long; return the seconds of each kind of call, and what they found."""
        samples: dict[str, list[float]] = {"get": [], "put": [], "resume": []}
        found = {"hits": 0, "misses": 0}
        begun, before = threading.Barrier(threads), self._put_bytes
        end = [0.0]

        def work(number: int) -> None:
            self._work(np.random.default_rng([seed, number]), begun, end, seconds, samples, found)

        own = written()
        together([partial(work, number) for number in range(threads)])
        sizes = self._subject.finish()
        written_bytes = written() - own
        return {**samples, **found, **sizes, "put_bytes": self._put_bytes - before, "written_bytes": written_bytes}

    def _work(
        self,
        chance: np.random.Generator,
        begun: threading.Barrier,
        end: list[float],
        seconds: float,
        samples: dict[str, list[float]],
        found: dict[str, int],
    ) -> None:
        begun.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            number = int(np.searchsorted(self._shares, chance.random()))
            session, kind = self._sessions[min(number, len(self._sessions) - 1)], chance.random()
            if kind < PUTS:
                took = self._put(number, session)
                if took is not None:
                    samples["put"].append(took)
                continue
            conversation, turns = session.conversation, session.turns
            name = "resume" if kind < PUTS + RESUMES else "get"
            call: Callable[[int, int, int], bool] = getattr(self._subject, name)
            begin = time.perf_counter()
            there = call(number, conversation, turns)
            samples[name].append(time.perf_counter() - begin)
            found["hits" if there else "misses"] += 1  # under the interpreter's lock, and near enough
            if not there and session.conversation == conversation:
                self._put(number, session, anew=True)

    def _put(self, number: int, session: Session, anew: bool = False) -> float | None:
        """Seconds of the next put of a session; None if another thread puts to it. anew: begin another conversation."""
        if not session.busy.acquire(blocking=False):
            return None
        try:
            conversation, turn = session.conversation, session.turns
            if turn == TURNS or anew:
                conversation, turn = conversation + 1, 0
            begin = time.perf_counter()
            self._subject.put(number, conversation, turn)
            seconds = time.perf_counter() - begin
            if turn == 0:
                session.turns = 0
            session.conversation, session.turns = conversation, turn + 1
        finally:
            session.busy.release()
        with self._lock:
            self._put_bytes += RECORD
        return seconds


def written() -> int:
    """Bytes that this process has let the disk write, page cache included."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))


def subject_of(kind: str, folder: Path, host: int, budget: int) -> Subject:
    """Ours, with that much host memory, or a peer, by name."""
    return OurStore(folder, host, budget) if kind == "store" else PeerStore(folder, kind, budget)


def main() -> None:
    """Serve one subject: a line of JSON in, one out, until the end of the input."""
    kind, folder, host, working, memory = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    budget = max(LEAST_BUDGET, int(ROOM * working))
    load = Load(subject_of(kind, folder, host, budget), max(2, working // MEAN))
    limited = memory if memory and limit_memory(memory) else 0  # from here on: what was imported does not count
    load.fill(int(1.25 * budget) if kind == "store" else 1)  # ours evicts from then on, and uses segments again
    print(json.dumps({"memory": limited}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(load.run(asked["threads"], asked["seconds"], asked["seed"])), file=answers, flush=True)
    os._exit(0)  # what is kept is thrown away


if __name__ == "__main__":
    main()
