"""What an operator, or a copy, opens a store with."""

from __future__ import annotations

from dataclasses import replace

from kvstore.config import MIB, StoreConfig, TierConfig
from kvstore.stored import stored_bytes

PATIENCE_S = 3600.0
"""Seconds that a copy waits for a slow disk rather than to drop blocks."""
READING = StoreConfig(host=TierConfig(0), donors=False)
"""What an operator reads a store with: no memory for a host tier, and no index for donors."""


def writing_config(path: str, room: int = 0, base: StoreConfig | None = None) -> StoreConfig:
    """Return settings with which a store can be opened for writing and nothing is evicted for the budget.

    Args:
        path: of the store.
        room: bytes that are to be added.
        base: the settings of everything else.
    """
    base = base or StoreConfig(learn="off")
    needed = stored_bytes(path) + 2 * room + 8 * base.segment_bytes + 64 * MIB
    return replace(
        base, disk=replace(base.disk, bytes=max(base.disk.bytes, needed)), put_timeout_s=PATIENCE_S, host=TierConfig(0)
    )
