"""Drives shim.c: makes file calls of this process fail, also those of LMDB, and records them.

The library must be preloaded (`preloaded()` is the environment for that); `driver()` finds it in the process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
NO_COMPILER = "there is no C compiler"
CALLS = ("open", "pwrite", "write", "sync", "truncate", "allocate", "rename", "unlink", "mkdir", "mmap", "read")
KINDS = ("", "created", "wrote", "zeroed", "cut", "grew", "synced", "renamed", "unlinked", "made", "marked")
CODES = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "EMFILE": errno.EMFILE, "short": -1}
_HEAD = struct.Struct("<5q")


@dataclass(frozen=True)
class Event:
    """One call. a, b: wrote: offset; zeroed: offset, bytes; cut, grew: size; synced: events before a, or only b."""

    kind: str
    inode: int
    a: int
    b: int
    data: bytes


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@functools.cache
def library() -> Path:
    """The compiled library; made once for each version of the source. Needs a compiler."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"kvstore-shim-{os.getuid()}" / f"{digest}.so"
    if not made.exists():
        made.parent.mkdir(mode=0o700, exist_ok=True)
        draft = made.with_suffix(f".{os.getpid()}")
        command = [str(compiler()), "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(draft), str(SOURCE)]
        done = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        draft.rename(made)
    return made


def preloaded() -> dict[str, str]:
    """What to add to the environment of a process that is to be driven."""
    others = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{others} {library()}".strip()}


class Driver:
    """The library in this process. `fail` and `record` look at files below one folder only."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(library()))
        self._lib.shim_events.restype = ctypes.c_void_p
        self._lib.shim_hits.restype = ctypes.c_long

    def fail(self, folder: Path, call: str, nth: int, code: str, sticky: bool) -> None:
        """The nth call fails from now on, with sticky every later one, too."""
        where, which = os.fsencode(folder), CALLS.index(call)
        self._lib.shim_fail(where, which, ctypes.c_long(nth), CODES[code], int(sticky))

    def heal(self) -> int:
        """Ends the faults; returns how many struck."""
        hits = int(self._lib.shim_hits())
        self._lib.shim_fail(b"", 0, ctypes.c_long(0), 0, 0)
        return hits

    def mark(self, data: bytes) -> None:
        """Notes something between the calls."""
        self._lib.shim_mark(data, ctypes.c_size_t(len(data)))

    @contextmanager
    def recording(self, folder: Path) -> Iterator[list[Event]]:
        """The list is filled at the end of the block."""
        events: list[Event] = []
        self._lib.shim_record(os.fsencode(folder))
        try:
            yield events
        finally:
            self._lib.shim_record(b"")
            events += self._events()

    def _events(self) -> Iterator[Event]:
        nbytes = ctypes.c_size_t()
        at = self._lib.shim_events(ctypes.byref(nbytes))
        data, place = ctypes.string_at(at, nbytes.value) if at else b"", 0
        while place < len(data):
            kind, inode, a, b, size = _HEAD.unpack_from(data, place)
            place += _HEAD.size
            yield Event(KINDS[kind], inode, a, b, data[place : place + size])
            place += size
