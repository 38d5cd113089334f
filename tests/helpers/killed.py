"""A child that tells what it does through a pipe, and is killed."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from teller import ACK
from trials import TIMEOUT_S


def child(work: Callable[[int], object], wanted: int | None, delay: float) -> list[tuple[bytes, int, int]]:
    """Forks a child that calls `work(pipe)` and then waits. Kills it `delay` seconds after it has told `wanted` things,
    or with None lets it kill itself. Returns what it told; fails where it hangs, or ends in another way."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            work(write)
            time.sleep(10 * TIMEOUT_S)
        finally:
            os._exit(1)
    os.close(write)
    data = b""
    while wanted is None or len(data) < wanted * ACK.size:
        if not select.select([read], [], [], TIMEOUT_S)[0]:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the child hangs")
        part = os.read(read, 4096)
        if not part:
            break
        data += part
    if wanted is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    while part := os.read(read, 65536):
        data += part
    os.close(read)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself, with status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return acks(data)


def acks(data: bytes) -> list[tuple[bytes, int, int]]:
    """What was told whole."""
    return list(ACK.iter_unpack(data[: len(data) // ACK.size * ACK.size]))
