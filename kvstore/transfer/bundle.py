"""A store as one file for another machine: each piece with a checksum, nothing in it trusted (FORMAT.md, "Bundles").

    magic | head: files, each with its name and size | head's checksum | pieces | end: how many pieces there are

A piece is a run of bytes of one file; pages of zeros are left out. Whoever unpacks a bundle gets a folder that is
opened like any store, so that every record in it is checked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator

import xxhash

from kvstore.config import MIB, PAGE_BYTES
from kvstore.errors import CorruptStore, DiskError
from kvstore.tiers.disk.fs import FileSystem, close_quietly, make_directory, read_all, write_all

MAGIC = b"KVBUNDL1"
_COUNT = struct.Struct("<I")
_PIECE = struct.Struct("<IIQ")  # file, bytes, offset
_END = 0xFFFFFFFF
_SUM = 16
_MOST_HEAD, _MOST_PIECE, _MOST_FILES = 1 << 20, MIB, 1 << 14
_MOST_ZEROS = 64 * MIB  # that a file may have beyond the bytes that the bundle has of all
_NAME = re.compile(
    r"store\.json|catalog/data\.mdb|segments/[0-9a-f]{8}\.seg|profiles/(?!\.{1,2}\Z)[0-9A-Za-z._-]{1,80}"
)


def pack(fs: FileSystem, folder: str, path: str) -> int:
    """Write the closed store in `folder` as a bundle to `path`, whole or not at all. Durable on return.

    Returns:
        Bytes of the bundle.

    Raises:
        OSError: it cannot be read or written.
    """
    names = sorted(name for name in _files(fs, folder) if _NAME.fullmatch(name))
    sizes = [fs.size(os.path.join(folder, name)) for name in names]
    head = json.dumps({"files": [[name, size] for name, size in zip(names, sizes, strict=True)]}).encode()
    temporary = path + ".new"
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(temporary)
    fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        writer = _Writer(fs, fd)
        writer.add(MAGIC + _COUNT.pack(len(head)) + head + xxhash.xxh3_128_digest(head))
        count = 0
        for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
            for offset, data in _pieces(fs, os.path.join(folder, name), size):
                writer.add_piece(number, offset, data)
                count += 1
        writer.add_piece(_END, count, b"")
        fs.fdatasync(fd)
    finally:
        close_quietly(fs, fd)
    fs.rename(temporary, path)
    fs.sync_directory(os.path.dirname(os.path.abspath(path)))
    return writer.at


def unpack(fs: FileSystem, path: str, folder: str) -> None:
    """Write the files of a bundle to `folder`, which must not exist. On an error what was written stays.

    Raises:
        CorruptStore: the bundle is cut short, damaged, or no bundle; the message says what to do.
        OSError: it cannot be read, or the folder cannot be written.
    """
    fd = fs.open(path, os.O_RDONLY)
    try:
        reader = _Reader(fs, fd, path, fs.size(path))
        files = reader.files()
        for sub in ("", "catalog", "segments", "profiles"):
            make_directory(fs, os.path.join(folder, sub) if sub else folder)
        for name, size in files:
            with _opened(fs, os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as target:
                fs.truncate(target, size)
        for number, offset, data in reader.pieces(files):
            with _opened(fs, os.path.join(folder, files[number][0]), os.O_WRONLY) as target:
                write_all(fs, target, [memoryview(data)], offset)
    finally:
        close_quietly(fs, fd)


class _Writer:
    """Appends to a file. at: bytes written."""

    def __init__(self, fs: FileSystem, fd: int) -> None:
        self._fs, self._fd, self.at = fs, fd, 0

    def add(self, data: bytes) -> None:
        write_all(self._fs, self._fd, [memoryview(data)], self.at)
        self.at += len(data)

    def add_piece(self, number: int, offset: int, data: bytes) -> None:
        head = _PIECE.pack(number, len(data), offset)
        self.add(head + data + xxhash.xxh3_128_digest(head + data))


class _Reader:
    """Reads a file that may hold anything, from its beginning to its end."""

    def __init__(self, fs: FileSystem, fd: int, path: str, size: int) -> None:
        self._fs, self._fd, self._path, self._size, self._at = fs, fd, path, size, 0

    def files(self) -> list[tuple[str, int]]:
        if self._take(len(MAGIC), "its beginning") != MAGIC:
            raise CorruptStore(f"{self._path}: is no bundle of kvstore; name a file that `kvstore export` wrote")
        (length,) = _COUNT.unpack(self._take(_COUNT.size, "its head"))
        if length > _MOST_HEAD:
            raise self._damaged(f"its head has {length} bytes")
        head = self._take(length, "its head")
        if self._take(_SUM, "its head") != xxhash.xxh3_128_digest(head):
            raise self._damaged("the checksum of its head differs")
        try:
            rows = json.loads(head)["files"]
            files = [(str(name), int(size)) for name, size in rows]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._damaged(f"its head cannot be read ({error})") from error
        bad = next((name for name, _ in files if not _NAME.fullmatch(name)), None)
        if bad is not None or len(dict(files)) != len(files) or len(files) > _MOST_FILES:
            raise self._damaged(f"it names files that no store has ({bad!r})")
        if any(not 0 <= size <= self._size + _MOST_ZEROS for _, size in files):
            raise self._damaged("it names a file that is larger than what the bundle holds")
        return files

    def pieces(self, files: list[tuple[str, int]]) -> Iterator[tuple[int, int, bytes]]:
        """Yield (file, offset, bytes). Raises `CorruptStore`."""
        count = 0
        while True:
            head = self._take(_PIECE.size, "a piece")
            number, length, offset = _PIECE.unpack(head)
            if length > _MOST_PIECE:
                raise self._damaged(f"piece {count} has {length} bytes")
            data = self._take(length, "a piece")
            if self._take(_SUM, "a piece") != xxhash.xxh3_128_digest(head + data):
                raise self._damaged(f"the checksum of piece {count} differs")
            if number == _END:
                if offset != count or self._at != self._size:
                    raise self._damaged("pieces are missing, or something follows its end")
                return
            if number >= len(files) or offset + length > files[number][1]:
                raise self._damaged(f"piece {count} lies outside of its file")
            count += 1
            yield number, offset, data

    def _take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self._size - self._at:
            raise self._damaged(f"it ends within {what}")
        data = bytearray(nbytes)
        if nbytes:
            read_all(self._fs, self._fd, [memoryview(data)], self._at)
        self._at += nbytes
        return bytes(data)

    def _damaged(self, what: str) -> CorruptStore:
        return CorruptStore(f"{self._path}: the bundle is damaged: {what}; copy it again, or export again")


@contextlib.contextmanager
def _opened(fs: FileSystem, path: str, flags: int) -> Iterator[int]:
    fd = fs.open(path, flags)
    try:
        yield fd
    finally:
        close_quietly(fs, fd)


def _files(fs: FileSystem, folder: str) -> list[str]:
    """The names of all files below a folder, relative to it."""
    found, todo = list[str](), [""]
    while todo:
        inside = todo.pop()
        for name in fs.names(os.path.join(folder, inside)):
            path = os.path.join(inside, name)
            kind = fs.kind(os.path.join(folder, path))
            if kind == "a folder":
                todo.append(path)
            elif kind == "a file":
                found.append(path)
    return found


def _pieces(fs: FileSystem, path: str, size: int) -> Iterator[tuple[int, bytes]]:
    """Runs of a file that are not zeros, (offset, bytes)."""
    with _opened(fs, path, os.O_RDONLY) as fd:
        for offset in range(0, size, _MOST_PIECE):
            data = bytearray(min(_MOST_PIECE, size - offset))
            read_all(fs, fd, [memoryview(data)], offset)
            begin = None
            for at in range(0, len(data) + PAGE_BYTES, PAGE_BYTES):
                page = data[at : at + PAGE_BYTES]
                if page.count(0) < len(page):
                    begin = at if begin is None else begin
                elif begin is not None:
                    yield offset + begin, bytes(data[begin:at])
                    begin = None


def check_target(fs: FileSystem, path: str) -> None:
    """Raise `DiskError` if a bundle cannot be written to `path`: its folder is missing, or it is one itself."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        if fs.kind(folder) != "a folder":
            raise DiskError(f"{folder}: is not a folder; name another place")
    except FileNotFoundError:
        raise DiskError(f"{folder}: there is no such folder; make it first") from None
    with contextlib.suppress(FileNotFoundError):
        if fs.kind(path) != "a file":
            raise DiskError(f"{path}: is {fs.kind(path)}; name a file")
