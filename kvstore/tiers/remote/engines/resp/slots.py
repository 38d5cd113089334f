"""Which node of a cluster has a key."""

from __future__ import annotations

import binascii

from kvstore.errors import RemoteGarbled
from kvstore.tiers.remote.engines.resp.address import Address
from kvstore.tiers.remote.engines.resp.replies import Reply

SLOTS = 16384
_MAX_NODES = 4096


def slot_of(key: str) -> int:
    """Return the slot of a key; keys here have no braces, so there are no hash tags.

    Example:
        >>> slot_of("123456789")
        12739
    """
    return binascii.crc_hqx(key.encode(), 0) % SLOTS


class SlotMap:
    """Slot -> the address of the node that takes its writes. Immutable but for `move`.

    Example:
        >>> SlotMap().owner("kvs1/a") is None
        True
    """

    def __init__(self) -> None:
        self._owners: list[Address | None] = [None] * SLOTS
        self._nodes: dict[Address, None] = {}  # in the order in which they came

    @classmethod
    def parse(cls, reply: Reply, asked: Address) -> SlotMap:
        """Read the reply to CLUSTER SLOTS of the node at `asked`. Raises `RemoteGarbled`."""
        if not isinstance(reply, list):
            raise RemoteGarbled(f"expected runs of slots, found {str(reply)[:60]}")
        found, left = cls(), SLOTS
        for run in reply:
            match run:
                case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                    0 <= first <= last < SLOTS and 0 < port < 1 << 16 and last - first < left  # not more than there are
                ):
                    left -= last + 1 - first
                    name = (host or b"").decode("ascii", "replace")
                    owner = Address(asked.host, port) if name in ("", "?") else Address.said(name, port)
                    found._owners[first : last + 1] = [owner] * (last + 1 - first)
                    found._nodes[owner] = None
                case _:
                    raise RemoteGarbled(f"expected a run of slots, found {str(run)[:60]}")
        if len(found._nodes) > _MAX_NODES:
            raise RemoteGarbled(f"a cluster of {len(found._nodes)} nodes")
        return found

    def owner(self, key: str) -> Address | None:
        """Return the node of a key, or None if no node has its slot."""
        return self._owners[slot_of(key)]

    def move(self, key: str, owner: Address) -> None:
        """Note that a key's slot is elsewhere now."""
        self._owners[slot_of(key)] = owner
        self._nodes[owner] = None

    def nodes(self) -> list[Address]:
        """Return every node that has slots, or had them when this map was made."""
        return list(self._nodes)
