"""Members of a store whose caches pose as those of a device, coded by kernels in triton's interpreter:
`interpreted_groups_store.py GROUP...`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import family_stores
import groupcases
import kernelgroups
import numpy as np
import predictcases
import torch
from family_stores import BLOCK, IDENTITY, LAYOUT, behind, config, counter, kv_of, members, passage
from kvcases import random_kv, same_kv
from length import FULL

from kvstore import KVStore
from kvstore.codecs import KVView
from kvstore.codecs.donor.groups.kernels import blocks as group_blocks
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.profile import Profile
from kvstore.core.layout import KVLayout
from kvstore.write import plan as planner

CPU = torch.device("cpu")
TEXT = passage(1, 64)
OTHER = behind(10, TEXT)
FALLBACK = "fallback_device_codec"
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def posing(layout: KVLayout, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], checked: bool = False) -> KVView:
    """As of tensors on a device: it has no rows, which the CPU would need."""
    tensors = [tensor for pair in kv for tensor in pair]
    return KVView(layout, tensors[0].shape[1], None, tensors, tensors)


@contextmanager
def opened() -> Iterator[KVStore]:
    """With one sequence and the beginning of another, which came from the CPU, and a model of differences that expects
    none."""
    planner.KVView = KVView  # type: ignore[misc]
    predict_blocks.TRIAL_TOKENS = 4
    shapes = [(x.heads, x.key_dim, x.value_dim) for x in LAYOUT.layers]
    arrays = groupcases.arrays_of(shapes, True, 1, 3)
    arrays |= {name: np.zeros_like(x) for name, x in arrays.items() if name.endswith(("weight", "group"))}
    lossless = predictcases.arrays_of(shapes, True, 3)[1]
    with tempfile.TemporaryDirectory() as path:
        Profile.new(IDENTITY, {"lossless": lossless, "donor": arrays}).save(Path(path, "made"))
        with KVStore(Path(path, "store"), IDENTITY, config(codec="auto", profile=Path(path, "made"))) as store:
            family_stores.put(store, TEXT)
            family_stores.put(store, OTHER[:BLOCK])
            store.flush()
            planner.KVView = SimpleNamespace(of_layers=posing)  # type: ignore[misc,assignment]
            yield store


def comes_back(store: KVStore) -> bool:
    """The second sequence, as a result on the device gets it."""
    room = random_kv(len(OTHER), LAYOUT, seed=4)
    reads = store._lookup.reads(store._digest(b""), OTHER)
    store._engine.getter.fetcher.fetch(reads, posing(LAYOUT, room))
    return same_kv(room, [(k[0], v[0]) if k.dim() == 4 else (k, v) for k, v in kv_of(OTHER)])


def decodes(store: KVStore) -> bool:
    reads = store._lookup.reads(store._digest(b""), OTHER)
    try:
        return store._engine.getter.placement.all_decode(reads, CPU)
    finally:
        store._engine.getter.fetcher.fetch(reads, None)  # releases them


@contextmanager
def changed(name: str, function: Any) -> Iterator[list[object]]:
    """`group_blocks.NAME`, in whose place `function` is called, if there is one; what it was called with."""
    kept, seen = getattr(group_blocks, name), list[object]()

    def call(*arguments: Any) -> Any:
        seen.append(arguments)
        return (function or kept)(*arguments)

    setattr(group_blocks, name, call)
    try:
        yield seen
    finally:
        setattr(group_blocks, name, kept)


def failing(error: BaseException) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def stored() -> None:
    with opened() as store, changed("encode_into", None) as written, changed("decode_from", None) as read:
        family_stores.put(store, OTHER)
        store.flush()
        assert members(store) == 2
        assert len(written) == 2 + 1  # and the trial
        read.clear()
        assert decodes(store)
        assert comes_back(store)
        assert len(read) == 2 + 1  # what decodes records tries the device, too
        assert counter(store, FALLBACK) == 0


def counting() -> None:
    """Whatever the CPU does in a device's place is counted, block by block, and is as good."""
    with changed("_agrees", lambda *_: False), opened() as store:
        family_stores.put(store, OTHER)
        store.flush()
        assert (members(store), counter(store, FALLBACK)) == (2, 2)
        assert not decodes(store)
        assert counter(store, FALLBACK) == 5
        assert comes_back(store)
        assert counter(store, FALLBACK) == 7
    for error in (RuntimeError("launch failed"), torch.OutOfMemoryError("full"))[: 2 if FULL else 1]:
        with opened() as store, changed("encode_parts", failing(error)):
            donor = store._engine.getter.placement.codecs.donor
            assert donor is not None
            with changed("_agrees", lambda *_: True):
                assert donor.codes_on(CPU, "bfloat16")
            family_stores.put(store, OTHER)
            store.flush()
            assert (members(store), counter(store, FALLBACK)) == (2, 2)
        with opened() as store:
            family_stores.put(store, OTHER)
            store.flush()
            assert comes_back(store)
            assert counter(store, FALLBACK) == 0
            with changed("decode_blocks", failing(error)):
                assert comes_back(store)
            assert counter(store, FALLBACK) == 2


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        kernelgroups.run({f.__name__: f for f in (stored, counting)})
