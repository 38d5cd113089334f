"""An engine that fails as it is told: for tests, and to see how a program of yours takes a bad day of its servers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from kvstore.errors import RemoteFull, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import AgingEngine, RangedEngine, RemoteEngine, RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.values import scatter


@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong, and how often: shares of the calls, each from 0 to 1, drawn independently.

    Args:
        seed: the same seed and the same calls in the same order give the same faults.
        delayed: calls that take `delay_s` longer. What is left of their time bounds them all the same.
        delay_s: how much longer.
        failing: calls that raise `RemoteUnavailable`, and do nothing.
        hanging: calls that take all of their time and raise `RemoteTimeout`; a write may have happened.
        full: writes that raise `RemoteFull`.
        missing: values that are not found, and are said not to be there.
        ghosts: values that are said to be there, and are not.
        truncated: values that come back shorter.
        flipped: values of which one bit is another.
        swapped: values that come back as the one that was read before.

    Example:
        >>> FaultPlan(seed=1, failing=0.5).flipped
        0.0
    """

    seed: int = 0
    delayed: float = 0.0
    delay_s: float = 0.0
    failing: float = 0.0
    hanging: float = 0.0
    full: float = 0.0
    missing: float = 0.0
    ghosts: float = 0.0
    truncated: float = 0.0
    flipped: float = 0.0
    swapped: float = 0.0


class FaultyEngine:
    """A `RemoteEngine` around another: `open_engine(url, faults=FaultPlan(...))`. Counts what it does: `faults_flipped`
    and so on.

    Args:
        engine: gets the calls that do not fail; closed with this one.
        plan: what goes wrong. May be replaced at any time by setting `plan`.

    Example:
        >>> from kvstore.tiers.remote.engines.memory import MemoryEngine
        >>> engine = FaultyEngine(MemoryEngine("faults"), FaultPlan(missing=1.0))
        >>> engine.put("kvs1/a", [b"value"], timeout_s=1), engine.exist(["kvs1/a"], timeout_s=1)
        (True, [False])
        >>> engine.stats()["faults_missing"]
        1
    """

    def __init__(self, engine: RemoteEngine, plan: FaultPlan) -> None:
        self.plan = plan
        self._engine = engine
        self._counts = Counts()
        self._random = random.Random(plan.seed)
        self._lock = threading.Lock()  # of the two below
        self._last = b""

    @property
    def limits(self) -> RemoteLimits:
        return self._engine.limits

    def endpoint(self, key: str) -> str:
        return self._engine.endpoint(key)

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        with self._call(timeout_s) as left_s:
            size = self._engine.get_into(key, buffer, left_s)
            if size is None or self._hits("missing"):
                return None
            return self._spoilt(buffer.cast("B"), size)

    def get_parts_into(self, key: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int | None:
        with self._call(timeout_s) as left_s:
            value = memoryview(bytearray(sum(buffer.nbytes for buffer in buffers)))
            size = cast(RangedEngine, self._engine).get_parts_into(key, offset, [value], left_s)
            if size is None or self._hits("missing"):
                return None
            return scatter(value[: self._spoilt(value, size)], buffers)

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        with self._call(timeout_s) as left_s:
            if self._hits("full"):
                raise RemoteFull("planned: the server is full")
            return self._engine.put(key, parts, left_s, ttl_s, over)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        with self._call(timeout_s) as left_s:
            there = self._engine.exist(keys, left_s)
            return [not self._hits("missing") if one else self._hits("ghosts") for one in there]

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        with self._call(timeout_s) as left_s:
            self._engine.touch(keys, ttl_s, left_s)

    def ages(self, keys: Sequence[str], timeout_s: float) -> list[float | None]:
        with self._call(timeout_s) as left_s:
            return cast(AgingEngine, self._engine).ages(keys, left_s)

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        with self._call(timeout_s) as left_s:
            return self._engine.delete(keys, left_s)

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        with self._call(timeout_s) as left_s:
            names = self._engine.list(prefix, left_s)
        for name in names:
            if not self._hits("missing"):
                yield name

    def stats(self) -> Mapping[str, float]:
        """Those of the engine inside, with calls as they came to this one, and `faults_NAME` for each kind of fault."""
        ours = {name: count for name, count in self._counts.values().items() if not name.startswith("bytes_")}
        return {**self._engine.stats(), **ours}

    def close(self) -> None:
        self._engine.close()

    @contextmanager
    def _call(self, timeout_s: float) -> Iterator[float]:
        """The seconds that the call inside may take; or its fault."""
        deadline = Deadline(timeout_s)
        with self._counts.call():
            if self._hits("delayed"):
                time.sleep(min(self.plan.delay_s, deadline.left_s()))
            if self._hits("failing"):
                raise RemoteUnavailable("planned: the server cannot be reached")
            hangs = self._hits("hanging")
            yield deadline.left_s()
            if hangs:
                time.sleep(deadline.left_s())
                raise deadline.passed()

    def _hits(self, kind: str) -> bool:
        share: float = getattr(self.plan, kind)
        if not share:
            return False
        with self._lock:
            hit = self._random.random() < share
        if hit:
            self._counts.add(**{f"faults_{kind}": 1})
        return hit

    def _spoilt(self, value: memoryview, size: int) -> int:
        """Do to a value that was read what the plan says; return its size."""
        before, self._last = self._last, bytes(value[:size]) if self.plan.swapped else b""
        if before and len(before) <= value.nbytes and self._hits("swapped"):
            value[: len(before)] = before
            size = len(before)
        if size and self._hits("flipped"):
            with self._lock:
                bit = self._random.randrange(size * 8)
            value[bit // 8] ^= 1 << bit % 8
        if size and self._hits("truncated"):
            with self._lock:
                size = self._random.randrange(size)
        return size
