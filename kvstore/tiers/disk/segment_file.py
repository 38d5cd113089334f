"""What a segment file is called, and its first page."""

from __future__ import annotations

import os
import re
import struct

import xxhash

from kvstore.config import PAGE_BYTES
from kvstore.tiers.disk.fs import FileSystem, close_quietly, is_passing, read_all

SEGMENT_MAGIC = b"KVSTSEG1"
_HEADER = struct.Struct("<8sHxxIQ16s")
_NAME = re.compile(r"([0-9a-f]{8})\.seg")


def segment_numbers(fs: FileSystem, directory: str) -> list[int]:
    """The segments whose files are there, ascending."""
    return sorted(int(m[1], 16) for name in fs.names(directory) if (m := _NAME.fullmatch(name)))


def segment_header(number: int, segment_bytes: int, store_id: bytes) -> bytes:
    """The first page of a segment file."""
    fixed = _HEADER.pack(SEGMENT_MAGIC, 1, number, segment_bytes, store_id)
    return (fixed + xxhash.xxh3_128_digest(fixed)).ljust(PAGE_BYTES, b"\0")


def is_segment_of(page: bytes, number: int, store_id: bytes) -> bool:
    """Whether `page` is an intact first page of this store's segment `number`."""
    if len(page) < _HEADER.size + 16 or page[_HEADER.size : _HEADER.size + 16] != xxhash.xxh3_128_digest(
        page[: _HEADER.size]
    ):
        return False
    magic, version, stored_number, _, stored_id = _HEADER.unpack_from(page)
    return bool(magic == SEGMENT_MAGIC and version == 1 and stored_number == number and stored_id == store_id)


def is_segment_file(fs: FileSystem, path: str, number: int, segment_bytes: int, store_id: bytes) -> bool:
    """Return whether a file is a whole segment of this store, with that number.

    Raises:
        OSError: it cannot be said now.
    """
    page = bytearray(PAGE_BYTES)
    try:
        if fs.size(path) != segment_bytes:
            return False
        fd = fs.open(path, os.O_RDONLY)
        try:
            read_all(fs, fd, [memoryview(page)], 0)
        finally:
            close_quietly(fs, fd)
    except OSError as error:
        if is_passing(error):
            raise
        return False
    return is_segment_of(bytes(page), number, store_id)
