"""Random histories of a store whose sequences share passages, so that most of its blocks are members of families.

As test_store_model.py: every hit is checked bit for bit, is at least as long as what must be there allows, and at most
as long as what may be there. After each history no member has outlived its donor.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import family_stores
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from faultfs import Fault, FaultFS
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_stores import SEGMENT, all_is_well

from kvstore import KVStore

Tokens = tuple[int, ...]
_TEXTS = [tuple(family_stores.passage(n, 3 * family_stores.BLOCK).tolist()) for n in (1, 2)]
_BEGINNINGS = [(), *(tuple(family_stores.passage(10 + n, 9 * n + 5).tolist()) for n in range(3))]
BEGINNINGS = st.sampled_from(_BEGINNINGS)
PIECES = st.sampled_from([text[a:b] for text in _TEXTS for a, b in ((0, 96), (0, 64), (5, 80), (32, 96))])
SEQUENCES = st.tuples(BEGINNINGS, PIECES, st.just(()) | PIECES).map(lambda parts: sum(parts, ()))
NAMESPACES = st.sampled_from([b"", b"", b"other"])
ROOMY, TIGHT = 64 * SEGMENT, 4 * SEGMENT
_FULL = os.environ.get("KVSTORE_FAULTS") == "full"


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, np.uint32)


@lru_cache(maxsize=256)
def kv_of(tokens: Tokens, namespace: bytes) -> family_stores.Layers:
    return family_stores.kv_of(tokens, namespace)


def shared(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class FamilyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(prefix="kvstore-families-", dir=base))
        self.path = self.home / "0"
        self.lives = 0
        self.fs = FaultFS()
        self.must: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.may: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.ever: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.flushed: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.store: KVStore | None = None
        self.damaged = False  # bits flipped in records that nobody has read since

    @initialize(tight=st.booleans(), host=st.sampled_from([0, 0, 60_000]))
    def open_first(self, tight: bool, host: int) -> None:
        self.tight = tight
        self.config = family_stores.config(host=host, disk=TIGHT if tight else ROOMY)
        self.open()

    def open(self) -> None:
        self.store = None
        self.store = KVStore(self.path, family_stores.IDENTITY, self.config, fs=self.fs)

    @property
    def opened(self) -> KVStore:
        assert self.store is not None
        return self.store

    def doubt(self) -> None:
        """Something happened after which nothing is certain to be there."""
        self.must = {name: set() for name in self.must}
        self.flushed = {name: set() for name in self.flushed}

    @invariant()
    def everything_agrees(self) -> None:
        if self.store is not None:
            all_is_well(self.store)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, pin=st.sampled_from([False, False, False, True]))
    def put(self, tokens: Tokens, namespace: bytes, pin: bool) -> None:
        pin = pin and not self.tight
        self.opened.put(array(tokens), kv_of(tokens, namespace), namespace=namespace, pin=pin)
        self.may[namespace].add(tokens)
        self.ever[namespace].add(tokens)
        if not self.tight and self.fs.fault is None:
            self.must[namespace].add(tokens)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, limit=st.none() | st.integers(1, 200))
    def get(self, tokens: Tokens, namespace: bytes, limit: int | None) -> None:
        asked = tokens[:limit]
        hit = self.opened.get(array(tokens), namespace=namespace, max_tokens=limit)
        found = hit.tokens if hit is not None else 0
        least = max((shared(asked, s) for s in self.must[namespace]), default=0)
        most = max((shared(asked, s) for s in self.may[namespace]), default=0)
        assert least <= found <= most, (least, found, most, self.opened.stats()["counters"])
        if hit is not None:
            want = kv_of(asked[:found], namespace)
            for pair, expected in zip(hit.layers, want, strict=True):
                for a, b in zip(pair, expected, strict=True):
                    assert a[0].contiguous().view(torch.int16).equal(b.view(torch.int16))

    @rule(pick=st.integers(0, 1000), namespace=NAMESPACES)
    def delete(self, pick: int, namespace: bytes) -> None:
        known = sorted(self.may[namespace])
        if not known:
            return
        tokens = known[pick % len(known)]
        whole = self.opened.contains(array(tokens), namespace=namespace) == len(tokens)
        self.opened.delete(array(tokens), namespace=namespace)
        if self.fs.fault is not None:
            self.doubt()  # what was coded against it could not be written anew
        if whole:
            for kept in (self.must, self.flushed):
                kept[namespace] = {s for s in kept[namespace] if shared(s, tokens) < min(len(s), len(tokens))}
            rest = {s for s in self.may[namespace] if s[: len(tokens)] != tokens} | {tokens[:-1]}
            self.may[namespace] = rest - {()}

    @rule()
    def flush(self) -> None:
        self.opened.flush()
        if self.fs.fault is None:
            self.flushed = {name: set(kept) for name, kept in self.must.items()}

    @rule(tokens=SEQUENCES, namespace=NAMESPACES)
    def prefetch(self, tokens: Tokens, namespace: bytes) -> None:
        found = self.opened.prefetch(array(tokens), namespace=namespace).result()
        assert found <= max((shared(tokens, s) for s in self.may[namespace]), default=0)

    @rule()
    def reopen(self) -> None:
        self.opened.close()
        self.fs.forget_failed_syncs()
        if self.fs.fault is not None:
            self.fs.fault = None
            self.doubt()
        self.open()

    @rule()
    def crash(self) -> None:
        """The files as they are at this moment, in another directory, are what a kill would have left."""
        self.lives += 1
        copy = self.home / str(self.lives)
        disk = self.opened._residency.disk
        assert disk is not None
        with disk._write_lock:
            shutil.copytree(self.path, copy)
        self.fs.fault = None
        self.opened.close()
        shutil.rmtree(self.path)
        self.path = copy
        self.fs.forget_failed_syncs()
        self.must = {name: set(kept) for name, kept in self.flushed.items()}
        self.open()

    @rule(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), pick=st.integers(0, 3))
    def damage(self, where: float, bit: int, pick: int) -> None:
        """A bit flips in a segment or in the catalog while the store is closed."""
        self.opened.close()
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
        self.open()

    @rule(code=st.sampled_from([errno.ENOSPC, errno.EIO, "short"]), call=st.sampled_from(["pwritev", "fdatasync"]))
    @precondition(lambda self: self.fs.fault is None)
    def disk_fails(self, code: Any, call: str) -> None:
        self.fs.fault = Fault(call, 1, errno.EIO if call == "fdatasync" else code, sticky=True)
        self.doubt()

    @rule()
    def disk_recovers(self) -> None:
        self.fs.fault = None

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self.fs.fault = None
                self.store.flush()
                family_stores.families_hold(self.store)
                all_is_well(self.store, deep=not self.damaged)
                self.store.close()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)


class TestFamilyModel(FamilyMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(
        max_examples=1000 if _FULL else 50,
        stateful_step_count=40 if _FULL else 25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# ---- histories that chance need not find -----------------------------------------------------------------------------

TEXT, MEMBER, OTHER = _TEXTS[0], _BEGINNINGS[1] + _TEXTS[0], _BEGINNINGS[2] + _TEXTS[0]
EVENTS: dict[str, Callable[[FamilyMachine], None]] = {
    "reopened": FamilyMachine.reopen,
    "killed": FamilyMachine.crash,
    "a bit of the catalog flipped": lambda store: store.damage(0.5, 0, 0),
    "a bit of a segment flipped": lambda store: store.damage(0.1, 0, 1),
    "its donor deleted": lambda store: store.delete(sorted(store.may[b""]).index(TEXT), b""),
    "a full disk": lambda store: store.disk_fails(errno.ENOSPC, "pwritev"),
    "half a write": lambda store: store.disk_fails("short", "pwritev"),
    "a failing sync": lambda store: store.disk_fails(errno.EIO, "fdatasync"),
}


@pytest.mark.parametrize("host", [0, 60_000])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("event", EVENTS)
def test_members_are_right_whatever_happens_to_them(event: str, tight: bool, host: int) -> None:
    """What the machine does, in an order in which there are members before the event and after it."""
    store = FamilyMachine()
    try:
        store.open_first(tight=tight, host=host)
        for tokens in (TEXT, MEMBER):
            store.put(tokens, b"", pin=False)
            store.flush()
        assert family_stores.members(store.opened) >= 2
        EVENTS[event](store)
        for tokens in (OTHER, MEMBER, TEXT):
            store.get(tokens, b"", None)
            store.put(tokens, b"", pin=False)
            store.prefetch(tokens, b"")
        store.flush()
        store.disk_recovers()
        for tokens in (TEXT, MEMBER, OTHER):
            store.put(tokens, b"", pin=False)
            store.flush()
        assert family_stores.members(store.opened) >= 2
        for tokens in (OTHER, MEMBER, TEXT):
            store.get(tokens, b"", None)
    finally:
        store.teardown()
