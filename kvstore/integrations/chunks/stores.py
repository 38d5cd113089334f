"""`ChunkStores`: pieces by key, in a store for each shape."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore.config import StoreConfig
from kvstore.core.identity import ModelIdentity
from kvstore.core.tokens import Tokens
from kvstore.errors import DiskError, LayoutMismatch
from kvstore.integrations.chunks.shape import ChunkShape, shape_of
from kvstore.store import KVStore


class ChunkStores:
    """Pieces by key, in a store for each shape. Thread-safe; a context manager.

    One process writes. Nothing here raises because of the state of a store: what is damaged or gone is not found.

    Args:
        path: a folder, made if it is missing; stores are folders in it.
        engine: whose pieces; part of the identity of the stores.
        config: of each store, so budgets count for each shape; engines have one, or few. Donors, learning and the gate
            are off whatever it says: tokens are hashes here.

    Raises:
        DiskError: the folder cannot be made or read.
        The errors of `KVStore`.

    Example:
        >>> import tempfile
        >>> shape = ChunkShape.of((2, 3, 16, 8), "bfloat16")
        >>> memory, target = bytearray(range(256)) * 6, bytearray(1536)
        >>> with tempfile.TemporaryDirectory() as folder, ChunkStores(folder, "mine") as chunks:
        ...     done = chunks.put(b"key", memory, shape)
        ...     chunks.get_into(b"key", target, shape), target == memory, chunks.contains(b"other")
        (True, True, False)
    """

    def __init__(self, path: str | os.PathLike[str], engine: str, config: StoreConfig | None = None) -> None:
        self._path, self._engine = os.fspath(path), engine
        self._config = replace(config or StoreConfig(), donors=False, learn="off", gate="off")
        self._lock = threading.Lock()
        self._stores: dict[ChunkShape, KVStore] = {}  # guarded by _lock
        try:
            os.makedirs(self._path, exist_ok=True)
            names = sorted(os.listdir(self._path))
        except OSError as error:
            raise DiskError(f"path: {self._path} is no folder that can be used: {error.strerror}") from error
        for name in names:
            shape = shape_of(name)
            if shape is not None:
                self._store(shape)

    def put(self, key: bytes, memory: Any, shape: ChunkShape, *, namespace: str | bytes = b"") -> bool:
        """Store a piece, which is found from now on and durable after `flush`.

        Args:
            key: any bytes.
            memory: writable, of `shape.nbytes` bytes; copied.
            shape: of the memory.
            namespace: a part of the key, which may have a quota.

        Returns:
            False if it was not taken, for the write queue stayed full or there is no room.

        Raises:
            LayoutMismatch: the memory has another size.
        """
        self._check(memory, shape)
        store = self._store(shape)
        return not store.put(_tokens(key, shape.tokens), shape.split(memory), namespace=namespace).dropped_blocks

    def get_into(self, key: bytes, memory: Any, shape: ChunkShape, *, namespace: str | bytes = b"") -> bool:
        """Write a piece to memory, and return whether it is there whole; if not, the memory is left as it is.

        Raises:
            LayoutMismatch: the memory has another size.
        """
        self._check(memory, shape)
        with self._lock:
            store = self._stores.get(shape)
        if store is None:
            return False
        hit = store.get(_tokens(key, shape.tokens), namespace=namespace, reserve=0)
        if hit is None or hit.tokens != shape.tokens:
            return False
        shape.join(hit.layers, memory)
        return True

    def contains(self, key: bytes, *, namespace: str | bytes = b"") -> bool:
        """Return whether a piece is stored whole, in any shape. Reads nothing but the index."""
        return any(
            store.contains(_tokens(key, shape.tokens), namespace=namespace) == shape.tokens
            for shape, store in self._all()
        )

    def delete(self, key: bytes, *, namespace: str | bytes = b"") -> int:
        """Remove a piece, durably on return, and return how many bytes it had; 0 if there was none."""
        removed = 0
        for shape, store in self._all():
            if store.delete(_tokens(key, shape.tokens), namespace=namespace):
                removed += shape.nbytes
        return removed

    def delete_namespace(self, namespace: str | bytes) -> None:
        """Remove all pieces of a namespace, durably on return."""
        for _, store in self._all():
            store.delete_namespace(namespace)

    def flush(self) -> None:
        """Make what was put durable."""
        for _, store in self._all():
            store.flush()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return `KVStore.stats()` of each store by its folder."""
        return {shape.folder: store.stats() for shape, store in self._all()}

    def close(self) -> None:
        """Close all stores; what was put is written."""
        for _, store in self._all():
            store.close()

    def __enter__(self) -> ChunkStores:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self) -> list[tuple[ChunkShape, KVStore]]:
        with self._lock:
            return list(self._stores.items())

    def _store(self, shape: ChunkShape) -> KVStore:
        with self._lock:
            if shape not in self._stores:
                identity = ModelIdentity(f"chunks of {self._engine}", "", "", "", shape.layout)
                self._stores[shape] = KVStore(os.path.join(self._path, shape.folder), identity, self._config)
            return self._stores[shape]

    def _check(self, memory: Any, shape: ChunkShape) -> None:
        found = memoryview(memory).nbytes
        if found != shape.nbytes:
            raise LayoutMismatch(f"memory: expected {shape.nbytes} bytes of {shape.folder}, found {found}")


def _tokens(key: bytes, count: int) -> Tokens:
    """Token ids of a key: no two keys share even the first, but by a chance of 2^-32, and none share eight."""
    return np.frombuffer(hashlib.shake_256(key).digest(4 * count), "<u4")
