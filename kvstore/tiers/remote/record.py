"""A record that came from the remote tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.tiers.host import HostRecord

TIER = "remote"


@dataclass(frozen=True)
class RemoteRecord(HostRecord):
    """A whole record in a buffer, checked as one from disk is. Immutable.

    Its header is another store's: number and flags mean nothing here.

    Example:
        See `HostRecord`.
    """

    @property
    def tier(self) -> str:
        return TIER
