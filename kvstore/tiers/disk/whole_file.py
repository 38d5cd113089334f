"""The catalog's file, read at once: checked and scanned in one pass over its bytes.

What stands in the file is believed only if everything about it is right (csrc/catalog/catalog.h says what). Whatever is
unusual is left to those who look step by step: `environment.check`, `Catalog.is_sound`, `Catalog.scan`.
"""

from __future__ import annotations

import errno
import os
from mmap import MADV_DONTNEED, mmap
from typing import NamedTuple

import numpy as np

from kvstore.config import MIB, PAGE_BYTES
from kvstore.core.workers import Workers
from kvstore.tiers.disk._catalog import read
from kvstore.tiers.disk.catalog_file import Metas
from kvstore.tiers.disk.entry import ENTRY, Scan, cut_of, donors_of
from kvstore.tiers.disk.fs import O_DIRECT, FileSystem, close_quietly, fresh_memory, read_all

_TRIES = 3  # a writer may commit while its file is read
_PART = 1 << 24  # bytes of one read
_LARGE = 128 * MIB  # smaller files: one thread (each keeps memory of its own: 60 B a block of 100,000), no O_DIRECT
_MOST_THREADS = 4
_READERS = 3


class WholeFile(NamedTuple):
    """A sound catalog as it was at one commit.

    Attributes:
        commit: its number.
        scan: all entries.
    """

    commit: int
    scan: Scan


def read_whole(fs: FileSystem, path: str) -> WholeFile | str:
    """Read the file of a catalog; or say why it must be looked at step by step: it is damaged, or unusual, or cannot
    be read, or a writer changes it all the while. Takes memory for the file; for its tokens, while the scan is there.
    """
    try:
        memory = _bytes_of(fs, path)
        if memory is None:
            return "it is changed all the while"
        file = np.frombuffer(memory, np.uint8)
        found = read(file, _threads_for(len(file)))
    except (OSError, MemoryError) as error:
        return str(error) or "it takes more memory than there is"
    if isinstance(found, str):
        return found
    commit, heads, token_count, token_at, longer = found
    numbered = [(int.from_bytes(value[8:16], "little"), value) for value in longer]
    donors = {record: listed for record, value in numbered if (listed := donors_of(value))}
    cuts = {record: cut for record, value in numbered if (cut := cut_of(value))}
    tokens = file[: 4 * token_count].view(np.uint32)
    _give_back(memory, 4 * token_count)
    return WholeFile(commit, Scan.of(heads.view(ENTRY), tokens, [], donors, cuts, token_at))


def _threads_for(size: int) -> int:
    return 1 if size < _LARGE else min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _bytes_of(fs: FileSystem, path: str) -> mmap | None:
    """The file as it is at one commit; None if a writer does not leave it alone for so long."""
    for _ in range(_TRIES):
        before = Metas.read(fs, path)
        # What lies behind the last page is nobody's, and may be a hole of any size.
        size = min(fs.size(path), before.end)
        memory = fresh_memory(size)
        _read(fs, path, memory)
        if before.pages == Metas.read(fs, path).pages:
            return memory
    return None


def _give_back(memory: mmap, used: int) -> None:
    """Give back what is behind the first `used` bytes: the index, which is made next, takes as much, and fresh memory
    is what opening would wait for."""
    end = -(-used // PAGE_BYTES) * PAGE_BYTES
    if end < len(memory):
        memory.madvise(MADV_DONTNEED, end, len(memory) - end)


def _read(fs: FileSystem, path: str, memory: mmap) -> None:
    if len(memory) < _LARGE or len(memory) % PAGE_BYTES:
        return _fill(fs, path, os.O_RDONLY, memory)
    try:
        # Nothing is copied from the page cache, and the disk is asked for much at a time: half of the time.
        _fill(fs, path, os.O_RDONLY | O_DIRECT, memory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _fill(fs, path, os.O_RDONLY, memory)


def _fill(fs: FileSystem, path: str, flags: int, memory: mmap) -> None:
    begins = range(0, len(memory), _PART)
    view, fd = memoryview(memory), fs.open(path, flags)
    try:
        # While one waits for the disk, another waits for memory.
        workers = Workers(min(_READERS, len(begins)) - 1, "kvstore-open")
        try:
            workers.share(lambda begin: read_all(fs, fd, [view[begin : begin + _PART]], begin), begins)
        finally:
            workers.close()
    finally:
        close_quietly(fs, fd)
