"""Random histories of a store against a model of what it may and must return.

Contents follow from the tokens (`small_stores.kv_of`), so every hit is checked bit for bit. The model keeps, per
namespace, the sequences that must be there in full, and those that may be: what was put and could since have been
evicted, cut by a crash before a flush, or hit by damage. A hit is at least as long as the first allow it to be, and
at most as long as the second.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from faultfs import Fault, FaultFS
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_stores import IDENTITY, SEGMENT, all_is_well, config, disk_use, is_exact, kv_of, put

from kvstore import KVStore, Reason

# Few tokens and short blocks: prefixes meet, diverge inside blocks, grow, and come again.
SEQUENCES = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=22).map(tuple)
NAMESPACES = st.sampled_from([b"", b"other"])
NAMES = st.sampled_from(["a", "b"])
ROOMY, TIGHT = 32 * SEGMENT, 4 * SEGMENT
Tokens = tuple[int, ...]
# What may be said of blocks while nothing is evicted, damaged or refused by the disk.
EXPECTED = {Reason.STORED, Reason.NEVER_PUT, Reason.DELETED, Reason.OTHER_NAMESPACE, Reason.TOKENS_DIFFER}


def array(tokens: Tokens) -> np.ndarray:
    return np.array(tokens, np.uint32)


def shared(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(prefix="kvstore-model-", dir=base))
        self.path = self.home / "0"
        self.lives = 0
        self.fs = FaultFS()
        self.must: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.may: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.ever: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.flushed: dict[bytes, set[Tokens]] = {b"": set(), b"other": set()}
        self.sessions: dict[str, Tokens] = {}
        # What a crash may leave of each session: what was flushed last, or anything since; () for none.
        self.after_crash: dict[str, set[Tokens]] = {"a": {()}, "b": {()}}
        self.sessions_certain = True
        self.store: KVStore | None = None
        self.is_open = False
        self.doubted = False  # whether `doubt` was ever called
        self.damaged = False  # bits flipped in records that nobody has read since

    @initialize(
        tight=st.booleans(), codec=st.sampled_from(["raw", "splitzip", "entropy", "zstd"]),
        host=st.sampled_from([0, 40_000, 1 << 20]),
        device=st.sampled_from([0, 4_000]),
    )  # fmt: skip
    def open_first(self, tight: bool, codec: str, host: int, device: int) -> None:
        self.tight = tight
        self.config = config(host=host, disk=TIGHT if tight else ROOMY, device=device, codec=codec)
        self.open()

    def open(self) -> None:
        self.is_open = False
        self.store = KVStore(self.path, IDENTITY, self.config, fs=self.fs)
        self.is_open = True

    def close(self) -> None:
        assert self.store is not None
        self.is_open = False
        self.store.close()

    def doubt(self) -> None:
        """Something happened after which nothing is certain to be there."""
        self.doubted = True
        self.must = {name: set() for name in self.must}
        self.flushed = {name: set() for name in self.flushed}

    def name_session(self, name: str, tokens: Tokens) -> None:
        self.sessions[name] = tokens
        self.after_crash[name].add(tokens)

    def settle_sessions(self) -> None:
        self.after_crash = {name: {self.sessions.get(name, ())} for name in self.after_crash}

    @invariant()
    def everything_agrees(self) -> None:
        if self.store is not None and self.is_open:
            all_is_well(self.store)

    # ---- what programs do ----

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, pin=st.booleans())
    def put(self, tokens: Tokens, namespace: bytes, pin: bool) -> None:
        assert self.store is not None
        put(self.store, array(tokens), namespace, pin=pin and not self.tight)
        self.may[namespace].add(tokens)
        self.ever[namespace].add(tokens)
        if not self.tight and self.fs.fault is None:
            self.must[namespace].add(tokens)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, limit=st.none() | st.integers(1, 30))
    def get(self, tokens: Tokens, namespace: bytes, limit: int | None) -> None:
        assert self.store is not None
        assert self.store._intake is not None
        quiet, before = self.store._intake.writer.pending_bytes == 0, self.store.stats()["counters"]
        hit = self.store.get(array(tokens), namespace=namespace, max_tokens=limit)
        found = hit.tokens if hit is not None else 0
        asked = tokens[:limit]
        most = max((shared(asked, s) for s in self.may[namespace]), default=0)
        least = max((shared(asked, s) for s in self.must[namespace]), default=0)
        assert least <= found <= most, (least, found, most, self.store.stats()["counters"])
        if hit is not None:
            assert is_exact(hit, asked, namespace)
        if quiet:  # else a write may make room by evicting meanwhile
            self.explains(asked, namespace, found, before)

    def explains(self, asked: Tokens, namespace: bytes, found: int, before: dict[str, float]) -> None:
        """What is said of a get that found so many tokens agrees with it, and with what it counted."""
        assert self.store is not None
        said = self.store.explain(array(asked), namespace=namespace)
        assert said.tokens >= found, (said, found)
        assert (said.tokens == len(asked)) == (said.reason is Reason.STORED)
        borders = [0, *(block.end for block in said.blocks)]
        assert borders == [*(block.start for block in said.blocks), len(asked)]
        assert all((block.record is not None) or block.reason is not Reason.STORED for block in said.blocks)
        if not self.tight and not self.doubted:
            assert {block.reason for block in said.blocks} <= EXPECTED, said
        after = self.store.stats()["counters"]
        counted = {n for n, count in after.items() if n.startswith("short_") and count != before.get(n, 0)}
        assert len(counted) == (found < len(asked)), (counted, found)
        if said.tokens == found and said.reason.metric is not None:
            assert counted == {said.reason.metric.value}, (counted, said)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES)
    def contains(self, tokens: Tokens, namespace: bytes) -> None:
        assert self.store is not None
        found = self.store.contains(array(tokens), namespace=namespace)
        least = max((shared(tokens, s) for s in self.must[namespace]), default=0)
        most = max((shared(tokens, s) for s in self.may[namespace]), default=0)
        assert least <= found <= most, (least, found, most, self.store.stats()["counters"])

    @rule(other=SEQUENCES, pick=st.integers(0, 1000), namespace=NAMESPACES)
    def delete(self, other: Tokens, pick: int, namespace: bytes) -> None:
        assert self.store is not None
        known = sorted(self.may[namespace])
        tokens = known[pick % len(known)] if known else other
        whole = self.store.contains(array(tokens), namespace=namespace) == len(tokens)
        try:
            self.store.delete(array(tokens), namespace=namespace)
        finally:
            if whole:
                for kept in (self.must, self.flushed):
                    # Its prefixes may go with it; sequences that branch off stay.
                    kept[namespace] = {s for s in kept[namespace] if shared(s, tokens) < min(len(s), len(tokens))}
                rest = {s for s in self.may[namespace] if s[: len(tokens)] != tokens} | {tokens[:-1]}
                self.may[namespace] = rest - {()}
        assert self.store.contains(array(tokens), namespace=namespace) < len(tokens) or not whole

    @rule()
    def flush(self) -> None:
        assert self.store is not None
        self.store.flush()
        if self.fs.fault is None:
            self.flushed = {name: set(kept) for name, kept in self.must.items()}
            self.settle_sessions()

    @rule(tokens=SEQUENCES, namespace=NAMESPACES)
    def prefetch(self, tokens: Tokens, namespace: bytes) -> None:
        assert self.store is not None
        found = self.store.prefetch(array(tokens), namespace=namespace).result()
        assert found <= max((shared(tokens, s) for s in self.may[namespace]), default=0)

    # ---- sessions ----

    @rule(name=NAMES, tokens=SEQUENCES)
    def save(self, name: str, tokens: Tokens) -> None:
        assert self.store is not None
        self.store.session(name).save(array(tokens), kv_of(tokens))
        self.name_session(name, tokens)
        self.may[b""].add(tokens)
        self.ever[b""].add(tokens)
        if not self.tight and self.fs.fault is None:
            self.must[b""].add(tokens)

    @rule(name=NAMES)
    def resume(self, name: str) -> None:
        assert self.store is not None
        session = self.store.session(name)
        if self.sessions_certain:
            assert tuple(session.tokens.tolist()) == self.sessions.get(name, ())
        hit = session.resume()
        tokens = tuple(session.tokens.tolist())
        if hit is not None:
            assert is_exact(hit, tokens)
        found = hit.tokens if hit is not None else 0
        assert found >= max((shared(tokens, s) for s in self.must[b""]), default=0)

    @rule(name=NAMES, new=NAMES)
    def fork(self, name: str, new: str) -> None:
        assert self.store is not None
        if self.store.session(name).exists:
            tokens = tuple(self.store.session(name).tokens.tolist())
            assert tuple(self.store.session(name).fork(new).tokens.tolist()) == tokens
            self.name_session(new, tokens)

    @rule(name=NAMES)
    def delete_session(self, name: str) -> None:
        assert self.store is not None
        self.store.session(name).delete()
        self.sessions.pop(name, None)
        self.after_crash[name].add(())
        assert not self.store.session(name).exists

    # ---- what happens to programs ----

    @rule()
    def reopen(self) -> None:
        self.close()
        self.fs.forget_failed_syncs()
        if self.fs.fault is None:
            self.settle_sessions()
        else:
            self.fs.fault = None
            self.doubt()
            self.sessions_certain = False
        self.open()

    @rule()
    def crash(self) -> None:
        """The files as they are at this moment, in another directory, are what a kill would have left. Nothing is
        written while they are copied: kills in the middle of a write have their own suite."""
        self.lives += 1
        copy = self.home / str(self.lives)
        assert self.store is not None
        disk = self.store._residency.disk
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
        # Whatever was not flushed is there as it was, as it was before, or not at all.
        for name in ("a", "b"):
            assert self.store is not None
            tokens = tuple(self.store.session(name).tokens.tolist())
            assert tokens in self.after_crash[name] or not self.sessions_certain
            if tokens:
                self.sessions[name] = tokens
            else:
                self.sessions.pop(name, None)
        self.settle_sessions()

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
        self.sessions_certain = False
        self.open()

    @rule(code=st.sampled_from([errno.ENOSPC, errno.EIO, "short"]), call=st.sampled_from(["pwritev", "fdatasync"]))
    @precondition(lambda self: self.fs.fault is None)
    def disk_fails(self, code: Any, call: str) -> None:
        self.fs.fault = Fault(call, 1, errno.EIO if call == "fdatasync" else code, sticky=True)
        # What is in the queue now may be lost, and a full disk makes room by evicting.
        self.doubt()

    @rule()
    def disk_recovers(self) -> None:
        self.fs.fault = None

    def teardown(self) -> None:
        try:
            if self.store is not None and self.is_open:
                self.fs.fault = None
                self.store.flush()
                all_is_well(self.store, deep=not self.damaged)
                if self.tight:
                    assert disk_use(self.path) <= TIGHT + SEGMENT + 2 * SEGMENT
                self.store.close()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    max_examples=2000 if os.environ.get("KVSTORE_FAULTS") == "full" else 200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
