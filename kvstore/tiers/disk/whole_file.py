"""The catalog's file, read at once: checked and scanned in one pass over its bytes.

What stands in the file is believed only if everything about it is right (csrc/catalog/catalog.h says what). Whatever is
unusual is left to those who look step by step: `environment.check`, `Catalog.is_sound`, `Catalog.scan`.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore.config import MIB, PAGE_BYTES
from kvstore.tiers.disk._catalog import read
from kvstore.tiers.disk.catalog_file import Metas
from kvstore.tiers.disk.entry import ENTRY, Scan, cut_of, donors_of
from kvstore.tiers.disk.fs import O_DIRECT, FileSystem, close_quietly, read_all

_File: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
_TRIES = 3  # a writer may commit while its file is read
_PART = 1 << 26  # bytes of one read
_LARGE = 128 * MIB  # smaller files: one thread (each keeps memory of its own: 60 B a block of 100,000), no O_DIRECT
_MOST_THREADS = 4


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
    be read, or a writer changes it all the while. Takes memory for the file and for its entries, for a moment.
    """
    try:
        file = _bytes_of(fs, path)
        found = read(file, _threads_for(file)) if file is not None else "it is changed all the while"
    except (OSError, MemoryError) as error:
        return str(error) or "it takes more memory than there is"
    if isinstance(found, str):
        return found
    commit, heads, tokens, longer = found
    numbered = [(int.from_bytes(value[8:16], "little"), value) for value in longer]
    donors = {record: listed for record, value in numbered if (listed := donors_of(value))}
    cuts = {record: cut for record, value in numbered if (cut := cut_of(value))}
    return WholeFile(commit, Scan.of(heads.view(ENTRY), tokens, [], donors, cuts))


def _threads_for(file: _File) -> int:
    return 1 if len(file) < _LARGE else min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _bytes_of(fs: FileSystem, path: str) -> _File | None:
    """The file as it is at one commit; None if a writer does not leave it alone for so long."""
    for _ in range(_TRIES):
        before = Metas.read(fs, path)
        file = _read(fs, path, min(fs.size(path), before.end))
        if before.pages == Metas.read(fs, path).pages:
            return file
    return None


def _read(fs: FileSystem, path: str, size: int) -> _File:
    """So many of its first bytes: what lies behind the last page is nobody's, and may be a hole of any size."""
    if size < _LARGE or size % PAGE_BYTES:
        file = np.empty(size, np.uint8)
        _fill(fs, path, os.O_RDONLY, file)
        return file
    # Of pages: large ones, as numpy asks for.
    memory = np.empty(size + PAGE_BYTES, np.uint8)
    begin = -memory.ctypes.data % PAGE_BYTES
    file = memory[begin : begin + size]
    try:
        # Nothing is copied from the page cache, and the disk is asked for much at a time: half of the time.
        _fill(fs, path, os.O_RDONLY | O_DIRECT, file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _fill(fs, path, os.O_RDONLY, file)
    return file


def _fill(fs: FileSystem, path: str, flags: int, file: _File) -> None:
    fd = fs.open(path, flags)
    try:
        for begin in range(0, len(file), _PART):
            read_all(fs, fd, [file[begin : begin + _PART].data], begin)
    finally:
        close_quietly(fs, fd)
