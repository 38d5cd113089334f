"""What random histories of a store have in common: a model of what the store may and must return, and what happens to
programs and disks.

Per namespace the model keeps the sequences that must be there in full (`must`), those that may be (`may`: what was put
and could since have been evicted, cut by a crash before a flush, or hit by damage), all that were ever put (`ever`),
and those that must survive a crash (`flushed`). A hit is at least as long as the first allow it to be, and at most as
long as the second.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from faultfs import Fault, FaultFS
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_stores import all_is_well

from kvstore import Hit, KVStore, ModelIdentity, StoreConfig

Tokens = tuple[int, ...]


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, np.uint32)


def shared(a: Tokens, b: Tokens) -> int:
    """How many first tokens of two sequences are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def held(store: KVStore, sequences: Iterable[Any] = (), namespace: bytes = b"") -> dict[str, Any]:
    """What an idle store holds: it must be the same after it was closed and opened again."""
    residency = store._residency
    census = residency.census()
    return {
        "records": census.indexed.tolist(),
        "holes": sorted(census.holes),
        "donors": census.donors,
        "offered": [r for r in census.indexed.tolist() if residency.content is not None and r in residency.content],
        "pinned": census.kept,
        "lengths": [store.contains(np.asarray(tokens, np.uint32), namespace=namespace) for tokens in sequences],
    }


def is_settled(store: KVStore) -> bool:
    """Whether the disk has everything that an idle store holds, and nothing else."""
    census, disk = store._residency.census(), store._residency.disk
    assert disk is not None
    return not (census.unwritten or census.replaced or disk._orphans)


class HistoryMachine(RuleBasedStateMachine):
    """A store in a folder of its own. A subclass sets `identity`, `tight` and `config`, and calls `open`."""

    identity: ModelIdentity
    tight: bool
    config: StoreConfig

    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(prefix="kvstore-history-", dir=base))
        self.path = self.home / "0"
        self.lives = 0
        self.fs = FaultFS()
        self.must: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.may: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.ever: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.flushed: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.store: KVStore | None = None
        self.damaged = False  # bits flipped in records that nobody has read since

    def open(self) -> None:
        self.store = None
        self.store = KVStore(self.path, self.identity, self.config, fs=self.fs)

    def close(self) -> None:
        store, self.store = self.opened, None
        store.close()

    @property
    def opened(self) -> KVStore:
        assert self.store is not None
        return self.store

    def recovered(self) -> bool:
        """Whether the disk failed: it no longer does, and the store is open again, with nothing in it certain."""
        if self.fs.fault is None:
            return False
        self.close()
        self.fs.forget_failed_syncs()
        self.fs.fault = None
        self.doubt()
        self.open()
        return True

    def reopened(self) -> None:
        """Closes and opens the store; it holds what it held, unless the disk refused a part of that."""
        before = None
        if self.fs.fault is None:
            self.opened.flush()
            before = self.holds() if is_settled(self.opened) else None
        self.close()
        self.fs.forget_failed_syncs()
        self.open()
        assert before is None or self.holds() == before

    def holds(self) -> list[dict[str, Any]]:
        return [held(self.opened, sorted(put), namespace) for namespace, put in self.ever.items()]

    def doubt(self) -> None:
        """Something happened after which nothing is certain to be there."""
        self.must = {name: set() for name in self.must}
        self.flushed = {name: set() for name in self.flushed}

    def was_put(self, tokens: Tokens, namespace: bytes) -> None:
        self.may[namespace].add(tokens)
        self.ever[namespace].add(tokens)
        if not self.tight and self.fs.fault is None and not (self.damaged and self._has_damage(tokens, namespace)):
            self.must[namespace].add(tokens)

    def _has_damage(self, tokens: Tokens, namespace: bytes) -> bool:
        """Whether a put wrote less than all, for a record that was there already is damaged: nobody had read it."""
        hit = self.opened.get(array(tokens), namespace=namespace)
        return hit is None or hit.tokens < len(tokens)

    def was_deleted(self, tokens: Tokens, namespace: bytes) -> None:
        """Of a sequence that was there in full: its prefixes may go with it; sequences that branch off stay."""
        for kept in (self.must, self.flushed):
            kept[namespace] = {s for s in kept[namespace] if shared(s, tokens) < min(len(s), len(tokens))}
        rest = {s for s in self.may[namespace] if s[: len(tokens)] != tokens} | {tokens[:-1]}
        self.may[namespace] = rest - {()}

    def agrees(self, found: int, asked: Tokens, namespace: bytes) -> None:
        least = max((shared(asked, s) for s in self.must[namespace]), default=0)
        most = max((shared(asked, s) for s in self.may[namespace]), default=0)
        assert least <= found <= most, (least, found, most, self.opened.stats()["counters"])

    def got(self, tokens: Tokens, namespace: bytes, limit: int | None) -> Hit | None:
        """A hit that is as long as the model allows; its bits are for the caller to check."""
        hit = self.opened.get(array(tokens), namespace=namespace, max_tokens=limit)
        self.agrees(hit.tokens if hit is not None else 0, tokens[:limit], namespace)
        return hit

    def prefetched(self, tokens: Tokens, namespace: bytes) -> None:
        found = self.opened.prefetch(array(tokens), namespace=namespace).result()
        assert found <= max((shared(tokens, s) for s in self.may[namespace]), default=0)

    def killed(self) -> None:
        """The files as they are at this moment, in another directory, are what a kill would have left. Nothing is
        written while they are copied: kills in the middle of a write have their own suite."""
        self.lives += 1
        copy = self.home / str(self.lives)
        disk = self.opened._residency.disk
        assert disk is not None
        with disk._write_lock:
            shutil.copytree(self.path, copy)
        self.fs.fault = None
        self.close()
        shutil.rmtree(self.path)
        self.path = copy
        self.fs.forget_failed_syncs()
        self.must = {name: set(kept) for name, kept in self.flushed.items()}
        self.open()

    @invariant()
    def everything_agrees(self) -> None:
        if self.store is not None:
            all_is_well(self.store)

    @rule(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), pick=st.integers(0, 3))
    def damage(self, where: float, bit: int, pick: int) -> None:
        """A bit flips in a segment or in the catalog while the store is closed. A catalog that is rebuilt from the
        segments may know again what was deleted."""
        self.close()
        self.fs.fault = None
        self.fs.forget_failed_syncs()
        files = [self.path / "catalog" / "data.mdb", *sorted(self.path.glob("segments/*.seg"))]
        file = files[pick % len(files)]
        content = bytearray(file.read_bytes())
        content[int(where * len(content))] ^= 1 << bit
        self.damaged = True
        file.write_bytes(content)
        self.doubt()
        self.may = {name: set(put) for name, put in self.ever.items()}
        self.was_damaged()
        self.open()

    def was_damaged(self) -> None:
        """Notes what only a subclass knows to be uncertain now; the store is still closed."""

    @rule(code=st.sampled_from([errno.ENOSPC, errno.EIO, "short"]), call=st.sampled_from(["pwritev", "fdatasync"]))
    @precondition(lambda self: self.fs.fault is None)
    def disk_fails(self, code: Any, call: str) -> None:
        self.fs.fault = Fault(call, 1, errno.EIO if call == "fdatasync" else code, sticky=True)
        # What is in the queue now may be lost, and a full disk makes room by evicting.
        self.doubt()

    @rule()
    def disk_recovers(self) -> None:
        self.fs.fault = None

    def holds_at_the_end(self) -> None:
        """Checks what only a subclass knows, of the flushed store."""

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self.fs.fault = None
                self.store.flush()
                self.holds_at_the_end()
                all_is_well(self.store, deep=not self.damaged)
                self.store.close()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)
