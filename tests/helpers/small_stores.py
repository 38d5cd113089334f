"""A store small enough to break thousands of times: tiny layout, contents that follow from the tokens, its files.

Keys and values are a pure function of namespace and token prefix, as in a causal model, and run over all bit patterns
(NaN and Inf too). So any process can say what a `get` must return, without having seen the `put`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from kvstore import Hit, KVLayout, KVStore, ModelIdentity, Session, StoreConfig, TierConfig
from kvstore.config import KIB
from kvstore.tiers.disk.budget import BESIDE_BYTES
from kvstore.tiers.disk.entry import Entry

BLOCK = 4
SEGMENT = 64 * KIB
LAYOUT = KVLayout.uniform(2, 1, 4)
IDENTITY = ModelIdentity("tiny", "1", "00", "", LAYOUT)
Layers = list[tuple[torch.Tensor, torch.Tensor]]

_MASK = (1 << 64) - 1


def config(
    host: int = 1 << 20, disk: int = 4 << 20, device: int = 0, codec: str = "raw", **settings: Any
) -> StoreConfig:
    """Budgets in bytes, that of the disk for its segments alone; blocks of 4 tokens, segments of 64 KiB, one worker
    thread."""
    defaults = {"block_tokens": BLOCK, "segment_bytes": SEGMENT, "threads": 1}
    return StoreConfig(
        device=TierConfig(device, "raw"),
        host=TierConfig(host, "raw"),
        disk=TierConfig(disk + BESIDE_BYTES if disk else 0, codec),
        **{**defaults, **settings},
    )


def identity(layout: KVLayout = LAYOUT) -> ModelIdentity:
    return ModelIdentity("tiny", "1", "00", "", layout)


def tokens_of(number: int, count: int) -> np.ndarray:
    """`count` tokens of sequence `number`; sequences of different numbers differ in the first token."""
    rest = np.random.default_rng(number).integers(0, 1 << 32, count, dtype=np.uint64)
    rest[0] = number
    return rest.astype(np.uint32)


def kv_of(tokens: Iterable[int], namespace: bytes = b"", layout: KVLayout = LAYOUT) -> Layers:
    """The cache of a sequence: per layer (K, V), `[heads, tokens, dim]`."""
    state = int.from_bytes(namespace.ljust(8, b"\0")[:8], "little") ^ len(namespace)
    states = []
    for token in tokens:
        state = (state * 6364136223846793005 + int(token) + 1442695040888963407) & _MASK
        states.append(state)
    rows = np.array(states, np.uint64)
    layers = []
    for number, shape in enumerate(layout.layers):
        pair = []
        for which, dim in enumerate((shape.key_dim, shape.value_dim)):
            salt = np.arange(shape.heads * dim, dtype=np.uint64) + np.uint64((number * 2 + which + 1) << 32)
            values = _mix(rows[None, :, None] ^ (salt.reshape(shape.heads, 1, dim) * np.uint64(0x9E3779B97F4A7C15)))
            pair.append(_as_dtype(values, layout))
        layers.append((pair[0], pair[1]))
    return layers


def is_exact(hit: Hit, tokens: Iterable[int], namespace: bytes = b"", layout: KVLayout = LAYOUT) -> bool:
    """Whether a hit holds exactly the bits of the first `hit.tokens` tokens."""
    want = kv_of(list(tokens)[: hit.tokens], namespace, layout)
    return len(want) == len(hit.layers) and all(
        a.shape[1:] == b.shape and torch.equal(_bits(a[0]), _bits(b))
        for pair, expected in zip(hit.layers, want, strict=True)
        for a, b in zip(pair, expected, strict=True)
    )


def put(store: KVStore, tokens: np.ndarray, namespace: bytes = b"", **options: Any) -> Any:
    """Puts a sequence with the contents that `kv_of` gives it."""
    return store.put(tokens, kv_of(tokens, namespace, store.identity.layout), namespace=namespace, **options)


def stored(store: KVStore, tokens: np.ndarray, namespace: bytes = b"") -> int:
    """How many leading tokens `get` returns; fails where it returns one wrong bit."""
    hit = store.get(tokens, namespace=namespace)
    if hit is None:
        return 0
    assert is_exact(hit, tokens, namespace, store.identity.layout), f"wrong bytes for {tokens.tolist()}"
    return hit.tokens


def disk_use(path: str | os.PathLike[str]) -> int:
    """Bytes of everything in the folder of a store, as `du` counts them. What goes away meanwhile counts nothing."""
    blocks = os.lstat(path).st_blocks
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                blocks += os.lstat(os.path.join(folder, name)).st_blocks
    return blocks * 512


def every_call(store: KVStore, session: Session, tokens: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Every call of a store and of a session but `close`, by name, with arguments that are in order."""
    return {
        "put": lambda: put(store, tokens),
        "get": lambda: store.get(tokens),
        "contains": lambda: store.contains(tokens),
        "prefetch": lambda: store.prefetch(tokens),
        "delete": lambda: store.delete(tokens),
        "flush": store.flush,
        "stats": store.stats,
        "session": lambda: store.session("t"),
        "sessions": store.sessions,
        "save": lambda: session.save(tokens, kv_of(tokens)),
        "resume": session.resume,
        "fork": lambda: session.fork("t"),
        "session.delete": session.delete,
        "session.tokens": lambda: session.tokens,
    }


def all_is_well(store: KVStore, deep: bool = False) -> None:
    """Everything that the store says of itself agrees (`KVStore.check`)."""
    found = store.check(deep=deep).problems
    assert found == (), found


def disk_order_agrees(store: KVStore) -> None:
    """The policy of the disk, if it has one, holds exactly the durable records of the index."""
    residency = store._residency
    order = residency._disk_order
    by_trie = store.config.eviction == "lru" and not store.config.tenants
    assert (order is None) == (store.read_only or by_trie or not store.config.disk.bytes)
    if order is not None:
        with residency._lock:
            indexed = set(residency.index.counts()[0].tolist())
            assert order.held() == indexed - residency._pending.keys() - residency._unwritten


def catalog_entries(store: KVStore) -> list[Any]:
    """All entries of the store's catalog, by record number."""
    disk = store._residency.disk
    assert disk is not None
    records = disk.catalog.scan().entries["record"].tolist()
    return [entry for entry in disk.catalog.get(records) if entry is not None]


def keep_entries(file: Path, entries: list[Any]) -> None:
    """Writes entries to a file, as the catalog holds them."""
    file.write_bytes(msgpack.packb([entry.pack() for entry in entries]))


def kept_entries(file: Path) -> list[Any]:
    """What `keep_entries` wrote."""
    return [Entry.unpack(packed) for packed in msgpack.unpackb(file.read_bytes())]


def flip(file: Path, offset: int, mask: int) -> None:
    """Flips the bits of `mask` in one byte of a file."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ mask]))


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory where there is such a file system, for suites that open thousands of stores."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path, owner = tempfile.mkdtemp(prefix="kvstore-test-", dir=base), os.getpid()
    try:
        yield Path(path)
    finally:
        if os.getpid() == owner:  # not in a forked child that leaves this block by its own exit
            shutil.rmtree(path)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _as_dtype(values: np.ndarray, layout: KVLayout) -> torch.Tensor:
    integers = values.astype(np.uint64)
    kind = np.int32 if layout.item_bytes == 4 else np.int16
    bits = np.ascontiguousarray(integers & np.uint64((1 << (8 * layout.item_bytes)) - 1))
    narrow = bits.astype(np.uint32 if layout.item_bytes == 4 else np.uint16).view(kind)
    return torch.from_numpy(narrow).view(getattr(torch, layout.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def is_quiet(store: KVStore) -> bool:
    """Whether nothing waits to be written."""
    put_path = store._engine.put_path
    return put_path is None or put_path.queue.pending_bytes == 0
