"""Page-aligned memory that is recycled.

O_DIRECT needs aligned buffers, CUDA wants pinned ones, and fresh memory costs more to touch than a record takes to
read: so buffers go back to the pool when the last reference dies, and are handed out again warm.

Buffers that come back soon are cut from slabs of huge pages: a request to the disk lists the pages of its buffer, and
one of 1 MiB in small pages takes about twice as long as one in huge pages. Buffers that stay have ordinary pages: huge
pages that no one used before are slow to get, up to four times, where a hypervisor takes free ones back.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.config import KIB, MIB, PAGE_BYTES

_HUGE_PAGE_BYTES = 2 * MIB
SLAB_BYTES = 8 * MIB
# A smaller buffer has few pages to list, whatever their size; a larger one is a copy of a whole cache, for no disk.
_WORTH_HUGE_PAGES = range(128 * KIB, SLAB_BYTES + 1)
_MOST_PIECES = 64  # of a slab: small records do not take a whole one
# So long the pool keeps as much as was in use at once: fresh memory takes four times as long to copy to.
_BUSY_S = 30.0

Bytes = npt.NDArray[np.uint8]


class Buffer:
    """Writable, page-aligned memory, which returns to its pool when the buffer is no longer referenced.

    `BufferPool.take` makes it. For one thread at a time.

    Attributes:
        view: the bytes asked for. It must not outlive the buffer: keep the buffer as long as its bytes are used.
        capacity: bytes of memory behind the view, or more.

    Example:
        >>> buffer = BufferPool(keep_bytes=1 << 20).take(5000)
        >>> len(buffer.view), buffer.capacity, buffer.address % 4096
        (5000, 8192, 0)
        >>> buffer.array().nbytes
        5000
    """

    __slots__ = ("__weakref__", "_memory", "capacity", "view")

    _memory: memoryview
    capacity: int
    view: memoryview

    @property
    def address(self) -> int:
        """Where the memory starts."""
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data)

    def array(self) -> Bytes:
        """Return the view as an array, uint8 `[bytes]`, which keeps the buffer from its pool as long as it is used."""
        return np.asarray(_Kept(self))

    def trim(self, nbytes: int) -> None:
        """Shorten the view to `nbytes`."""
        self.view = self._memory[:nbytes]


class _Kept:
    """What an array refers to that keeps a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        size = len(buffer.view)
        self.__array_interface__ = {"data": (buffer.address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class _Lent(weakref.ref):  # type: ignore[type-arg]
    """Refers to a buffer, and knows which piece of memory it has; `slab` is None while it has none. brief: it does not
    last."""

    __slots__ = ("brief", "number", "slab")

    slab: _Slab | None
    number: int
    brief: bool


class BufferPool:
    """Hands out buffers in size classes, of which at most an eighth is wasted. Thread-safe.

    A buffer that nobody refers to any more is noted by one call into C, which an interrupt cannot cut short, and its
    memory taken back with the next call. `_lock` guards everything but those notes.

    Args:
        keep_bytes: how much unused memory stays for the next buffers; the rest goes back to the system.
        busy_bytes: while buffers are taken, and for half a minute after, as much stays as was in use at once, up to
            this; with the first `collect` behind that it goes back.
        pinned: page-lock the memory for CUDA copies.

    Example:
        >>> pool = BufferPool(keep_bytes=1 << 20)
        >>> buffer = pool.take(4096)
        >>> del buffer  # the memory stays in the pool
        >>> pool.free_bytes
        4096
    """

    def __init__(self, keep_bytes: int, busy_bytes: int = 0, pinned: bool = False) -> None:
        self._keep_bytes = keep_bytes
        self._busy_bytes = busy_bytes
        self._busy_until = 0.0  # by time.monotonic
        self._brief_bytes = self._peak = 0  # in buffers that do not last: now, and the most until then
        self._pinned = pinned
        # By kind (size, huge pages): slabs with a free piece that has memory behind it, and with one that has none.
        self._warm: dict[tuple[int, bool], dict[_Slab, None]] = {}
        self._cold: dict[tuple[int, bool], dict[_Slab, None]] = {}
        self._lent: dict[int, _Lent] = {}  # by id: a reference that was never hashed cannot be once its buffer is gone
        self._returned: deque[_Lent] = deque()
        self._free_bytes = 0
        self._torn = False  # a call was cut short by an interrupt: see `_mend`
        self._lock = threading.RLock()

    def take(self, nbytes: int, lasting: bool = False) -> Buffer:
        """Return a buffer with undefined contents.

        Args:
            nbytes: length of its view.
            lasting: whether it will be kept for long; it then has ordinary pages.
        """
        size = size_class(nbytes)
        kind = size, not lasting and size in _WORTH_HUGE_PAGES
        buffer = Buffer()
        lent = _Lent(buffer, self._returned.append)
        lent.slab, lent.brief = None, not lasting
        with self._lock:
            self._take_back()
            self._torn = True
            if not lasting:
                self._note_use(size)
            self._lent[id(lent)] = lent
            slab = next(reversed(self._warm.get(kind, {})), None)
            if slab is not None:
                # No call stands between these lines, so no interrupt comes between: a piece is free or lent.
                lent.number, lent.slab = slab.warm[-1], slab
                del slab.warm[-1]
                self._free_bytes -= size
                if not slab.warm:  # else it is filed where it was
                    self._file(slab)
            else:
                slab = next(reversed(self._cold.get(kind, {})), None) or _Slab(kind, self._pinned)
                lent.number, lent.slab = slab.cold[-1], slab
                del slab.cold[-1]
                self._file(slab)
            self._torn = False
        buffer._memory = slab.piece(lent.number)
        buffer.capacity = slab.size
        buffer.view = buffer._memory[:nbytes]
        return buffer

    def collect(self) -> None:
        """Take back the memory of buffers that nobody refers to any more; give back what is too much by now."""
        with self._lock:
            self._take_back()
            self._shrink(self._limit())

    def close(self) -> None:
        """Give back all memory that is in no buffer, now, and that of each buffer when nobody refers to it any more and
        to those it lies beside. What is taken later is given back like that, too. Idempotent."""
        with self._lock:
            self._keep_bytes = self._busy_bytes = 0
            # Whoever has a buffer has its slab. Without its reference, no call notes that it came back.
            for empty in (self._warm, self._cold, self._lent, self._returned):
                empty.clear()
            self._free_bytes = self._brief_bytes = self._peak = 0

    @property
    def free_bytes(self) -> int:
        """Memory that the pool has and that is in no buffer."""
        self.collect()
        return self._free_bytes

    def _note_use(self, size: int) -> None:
        """A buffer of so many bytes is taken that does not last."""
        now = monotonic()
        self._brief_bytes += size
        self._peak = max(self._peak if now < self._busy_until else 0, self._brief_bytes)
        self._busy_until = now + _BUSY_S

    def _limit(self) -> int:
        """How much unused memory may stay."""
        if monotonic() >= self._busy_until:
            return self._keep_bytes
        return max(self._keep_bytes, min(self._peak, self._busy_bytes))

    def _shrink(self, limit: int) -> None:
        """Gives unused memory back until no more than `limit` is left, the largest pieces first."""
        if self._free_bytes <= limit:
            return
        self._torn = True
        for kind in sorted(self._warm, reverse=True):
            for slab in list(self._warm[kind]):
                while slab.warm and self._free_bytes > limit:
                    number = slab.warm[-1]  # as above no call stands between this line and the next three
                    slab.cold += [number]
                    del slab.warm[-1]
                    self._free_bytes -= slab.size
                    slab.forget(number)
                self._file(slab)
        self._torn = False

    def _take_back(self) -> None:
        if self._torn:
            self._mend()
        if not self._returned:
            return
        self._torn, limit = True, self._limit()
        while self._returned:
            lent = self._returned[0]
            slab = lent.slab
            if slab is not None:
                warm = self._free_bytes + slab.size <= limit
                if warm:  # as above no call stands between the lines, so that no piece comes back twice
                    slab.warm += [lent.number]
                    self._free_bytes += slab.size
                else:
                    slab.cold += [lent.number]
                lent.slab = None
                if lent.brief:
                    self._brief_bytes -= slab.size
                if not warm:
                    slab.forget(lent.number)
                self._file(slab)
            self._lent.pop(id(lent), None)
            del self._returned[0]
        self._torn = False

    def _mend(self) -> None:
        """Lists all slabs anew, and counts their free memory."""
        slabs = {slab for lists in (self._warm, self._cold) for listed in lists.values() for slab in listed}
        slabs.update([lent.slab for lent in self._lent.values() if lent.slab is not None])
        for slab in slabs:
            self._file(slab)
        self._free_bytes = sum(slab.size * len(slab.warm) for slab in slabs)
        held = [lent.slab for lent in self._lent.values() if lent.slab is not None and lent.brief]
        self._brief_bytes = sum(slab.size for slab in held)

    def _file(self, slab: _Slab) -> None:
        """Put the slab where `take` looks for it; one without memory is not kept."""
        _list(self._warm.setdefault(slab.kind, {}), slab, bool(slab.warm))
        _list(self._cold.setdefault(slab.kind, {}), slab, 0 < len(slab.cold) < slab.count)


class _Slab:
    """`count` pieces of `size` bytes. warm: numbers of free pieces with memory behind them, cold: of those without."""

    __slots__ = ("_array", "_begin", "_mapping", "cold", "count", "kind", "size", "warm")

    def __init__(self, kind: tuple[int, bool], pinned: bool) -> None:
        self.kind = kind
        size, huge = kind
        self.size = size
        self.count = 1 if pinned else max(1, min(_MOST_PIECES, SLAB_BYTES // size))
        self._mapping: mmap.mmap | None = None
        self._begin = 0
        if pinned:
            self._array = _pinned_memory(size)
        else:
            self._array, self._mapping, self._begin = _pages(self.count * size, huge)
        self.warm: list[int] = []
        self.cold = list(range(self.count - 1, -1, -1))

    def piece(self, number: int) -> memoryview:
        view: Any = self._array[number * self.size : (number + 1) * self.size]
        return memoryview(view)

    def forget(self, number: int) -> None:
        """Give the memory of a cold piece back to the system; its addresses stay."""
        if self._mapping is not None and len(self.cold) < self.count:
            self._mapping.madvise(mmap.MADV_DONTNEED, self._begin + number * self.size, self.size)


def _list(slabs: dict[_Slab, None], slab: _Slab, wanted: bool) -> None:
    """Puts the slab last, or takes it out."""
    slabs.pop(slab, None)
    if wanted:
        slabs[slab] = None


def size_class(nbytes: int) -> int:
    """Return the capacity of the buffer that holds `nbytes`: eighths of a power of two, whole pages.

    Example:
        >>> size_class(100_000)
        106496
    """
    pages = max(1, -(-nbytes // PAGE_BYTES))
    step = max(1, (1 << (pages - 1).bit_length()) // 16)
    return -(-pages // step) * step * PAGE_BYTES


def _pages(nbytes: int, huge: bool) -> tuple[Bytes, mmap.mmap, int]:
    """Memory, in huge pages if wanted and to be had; the mapping it is in, and where in it."""
    slack = _HUGE_PAGE_BYTES if huge else 0
    # Private: the default, shared, is backed by a file system in memory, which has no huge pages.
    mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(mapping, np.uint8)
    if not slack:
        return array, mapping, 0
    mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -array.ctypes.data % _HUGE_PAGE_BYTES
    return array[begin : begin + nbytes], mapping, begin


def _pinned_memory(nbytes: int) -> Bytes:
    import torch

    # CUDA's host allocations are page-aligned; one page more makes that certain whatever the allocator does.
    tensor: Any = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    array: Bytes = tensor.numpy()
    shift = -array.ctypes.data % PAGE_BYTES
    return array[shift : shift + nbytes]
