"""What stands at a path, in the words that errors use."""

from __future__ import annotations

import stat

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str:
    """Return "a file", "a folder", "a symbolic link", "a FIFO", "a socket" or "a device", by `st_mode`.

    Example:
        >>> kind_of(0o100644)
        'a file'
    """
    return _KINDS.get(stat.S_IFMT(mode), "a device")
