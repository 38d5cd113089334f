"""The threads of a soak's writer: each calls everything, on sequences of its own, and checks what it gets."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worlds import NAMESPACES, NUMBERS, PINS, THREADS, World

from kvstore import KVStore
from kvstore.errors import KVStoreError


class Interrupted(BaseException):
    """What strikes a thread in the middle of a call."""


class Worker(threading.Thread):
    """Works on the store that `stores` gives, from `resume` to `pause`, for ever. found: what was wrong.

    longest: of a sequence, the most tokens that may be there; it grows before a put begins, and falls when a delete has
    returned. pinned: what must be there."""

    def __init__(self, world: World, stores: Callable[[], KVStore], index: int, seed: int, pins: Path) -> None:
        super().__init__(daemon=True, name=f"soak-{index}")
        self.world, self.stores, self.index, self.pins = world, stores, index, pins
        self.rng = random.Random(seed)
        self.longest: dict[tuple[bytes, int], int] = {}
        self.pinned: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        self.inside = False
        self._go, self._idle = threading.Event(), threading.Event()
        self._calls: list[tuple[int, Callable[[KVStore], None]]] = [
            (30, self._put), (40, self._get), (6, self._contains), (4, self._prefetch), (4, self._explain),
            (6, self._delete), (3, self._flush), (6, self._session), (1, self._look), (2, self._approximate),
        ]  # fmt: skip

    def number(self, other: bool = False) -> int:
        owner = self.rng.randrange(THREADS) if other else self.index
        return 5 * (THREADS * self.rng.randrange(NUMBERS // 5) + owner) + self.rng.randrange(5)

    # ---- the thread ----

    def run(self) -> None:
        while True:
            try:
                self._idle.set()
                self._go.wait()
                self._idle.clear()
                while self._go.is_set():
                    self._once()
            except Interrupted:
                self.inside = False
                self.counts["interrupts"] += 1

    def resume(self) -> None:
        self._go.set()

    def pause(self, seconds: float = 120.0) -> bool:
        """Returns whether the thread came to rest; if not, a call of it hangs."""
        self._go.clear()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._idle.wait(1.0) and self._idle.is_set():
                return True
        return False

    def interrupt(self) -> None:
        if self.inside and self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(Interrupted))

    def _once(self) -> None:
        weights, calls = zip(*self._calls, strict=True)
        call = self.rng.choices(calls, weights)[0]
        self.inside = True
        try:
            call(self.stores())
            self.counts[call.__name__[1:]] += 1
        except KVStoreError as error:
            self.found.append(f"{call.__name__[1:]}: {error!r}")
        except (AssertionError, ValueError, RuntimeError, KeyError, OSError) as error:
            self.found.append(f"{call.__name__[1:]}: {error!r}")
        finally:
            self.inside = False

    # ---- calls ----

    def _put(self, store: KVStore) -> None:
        rng, namespace = self.rng, self.rng.choice(NAMESPACES)
        number, length = self.number(), rng.choice(self.world.lengths)
        tokens = self.world.tokens(number, length)
        self.longest[namespace, number] = max(length, self.longest.get((namespace, number), 0))
        ttl = rng.uniform(0.01, 3.0) if rng.random() < 0.05 else None
        store.put(tokens, self.world.kv(tokens, namespace), namespace=namespace, ttl=ttl)

    def pin(self, store: KVStore) -> None:
        """What is pinned and flushed is there until the end of the life, and after a kill."""
        for turn in range(PINS):
            number = 100_000 + 5 * (PINS * self.index + turn)
            tokens = self.world.tokens(number, self.world.lengths[0])
            done = store.put(tokens, self.world.kv(tokens), pin=True)
            store.flush()
            if store.contains(tokens) == len(tokens) and not done.dropped_blocks and done.pinned:
                self.pinned.add(number)
                with self.pins.open("a") as file:
                    file.write(f"{number}\n")

    def _checked(self, store: KVStore, number: int, namespace: bytes, **options: Any) -> int:
        tokens = self.world.tokens(number)
        hit = store.get(tokens, namespace=namespace, **options)
        if hit is None:
            return 0
        self.counts["tokens"] += hit.tokens
        assert self.world.exact(hit, tokens, namespace), f"wrong bytes in {hit.tokens} tokens of sequence {number}"
        return int(hit.tokens)

    def _get(self, store: KVStore) -> None:
        if self.pinned and self.rng.random() < 0.1:
            number = self.rng.choice(sorted(self.pinned))
            found = self._checked(store, number, b"")
            assert found >= self.world.lengths[0], f"pinned sequence {number}: {found} tokens"
            return
        own, namespace = self.rng.random() < 0.5, self.rng.choice(NAMESPACES)
        number = self.number(other=not own)
        limit = self.rng.choice((None, None, 5))
        found = self._checked(store, number, namespace, max_tokens=limit, reserve=self.rng.choice((None, 0, 16)))
        if own:
            self._within(found, namespace, number, "get")
        self.counts["hits"] += found > 0

    def _within(self, found: int, namespace: bytes, number: int, call: str) -> None:
        most = self.longest.get((namespace, number), 0)
        assert found <= most, f"{call}: {found} tokens of sequence {number}, at most {most} were put"

    def _contains(self, store: KVStore) -> None:
        namespace, number = self.rng.choice(NAMESPACES), self.number()
        found = store.contains(self.world.tokens(number), namespace=namespace)
        self._within(found, namespace, number, "contains")

    def _prefetch(self, store: KVStore) -> None:
        done = store.prefetch(self.world.tokens(self.number(other=True)))
        if self.rng.random() < 0.5:
            assert done.result(120) <= self.world.longest

    def _explain(self, store: KVStore) -> None:
        tokens = self.world.tokens(self.number(other=True))
        assert 0 <= store.explain(tokens, namespace=self.rng.choice(NAMESPACES)).tokens <= len(tokens)

    def _delete(self, store: KVStore) -> None:
        namespace, number = self.rng.choice(NAMESPACES), self.number()
        for length in reversed(self.world.lengths):
            store.delete(self.world.tokens(number, length), namespace=namespace)
        found = store.contains(self.world.tokens(number), namespace=namespace)
        assert found == 0, f"sequence {number} was deleted, {found} tokens are there"
        self.longest[namespace, number] = 0

    def _flush(self, store: KVStore) -> None:
        store.flush()

    def _session(self, store: KVStore) -> None:
        rng, name = self.rng, f"session {self.index} {self.rng.randrange(6)}"
        session, what = store.session(name), rng.randrange(5)
        if what < 2:
            number, length = self.number(), rng.choice(self.world.lengths)
            tokens = self.world.tokens(number, length)
            self.longest[b"", number] = max(length, self.longest.get((b"", number), 0))
            session.save(tokens, self.world.kv(tokens))
        elif what == 2 and session.exists:
            hit, held = session.resume(), session.tokens
            assert hit is None or self.world.exact(hit, held), f"wrong bytes in session {name}"
        elif what == 3 and session.exists:
            session.fork(f"session {self.index} {rng.randrange(6)}")
        elif what == 4:
            session.delete()

    def _look(self, store: KVStore) -> None:
        what = self.rng.randrange(4)
        if what == 0:
            store.sessions()
        elif what == 1:
            assert store.stats()["queue"]["bytes"] >= 0
        elif what == 2:
            store.clusters(64.0)
        else:
            problems = store.check().problems
            assert not problems, problems

    def _approximate(self, store: KVStore) -> None:
        from kvstore import Approximate

        if self.world.name == "families":
            store.get(self.world.tokens(self.number(other=True)), approximate=Approximate())


def resting(workers: list[Worker]) -> list[str]:
    """Brings all threads to rest; what was wrong meanwhile."""
    hang = [worker.name for worker in workers if not worker.pause()]
    found = [f"{worker.name}: {text}" for worker in workers for text in worker.found]
    for worker in workers:
        worker.found.clear()
    return [f"hangs: {name}" for name in hang] + found


def pid_bytes(pid: int) -> dict[str, int]:
    """Memory, descriptors and threads of a process; no memory of one that has just ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "rss": int(fields.get("VmRSS", "0 kB").split()[0]) * 1024,
        "threads": int(fields["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }
