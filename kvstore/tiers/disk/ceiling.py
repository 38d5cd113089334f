"""How fast a disk is for what a store does: large aligned writes with one sync, and reads of them."""

from __future__ import annotations

import errno
import os
import time

from kvstore.core.arguments import as_folder
from kvstore.errors import ConfigError
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.disk.fs import O_DIRECT, FileSystem, close_quietly, read_all, write_all

_NAME = "kvstore-ceiling"


def disk_ceiling(path: str, nbytes: int, fs: FileSystem | None = None) -> dict[str, float]:
    """Write a file of `nbytes`, a multiple of 4096, into a folder, sync it, read it back, and remove it.

    Returns:
        "write_bytes_per_s" with the sync, "read_bytes_per_s", and "direct_io": whether the file system has O_DIRECT. Of
        one run: other work on the disk shows.

    Raises:
        ConfigError: there is no such folder.
        OSError: the disk refuses.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     disk_ceiling(folder, 1 << 16)["write_bytes_per_s"] > 0
        True
    """
    fs, folder = fs or FileSystem(), as_folder(path)
    if not os.path.isdir(folder):
        raise ConfigError(f"path: {folder} is no folder; name one on the disk that is to be measured")
    pool, name = BufferPool(keep_bytes=0), os.path.join(folder, f"{_NAME}.{os.getpid()}")
    buffer = pool.take(nbytes)
    fd, direct = _opened(fs, name)
    try:
        fs.allocate(fd, nbytes)
        begin = time.perf_counter()
        write_all(fs, fd, [buffer.view], 0)
        fs.fdatasync(fd)
        wrote = time.perf_counter() - begin
        begin = time.perf_counter()
        read_all(fs, fd, [buffer.view], 0)
        read = time.perf_counter() - begin
    finally:
        close_quietly(fs, fd)
        fs.unlink(name)
    return {"write_bytes_per_s": nbytes / wrote, "read_bytes_per_s": nbytes / read, "direct_io": float(direct)}


def _opened(fs: FileSystem, name: str) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return fs.open(name, flags | O_DIRECT), bool(O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return fs.open(name, flags), False
