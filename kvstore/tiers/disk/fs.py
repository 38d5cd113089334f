"""The one seam to the file system: every raw file call of the disk tier, so that tests can make each of them fail.

LMDB makes its own calls; see catalog.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence

from kvstore.core.file_kinds import kind_of
from kvstore.tiers.disk import _files

O_DIRECT = getattr(os, "O_DIRECT", 0)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MAX_BUFFERS = 512  # below IOV_MAX, which is 1024 on Linux
# A disk takes longer for the same bytes in shorter writes, for nobody has the next one ready; and a read that comes
# meanwhile waits for all of one.
_WRITE_BYTES = 16 << 20
# A disk is asked for so much with each request, and for so many at once, while what came is decoded: one that has the
# next request already does not wait for this program, and what came with a small one is decoded sooner.
_REQUEST_BYTES, LARGE_REQUESTS = 1 << 20, 2
# Parts of records are smaller requests.
PART_REQUESTS = 32
# Errors that say nothing about the bytes on disk: of this process, its limits and rights, or of the moment.
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EBUSY}
)


class NotAFile(OSError):
    """Something else, for example a symbolic link or a FIFO, stands where a file of the store should be."""

    @classmethod
    def at(cls, path: str, kind: str) -> NotAFile:
        """Make the error for `path`, where `kind` was found."""
        return cls(errno.EINVAL, f"is {kind}, not a file", path)


def is_passing(error: OSError) -> bool:
    """Return whether an error says nothing about the bytes on disk, so that the same call may succeed later.

    Example:
        >>> is_passing(OSError(errno.EMFILE, "too many open files")), is_passing(OSError(errno.EIO, "bad sector"))
        (True, False)
    """
    return error.errno in _PASSING


def lacks_descriptors(error: OSError) -> bool:
    """Return whether a call failed because this process, or the whole system, has too many files open.

    Example:
        >>> lacks_descriptors(OSError(errno.ENFILE, "too many open files in the system"))
        True
    """
    return error.errno in (errno.EMFILE, errno.ENFILE)


class FileSystem:
    """File calls as the system has them; errors are OSError. Stateless and thread-safe.

    Tests inherit from it to make calls fail.

    Example:
        >>> import tempfile
        >>> fs = FileSystem()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(fs, os.path.join(folder, "a"), b"text")
        ...     fs.names(folder), read_file(fs, os.path.join(folder, "a"), limit=100)
        (['a'], b'text')
    """

    def open(self, path: str, flags: int) -> int:
        """Open a file, or with O_DIRECTORY a folder. Follows no symbolic link to a file, and waits for nobody.

        Raises:
            NotAFile: `path` is a symbolic link, a folder, a FIFO, a socket or a device.
        """
        if flags & os.O_DIRECTORY:
            return os.open(path, flags | os.O_CLOEXEC)
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
                raise NotAFile.at(path, self.kind(path)) from error
            raise
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            raise NotAFile.at(path, kind_of(mode))
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def next_data(self, fd: int, offset: int) -> int:
        """Return where the first bytes from `offset` on are that are more than a hole; the file's size if none are."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            return os.fstat(fd).st_size if error.errno == errno.ENXIO else offset

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Make a hole: these bytes are zeros from now on, and take no space. Raises `OSError`, also if the file system
        cannot do that."""
        if _libc is None:
            raise OSError(errno.EOPNOTSUPP, "this system has no fallocate")
        if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name. Raises `FileExistsError` if that name is taken."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def names(self, path: str) -> list[str]:
        return os.listdir(path)

    def size(self, path: str) -> int:
        """Return the bytes of a file. Raises `NotAFile` as `open` does."""
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFile.at(path, kind_of(status.st_mode))
        return status.st_size

    def modified(self, path: str) -> float:
        """Return when the file was written last, in unix seconds."""
        return os.stat(path, follow_symlinks=False).st_mtime

    def touch(self, path: str) -> None:
        """Let the file count as written now."""
        os.utime(path, follow_symlinks=False)

    def allocated(self, path: str) -> int:
        """Return the bytes that a file or folder takes on disk; 0 if it cannot be found out."""
        try:
            return os.lstat(path).st_blocks * 512  # whatever the block size of the file system is
        except OSError:
            return 0

    def free(self, path: str) -> int:
        """Return how many bytes the file system of a path has left for this user. Raises `OSError`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def kind(self, path: str) -> str:
        """Return what is at `path` itself: "a file", "a folder", "a symbolic link", "a FIFO", "a socket", or else."""
        return kind_of(os.lstat(path).st_mode)

    def sync_directory(self, path: str) -> None:
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            close_quietly(self, fd)

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of an open file; return False if somebody holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_sole_user(self, fd: int) -> bool:
        """Return whether no process has the LMDB environment open whose lock file this is.

        If so, none can open it until `fd` is closed, or any other descriptor of this process for the same file.
        """
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)  # the lock that LMDB itself takes
        except (BlockingIOError, PermissionError):
            return False
        return True

    def inode(self, path: str) -> tuple[int, int]:
        """Return what tells the file at `path` from one that took its place."""
        status = os.lstat(path)
        return status.st_dev, status.st_ino

    def unlock(self, fd: int) -> None:
        """Give the lock back, even if a forked child still has the file open."""
        fcntl.flock(fd, fcntl.LOCK_UN)


_PWRITEV, _PREADV = FileSystem.pwritev, FileSystem.preadv  # tests may replace them


def make_directory(fs: FileSystem, path: str) -> None:
    """Make a folder and those above it, where they are missing. Durable on return. Raises `OSError`."""
    missing = [os.path.abspath(path)]
    while not _is_there(fs, missing[-1]):
        missing.append(os.path.dirname(missing[-1]))
    fs.mkdir(path)
    for parent in missing[1:]:
        with contextlib.suppress(PermissionError):  # a parent that may not be read cannot be synced
            fs.sync_directory(parent)


def remove_tree(fs: FileSystem, path: str) -> None:
    """Remove a folder and all in it, without following links; nothing if it is not there. Raises `OSError`."""
    try:
        kind = fs.kind(path)
    except FileNotFoundError:
        return
    if kind != "a folder":
        fs.unlink(path)
        return
    for name in fs.names(path):
        remove_tree(fs, os.path.join(path, name))
    fs.rmdir(path)


def _is_there(fs: FileSystem, path: str) -> bool:
    try:
        fs.names(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _load_libc() -> ctypes.CDLL | None:
    """Python has no call that makes holes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return None
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


_libc = _load_libc()


def write_all(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers one after the other from `offset` on, up to 16 MiB with each call.

    Python's other threads go on meanwhile, and no call waits for them: between two calls, each of them could hold the
    lock of the interpreter for milliseconds, which is what a call takes. A file system of tests sees every call.

    Raises:
        OSError: also for a short write, which means a full or failing disk; its rest would not be aligned.
    """
    if type(fs).pwritev is _PWRITEV:
        short = _files.write_all(fd, buffers, offset, _WRITE_BYTES, _MAX_BUFFERS)
    else:
        short = _written_by(fs, fd, buffers, offset)
    if short:
        raise OSError(errno.EIO, f"short write: the disk did not take all of {short} bytes")


def _written_by(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """The same by calls of `fs`; returns the bytes of a call that wrote less than that, 0 if none did."""
    begin = want = 0
    for end, buffer in enumerate(buffers, 1):
        want += len(buffer)
        if end == len(buffers) or want + len(buffers[end]) > _WRITE_BYTES or end - begin == _MAX_BUFFERS:
            if fs.pwritev(fd, buffers[begin:end], offset) != want:
                return want
            offset += want
            begin, want = end, 0
    return 0


def read_all(fs: FileSystem, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all buffers from `offset` on. Raises `OSError`, also if the file ends before."""
    for begin in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[begin : begin + _MAX_BUFFERS]
        want = sum(len(b) for b in part)
        if fs.preadv(fd, part, offset) != want:
            raise OSError(errno.EIO, f"short read: the file ends within the {want} bytes from {offset}")
        offset += want


def reads_ahead(fs: FileSystem, requests: int = LARGE_REQUESTS) -> _files.Reads | None:
    """Return what reads files that are open past the page cache while their reader does something else.

    None where the file system is one of tests, which sees every call.

    Args:
        requests: of at most 1 MiB that are under way at once.

    Raises:
        OSError: the system has no asynchronous I/O, or has given all that it has (/proc/sys/fs/aio-max-nr) away.
    """
    if type(fs).preadv is not _PREADV:
        return None
    return _files.Reads(requests, _REQUEST_BYTES)


def close_quietly(fs: FileSystem, fd: int) -> None:
    """Close a file, and ignore errors: what had to be durable was synced, and Linux frees the descriptor anyway."""
    with contextlib.suppress(OSError):
        fs.close(fd)


def read_file(fs: FileSystem, path: str, limit: int) -> bytes:
    """Return the contents of a small file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is larger than `limit` bytes.
    """
    size = fs.size(path)
    if size > limit:
        raise ValueError(f"{path}: expected at most {limit} bytes, found {size}")
    fd = fs.open(path, os.O_RDONLY)
    try:
        data = bytearray(size)
        read_all(fs, fd, [memoryview(data)], 0)
        return bytes(data)
    finally:
        close_quietly(fs, fd)


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Return memory of pages of its own, of large ones if the system has them; any part of it can be given back."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults: half of the time, otherwise
    return memory


def read_large(fs: FileSystem, path: str, limit: int) -> memoryview:
    """Return the contents of a file of many megabytes, read-only, in fresh memory that they were read into directly.

    Raises: as `read_file`.
    """
    size = fs.size(path)
    if not 0 < size <= limit:
        raise ValueError(f"{path}: expected 1 to {limit} bytes, found {size}")
    memory = fresh_memory(size)
    fd = fs.open(path, os.O_RDONLY)
    try:
        read_all(fs, fd, [memoryview(memory)], 0)
        return memoryview(memory).toreadonly()
    finally:
        close_quietly(fs, fd)


def read_start(fs: FileSystem, path: str, most: int) -> tuple[bytes, int]:
    """Return the first `most` bytes of a file, or all if it has fewer, and its size. Raises `OSError`."""
    size = fs.size(path)
    fd = fs.open(path, os.O_RDONLY)
    try:
        data = bytearray(min(size, most))
        read_all(fs, fd, [memoryview(data)], 0)
        return bytes(data), size
    finally:
        close_quietly(fs, fd)


def write_file(fs: FileSystem, path: str, data: bytes | memoryview) -> None:
    """Replace a small file, whole or not at all. Durable on return. Raises `OSError`."""
    temporary = path + ".new"
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(temporary)  # a crash left it, or it is a link, which must not be written through
    fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(fs, fd, [memoryview(data)], 0)
        fs.fdatasync(fd)
    finally:
        close_quietly(fs, fd)
    fs.rename(temporary, path)
    fs.sync_directory(os.path.dirname(path))
