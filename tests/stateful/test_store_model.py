"""Random histories of a store against a model of what it may and must return.

Contents follow from the tokens (`small_stores.kv_of`), so every hit is checked bit for bit; how long it must and may
be, the model of helpers/store_histories.py says.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, rule
from length import FULL
from small_stores import IDENTITY, SEGMENT, config, disk_order_agrees, disk_use, is_exact, is_quiet, kv_of, put
from store_histories import HistoryMachine, Tokens, array, shared

from kvstore import Reason, TenantConfig
from kvstore.config import PAGE_BYTES
from kvstore.eviction import POLICIES
from kvstore.tiers.disk.budget import BESIDE_BYTES

# Few tokens and short blocks: prefixes meet, diverge inside blocks, grow, and come again.
SEQUENCES = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=22).map(tuple)
NAMESPACES = st.sampled_from([b"", b"other"])
NAMES = st.sampled_from(["a", "b"])
ROOMY, TIGHT = 32 * SEGMENT, 4 * SEGMENT
# What may be said of blocks while nothing is evicted, damaged or refused by the disk.
EXPECTED = {Reason.STORED, Reason.NEVER_PUT, Reason.DELETED, Reason.OTHER_NAMESPACE, Reason.TOKENS_DIFFER}


class StoreMachine(HistoryMachine):
    identity = IDENTITY

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, Tokens] = {}
        # What a crash may leave of each session: what was flushed last, or anything since; () for none.
        self.after_crash: dict[str, set[Tokens]] = {"a": {()}, "b": {()}}
        self.sessions_certain = True
        self.doubted = False  # whether `doubt` was ever called

    @initialize(
        tight=st.booleans(), codec=st.sampled_from(["raw", "splitzip", "entropy", "zstd"]),
        host=st.sampled_from([0, 40_000, 1 << 20]),
        device=st.sampled_from([0, 4_000]),
        eviction=st.sampled_from(sorted(POLICIES)),
        tenant=st.booleans(),
    )  # fmt: skip
    def open_first(self, tight: bool, codec: str, host: int, device: int, eviction: str, tenant: bool) -> None:
        self.tight = tight
        budget = TIGHT if tight else ROOMY
        quota = 12 * PAGE_BYTES if tight else None  # a put may be dropped, as it may where the disk is tight
        tenants = {b"other": TenantConfig(quota, reserved_bytes=8 * PAGE_BYTES)} if tenant else {}
        self.config = config(host=host, disk=budget, device=device, codec=codec, eviction=eviction, tenants=tenants)
        self.open()

    def doubt(self) -> None:
        self.doubted = True
        super().doubt()

    def name_session(self, name: str, tokens: Tokens) -> None:
        self.sessions[name] = tokens
        self.after_crash[name].add(tokens)

    def settle_sessions(self) -> None:
        self.after_crash = {name: {self.sessions.get(name, ())} for name in self.after_crash}

    @invariant()
    def the_disk_order_agrees(self) -> None:
        if self.store is not None:
            disk_order_agrees(self.store)

    # ---- what programs do ----

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, pin=st.booleans())
    def put(self, tokens: Tokens, namespace: bytes, pin: bool) -> None:
        put(self.opened, array(tokens), namespace, pin=pin and not self.tight)
        self.was_put(tokens, namespace)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, limit=st.none() | st.integers(1, 30))
    def get(self, tokens: Tokens, namespace: bytes, limit: int | None) -> None:
        quiet, before = is_quiet(self.opened), self.opened.stats()["counters"]
        hit = self.got(tokens, namespace, limit)
        if hit is not None:
            assert is_exact(hit, tokens[:limit], namespace)
        if quiet:  # else a write may make space by evicting meanwhile
            self.explains(tokens[:limit], namespace, hit.tokens if hit is not None else 0, before)

    def explains(self, asked: Tokens, namespace: bytes, found: int, before: dict[str, float]) -> None:
        """What is said of a get that found so many tokens agrees with it, and with what it counted."""
        said = self.opened.explain(array(asked), namespace=namespace)
        assert said.tokens >= found, (said, found)
        assert (said.tokens == len(asked)) == (said.reason is Reason.STORED)
        borders = [0, *(block.end for block in said.blocks)]
        assert borders == [*(block.start for block in said.blocks), len(asked)]
        assert all((block.record is not None) or block.reason is not Reason.STORED for block in said.blocks)
        if not self.tight and not self.doubted:
            assert {block.reason for block in said.blocks} <= EXPECTED, said
        after = self.opened.stats()["counters"]
        counted = {n for n, count in after.items() if n.startswith("short_") and count != before.get(n, 0)}
        assert len(counted) == (found < len(asked)), (counted, found)
        if said.tokens == found and said.reason.metric is not None:
            assert counted == {said.reason.metric.value}, (counted, said)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES)
    def contains(self, tokens: Tokens, namespace: bytes) -> None:
        found = self.opened.contains(array(tokens), namespace=namespace)
        self.agrees(found, tokens, namespace)

    @rule(other=SEQUENCES, pick=st.integers(0, 1000), namespace=NAMESPACES)
    def delete(self, other: Tokens, pick: int, namespace: bytes) -> None:
        known = sorted(self.may[namespace])
        tokens = known[pick % len(known)] if known else other
        whole = self.opened.contains(array(tokens), namespace=namespace) == len(tokens)
        try:
            self.opened.delete(array(tokens), namespace=namespace)
        finally:
            if whole:
                self.was_deleted(tokens, namespace)
        assert self.opened.contains(array(tokens), namespace=namespace) < len(tokens) or not whole

    @rule()
    def flush(self) -> None:
        self.opened.flush()
        if self.fs.fault is None:
            self.flushed = {name: set(kept) for name, kept in self.must.items()}
            self.settle_sessions()

    @rule(tokens=SEQUENCES, namespace=NAMESPACES)
    def prefetch(self, tokens: Tokens, namespace: bytes) -> None:
        self.prefetched(tokens, namespace)

    # ---- sessions ----

    @rule(name=NAMES, tokens=SEQUENCES)
    def save(self, name: str, tokens: Tokens) -> None:
        self.opened.session(name).save(array(tokens), kv_of(tokens))
        self.name_session(name, tokens)
        self.was_put(tokens, b"")

    @rule(name=NAMES)
    def resume(self, name: str) -> None:
        session = self.opened.session(name)
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
        if self.opened.session(name).exists:
            tokens = tuple(self.opened.session(name).tokens.tolist())
            assert tuple(self.opened.session(name).fork(new).tokens.tolist()) == tokens
            self.name_session(new, tokens)

    @rule(name=NAMES)
    def delete_session(self, name: str) -> None:
        self.opened.session(name).delete()
        self.sessions.pop(name, None)
        self.after_crash[name].add(())
        assert not self.opened.session(name).exists

    # ---- what happens to programs ----

    @rule()
    def reopen(self) -> None:
        if self.recovered():
            self.sessions_certain = False
        else:
            self.settle_sessions()
        self.reopened()

    @rule()
    def crash(self) -> None:
        self.killed()
        # Whatever was not flushed is there as it was, as it was before, or not at all.
        for name in ("a", "b"):
            tokens = tuple(self.opened.session(name).tokens.tolist())
            assert tokens in self.after_crash[name] or not self.sessions_certain
            if tokens:
                self.sessions[name] = tokens
            else:
                self.sessions.pop(name, None)
        self.settle_sessions()

    def was_damaged(self) -> None:
        self.sessions_certain = False

    def holds_at_the_end(self) -> None:
        if self.tight:
            assert disk_use(self.path) <= TIGHT + BESIDE_BYTES


TestStoreModel = pytest.mark.slow(StoreMachine.TestCase)
TestStoreModel.settings = settings(
    max_examples=2000 if FULL else 20,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
