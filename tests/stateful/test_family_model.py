"""Random histories of a store whose sequences share passages, so that most of its blocks are members of families.

As test_store_model.py: every hit is checked bit for bit, is at least as long as what must be there allows, and at most
as long as what may be there. After each history no member has outlived its donor.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import lru_cache

import family_stores
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule
from length import FULL
from small_stores import SEGMENT
from store_histories import HistoryMachine, Tokens, array

_TEXTS = [tuple(family_stores.passage(n, 3 * family_stores.BLOCK).tolist()) for n in (1, 2)]
_BEGINNINGS = [(), *(tuple(family_stores.passage(10 + n, 9 * n + 5).tolist()) for n in range(3))]
BEGINNINGS = st.sampled_from(_BEGINNINGS)
PIECES = st.sampled_from([text[a:b] for text in _TEXTS for a, b in ((0, 96), (0, 64), (5, 80), (32, 96))])
SEQUENCES = st.tuples(BEGINNINGS, PIECES, st.just(()) | PIECES).map(lambda parts: sum(parts, ()))
NAMESPACES = st.sampled_from([b"", b"", b"other"])
ROOMY, TIGHT = 64 * SEGMENT, 4 * SEGMENT


@lru_cache(maxsize=256)
def kv_of(tokens: Tokens, namespace: bytes) -> family_stores.Layers:
    return family_stores.kv_of(tokens, namespace)


class FamilyMachine(HistoryMachine):
    identity = family_stores.IDENTITY

    @initialize(tight=st.booleans(), host=st.sampled_from([0, 0, 60_000]))
    def open_first(self, tight: bool, host: int) -> None:
        self.tight = tight
        self.config = family_stores.config(host=host, disk=TIGHT if tight else ROOMY)
        self.open()

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, pin=st.sampled_from([False, False, False, True]))
    def put(self, tokens: Tokens, namespace: bytes, pin: bool) -> None:
        pin = pin and not self.tight
        self.opened.put(array(tokens), kv_of(tokens, namespace), namespace=namespace, pin=pin)
        self.was_put(tokens, namespace)

    @rule(tokens=SEQUENCES, namespace=NAMESPACES, limit=st.none() | st.integers(1, 200))
    def get(self, tokens: Tokens, namespace: bytes, limit: int | None) -> None:
        hit = self.got(tokens, namespace, limit)
        if hit is not None:
            want = kv_of(tokens[:limit][: hit.tokens], namespace)
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
            self.was_deleted(tokens, namespace)

    @rule()
    def flush(self) -> None:
        self.opened.flush()
        if self.fs.fault is None:
            self.flushed = {name: set(kept) for name, kept in self.must.items()}

    @rule(tokens=SEQUENCES, namespace=NAMESPACES)
    def prefetch(self, tokens: Tokens, namespace: bytes) -> None:
        self.prefetched(tokens, namespace)

    @rule()
    def reopen(self) -> None:
        self.recovered()
        self.reopened()

    @rule()
    def crash(self) -> None:
        self.killed()

    def holds_at_the_end(self) -> None:
        family_stores.families_hold(self.opened)


class TestFamilyModel(FamilyMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(
        max_examples=2000 if FULL else 20,
        stateful_step_count=40 if FULL else 25,
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
