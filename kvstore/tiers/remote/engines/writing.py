"""What engines do around a write, whatever they write to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.keys import check_keys
from kvstore.tiers.remote.values import byte_views


def counted_put(
    counts: Counts,
    key: str,
    parts: Sequence[memoryview | bytes],
    max_value_bytes: int,
    timeout_s: float,
    write: Callable[[list[memoryview], Deadline], bool],
) -> bool:
    """Write a value by `write`, and count the call and the bytes; see `RemoteEngine.put`.

    Args:
        write: takes the parts that have any bytes, and until when it may take; returns whether it stored them.
    """
    check_keys(key)
    with counts.call():
        deadline = Deadline(timeout_s)
        views, size = byte_views(parts, max_value_bytes)
        stored = write(views, deadline)
        counts.add(bytes_written=size * stored)
        return stored
