"""The catalog's file, read at once: checked and scanned in one pass over its bytes.

What stands in the file is believed only if everything about it is right (csrc/catalog/catalog.h says what). Whatever is
unusual is left to those who look step by step: `environment.check`, `Catalog.is_sound`, `Catalog.scan`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from kvstore.tiers.disk._catalog import read
from kvstore.tiers.disk.catalog_file import META_BYTES, Metas
from kvstore.tiers.disk.entry import ENTRY, Scan, cut_of, donors_of
from kvstore.tiers.disk.fs import FileSystem, close_quietly, read_all

_TRIES = 3  # a writer may commit while its file is read
_PART = 1 << 28  # bytes of one read


class WholeFile(NamedTuple):
    """A sound catalog as it was at one commit.

    Attributes:
        commit: its number.
        scan: all entries.
    """

    commit: int
    scan: Scan


def read_whole(fs: FileSystem, path: str) -> WholeFile | None:
    """Read the file of a catalog; None if it must be looked at step by step: it is damaged, or unusual, or cannot be
    read, or a writer changes it all the while. Takes memory for the file and for its entries, for a moment.
    """
    for _ in range(_TRIES):
        try:
            file = _bytes_of(fs, path)
            if file is None or Metas.read(fs, path).pages == file[:META_BYTES].tobytes():
                break
        except (OSError, MemoryError):
            return None
    else:
        return None
    found = read(file) if file is not None else ""
    if isinstance(found, str):
        return None
    commit, heads, tokens, longer = found
    numbered = [(int.from_bytes(value[8:16], "little"), value) for value in longer]
    donors = {record: listed for record, value in numbered if (listed := donors_of(value))}
    cuts = {record: cut for record, value in numbered if (cut := cut_of(value))}
    return WholeFile(commit, Scan.of(heads.view(ENTRY), tokens, [], donors, cuts))


def _bytes_of(fs: FileSystem, path: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """The whole pages of the file; None if there are not even its first two."""
    size = fs.size(path)
    if size < META_BYTES:
        return None
    file = np.empty(size, np.uint8)
    fd = fs.open(path, os.O_RDONLY)
    try:
        for begin in range(0, size, _PART):
            read_all(fs, fd, [file[begin : begin + _PART].data], begin)
    finally:
        close_quietly(fs, fd)
    return file
