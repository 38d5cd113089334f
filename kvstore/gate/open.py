"""Opens what decides between loading and computing, with what the process before knew of this machine."""

from __future__ import annotations

import contextlib

from kvstore.config import StoreConfig
from kvstore.gate import saved
from kvstore.gate.gate import Gate
from kvstore.gate.load import LoadCost
from kvstore.metrics import Metrics
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.tier import DiskTier


def open_gate(
    opened: contextlib.ExitStack,
    path: str,
    config: StoreConfig,
    bytes_per_token: int,
    disk: DiskTier | None,
    metrics: Metrics,
    read_only: bool,
    fs: FileSystem,
) -> Gate:
    """Return the gate of a store at `path`. What it learns is saved there when `opened` ends, if there is a disk that
    may be written and has room."""
    gate = Gate(config.gate == "auto", LoadCost(bytes_per_token, config.threads), float(config.prefill_tokens_per_s))
    if disk is None:
        return gate
    known = saved.read(fs, path, metrics)
    if known is not None:
        gate.restore(known)

    def keep() -> None:
        estimates = gate.news()
        if estimates is not None and disk.has_room(saved.LIMIT):
            saved.write(fs, path, estimates, metrics)

    if not read_only:
        opened.callback(keep)
    return gate
