"""A limit to the memory of a process, the page cache of what it reads and writes included: a control group of its own.

Linux, either version of control groups, and the right to make one (root has it, where the machine lets it).
"""

from __future__ import annotations

import os
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def limit_memory(nbytes: int) -> bool:
    """Let this process take `nbytes` more than it has; False if this machine does not allow it.

    Whoever takes more loses page cache, or is killed where there is none to lose. It ends with the process, but for an
    empty group: see `remove_group`.
    """
    group, limit = _group(os.getpid())
    try:
        group.mkdir()
    except OSError:
        return False
    try:
        (group / limit).write_text(str(nbytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        group.rmdir()
        return False
    return True


def remove_group(process: int) -> None:
    """Remove the group of a process that has ended, if it had one."""
    group, _ = _group(process)
    if group.exists():
        group.rmdir()


def _group(process: int) -> tuple[Path, str]:
    """Its folder, and the name of the file for the limit."""
    v1 = (V1 / "memory.limit_in_bytes").exists()
    name = f"kvstore-benchmark-{process}"
    return (V1 / name, "memory.limit_in_bytes") if v1 else (V2 / name, "memory.max")
