"""Page-aligned memory that is recycled.

O_DIRECT needs aligned buffers, CUDA wants pinned ones, and fresh memory costs more to touch than a record takes to
read: so buffers go back to the pool when the last reference dies, and are handed out again warm.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

from kvstore.config import MIB, PAGE_BYTES

_HUGE_PAGE_BYTES = 2 * MIB


class Buffer:
    """`nbytes` of writable, page-aligned memory. Returns to its pool when it is no longer referenced.

    `view` must not outlive the buffer: keep the buffer itself as long as its bytes are used.
    """

    __slots__ = ("_memory", "_pool", "capacity", "view")

    def __init__(self, pool: BufferPool, memory: memoryview, nbytes: int) -> None:
        self._pool = pool
        self._memory = memory
        self.capacity = len(memory)
        self.view = memory[:nbytes]

    @property
    def address(self) -> int:
        """Where the memory starts."""
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data)

    def trim(self, nbytes: int) -> None:
        """Shortens the view."""
        self.view = self._memory[:nbytes]

    def __del__(self) -> None:
        self._pool._give_back(self._memory)


class BufferPool:
    """Hands out buffers in size classes (at most an eighth is wasted). Thread-safe.

    keep_bytes: how much unused memory stays for the next buffers; the rest goes back to the system.
    pinned: page-lock the memory for CUDA copies.
    """

    def __init__(self, keep_bytes: int, pinned: bool = False) -> None:
        self._keep_bytes = keep_bytes
        self._pinned = pinned
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        # Re-entrant: a buffer may be collected, and so come back, while this thread is inside the pool.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Buffer:
        """A buffer whose view has `nbytes`; its contents are undefined."""
        size = size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else None
            if memory is not None:
                self._free_bytes -= size
        return Buffer(self, memory if memory is not None else self._allocate(size), nbytes)

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def _give_back(self, memory: memoryview) -> None:
        size = len(memory)
        with self._lock:
            if self._free_bytes + size <= self._keep_bytes:
                self._free.setdefault(size, []).append(memory)
                self._free_bytes += size

    def _allocate(self, size: int) -> memoryview:
        if self._pinned:
            return _pinned_memory(size)
        # Private: the default, shared, is backed by a file system in memory, which has no huge pages.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE_BYTES:
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)


def size_class(nbytes: int) -> int:
    """Capacity of the buffer that holds `nbytes`: eighths of a power of two, whole pages."""
    pages = max(1, -(-nbytes // PAGE_BYTES))
    step = max(1, (1 << (pages - 1).bit_length()) // 16)
    return -(-pages // step) * step * PAGE_BYTES


def _pinned_memory(size: int) -> memoryview:
    import torch

    # CUDA's host allocations are page-aligned; one page more makes that certain whatever the allocator does.
    tensor: Any = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    array = tensor.numpy()
    shift = -array.ctypes.data % PAGE_BYTES
    aligned: Any = array[shift : shift + size]
    return memoryview(aligned)
