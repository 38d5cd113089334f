"""Layouts, caches and configs for tests: small, deterministic, and every value distinct enough to notice a mix-up."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadruns import HANGS_S

from kvstore import Hit, KVLayout, KVStore, LayerLayout, ModelIdentity, PutResult, StoreConfig, TierConfig
from kvstore.config import KIB, MIB
from kvstore.tiers.disk.fs import FileSystem

Layers = list[tuple[torch.Tensor, torch.Tensor]]

BLOCK = 8
SMALL = KVLayout.uniform(3, 2, 16, "bfloat16")
INTEGERS = {
    "bfloat16": torch.int16,
    "float16": torch.int16,
    "float32": torch.int32,
    "float8_e5m2": torch.uint8,
    "float8_e4m3fn": torch.uint8,
}


def identity(layout: KVLayout = SMALL, **changes: Any) -> ModelIdentity:
    fields: dict[str, Any] = {"model": "m", "revision": "r", "weights": "w", "tokenizer": "t", "layout": layout}
    return ModelIdentity(**{**fields, **changes})


def config(**changes: Any) -> StoreConfig:
    """Blocks of 8 tokens, 64 KiB segments, room for everything that a test puts unless it says otherwise."""
    settings: dict[str, Any] = {
        "host": TierConfig(16 * MIB, "raw"),
        "disk": TierConfig(16 * MIB, "zstd"),
        "block_tokens": BLOCK,
        "segment_bytes": 64 * KIB,
        "group_bytes": 1 * MIB,
        "write_queue_bytes": 16 * MIB,
    }
    return StoreConfig(**{**settings, **changes})


def open_store(
    path: str | os.PathLike[str],
    layout: KVLayout = SMALL,
    *,
    read_only: bool = False,
    fs: FileSystem | None = None,
    **changes: Any,
) -> KVStore:
    """A store with the settings of `config(**changes)`."""
    return KVStore(path, identity(layout), config(**changes), read_only=read_only, fs=fs)


@contextmanager
def quick_directory() -> Iterator[Path]:
    """A directory in memory where the machine has one: for tests that sync a hundred times and are not about disks."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir=base) as path:
        yield Path(path)


class GatedFS(FileSystem):
    """The real file system, whose syncs of data wait while the gate is shut; `waiting` is set when one does."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def shut(self) -> None:
        self.waiting.clear()
        self.gate.clear()

    def fdatasync(self, fd: int) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            self.gate.wait(HANGS_S)
        super().fdatasync(fd)


def tokens(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint32)


def random_kv(count: int, layout: KVLayout = SMALL, seed: int = 0) -> Layers:
    """Every bit pattern of the dtype may occur, NaN and Inf included; compare with `same_bits`."""
    generator = np.random.default_rng([seed, count])
    return [
        (_random(x.heads, count, x.key_dim, layout.dtype, generator),
         _random(x.heads, count, x.value_dim, layout.dtype, generator))
        for x in layout.layers
    ]  # fmt: skip


def kv_of(ids: Sequence[int] | np.ndarray[Any, Any], layout: KVLayout = SMALL) -> Layers:
    """A cache that is a function of the tokens alone, as a model's is: prefixes of equal tokens have equal caches."""
    values = np.asarray(ids, dtype=np.uint64)
    # The state after token i depends on all tokens up to i.
    state = np.cumsum(values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1), dtype=np.uint64)
    layers = []
    for number, layer in enumerate(layout.layers):
        pair = []
        for which, dim in enumerate((layer.key_dim, layer.value_dim)):
            grid = np.arange(layer.heads * dim, dtype=np.uint64).reshape(layer.heads, 1, dim)
            mixed = (state[None, :, None] + grid * np.uint64(0xBF58476D1CE4E5B9)) * np.uint64(2 * number + which + 3)
            mixed ^= mixed >> np.uint64(29)
            width = 16 if layout.item_bytes == 2 else 32
            bits = (mixed >> np.uint64(64 - width)).astype(f"uint{width}")
            pair.append(torch.from_numpy(bits.view(f"int{width}")).view(getattr(torch, layout.dtype)))
        layers.append((pair[0], pair[1]))
    return layers


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bits (NaN payloads and the sign of zero included); a batch of 1 is ignored."""
    found, expected = (t[0] if t.dim() == 4 else t for t in (found, expected))
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    return bool(torch.equal(found.contiguous().view(as_int), expected.contiguous().view(as_int)))


def same_kv(found: Sequence[tuple[torch.Tensor, torch.Tensor]], expected: Layers, count: int | None = None) -> bool:
    """Whether all layers have the bits of the first `count` tokens of `expected`."""
    return len(found) == len(expected) and all(
        same_bits(a, b if count is None else b[..., :count, :])
        for pair, other in zip(found, expected, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


def put(store: KVStore, ids: Any, **settings: Any) -> PutResult:
    """Puts a sequence with the contents that `kv_of` gives it."""
    return store.put(ids, kv_of(ids), **settings)


def assert_hit(hit: Hit | None, ids: Any, count: int) -> None:
    """`hit` is exactly the first `count` tokens of such a sequence."""
    assert hit is not None
    assert hit.tokens == count
    assert same_kv(hit.layers, kv_of(ids[:count]))


def mixed_layout(dtype: str) -> KVLayout:
    """Layers of different shapes, keys and values of different widths."""
    return KVLayout((LayerLayout(1, 8, 24), LayerLayout(5, 3, 7), LayerLayout(2, 1, 64)), dtype)


def _random(heads: int, count: int, dim: int, dtype: str, generator: np.random.Generator) -> torch.Tensor:
    width = 8 * INTEGERS[dtype].itemsize
    bits = generator.integers(0, 1 << width, (heads, count, dim), dtype=np.dtype(f"uint{width}"))
    return torch.from_numpy(bits).view(getattr(torch, dtype))
