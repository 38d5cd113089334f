"""Hits whose layers come one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interrupts import Boom, Interrupt
from kvcases import same_kv

from kvstore import Hit, KVStore


def lazily(store: KVStore, ids: Any, **options: Any) -> Hit:
    hit = store.get(ids, lazy=True, **options)
    assert hit is not None
    return hit


def interrupts_lose_nothing(store: KVStore, get: Callable[[], Hit], expected: Any) -> None:
    """Gets and waits for all layers, interrupted at up to 40 places, one after the other: what was got still comes."""
    counted = Interrupt()
    counted.run(lambda: tuple(get().layers))
    for at in range(1, counted.passed + 1, max(1, counted.passed // 40)):
        held: list[Hit] = []

        def call(held: list[Hit] = held) -> None:
            held.append(get())
            tuple(held[0].layers)

        try:
            Interrupt(at).run(call)
        except Boom:
            for hit in held:
                assert same_kv(tuple(hit.layers), expected)
        assert store.check().problems == ()
