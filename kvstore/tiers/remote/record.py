"""A record that came from the remote tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.record import Damage, DamagedRecord
from kvstore.tiers.host import HostRecord

TIER = "remote"


class ExpiredRecord(DamagedRecord):
    """A record that is what was asked for, and past its time.

    Attributes:
        expiry: when its life ended, seconds since 1970.
    """

    def __init__(self, expiry: float) -> None:
        super().__init__(Damage.FIELD, "its time to live is over")
        self.expiry = expiry


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
