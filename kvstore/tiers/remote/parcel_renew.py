"""Writes parcels anew in which records live shorter than their blocks do here; what else is in them stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.core.explanation import Reason
from kvstore.core.record import DamagedRecord, parse
from kvstore.metrics import Metric
from kvstore.tiers.host import HostRecord
from kvstore.tiers.remote.lives import end_of, outlives
from kvstore.tiers.remote.names import parcel_of
from kvstore.tiers.remote.parcel import ParcelHead
from kvstore.tiers.remote.parcels import Parcels

Take = Callable[[bytes], tuple[HostRecord, float | None] | None]
"""Gives the record of a block, by its key, and how long it is of use, None for ever; None if it cannot be had now."""


@dataclass(frozen=True)
class ParcelRenewal:
    """For one thread.

    Attributes:
        send: writes a profile that a record needs; returns whether it is there.
        ttl_s: what a server is told of a life, None for ever.
    """

    parcels: Parcels
    send: Callable[[bytes], bool]
    ttl_s: Callable[[float | None], float | None]

    def run(self, first: bytes, expiries: Mapping[bytes, float], take: Take) -> Sequence[bytes]:
        """Read the parcel that begins with a block, and write it anew, as a whole, with records from here in place of
        those that live shorter, or are damaged. The others stay as they lie there, also those of blocks that only other
        stores have.

        Args:
            expiries: when the lives of blocks end here, 0 for never, by their keys.

        Returns:
            The keys of the blocks in it, as far as that could be read.
        """
        parcels, name = self.parcels, self.parcels.names.block(parcel_of(first))
        head = parcels.head(first, self._deadline())
        if isinstance(head, Reason):
            return ()
        data = memoryview(bytearray(head.nbytes))
        if parcels.calls.read_part(name, parcels.head_bytes, [data], self._deadline()) != head.nbytes:
            return head.keys
        parts, sizes, lives, new = list[memoryview | bytes](), list[int](), list[float](), list[HostRecord]()
        for key, offset, nbytes in zip(head.keys, head.offsets, head.sizes, strict=True):
            old = data[offset : offset + nbytes]
            life = self._life(key, old)
            taken = take(key) if self._is_outlived(key, life, expiries) else None
            if taken is not None and self.send(taken[0].header.profile):
                new.append(taken[0])
                life = end_of(taken[1])
                here = parcels.sealed(parcels.names.block(key), taken[0].data)
            else:
                here = [old]
            parts += here
            sizes.append(sum(memoryview(part).nbytes for part in here))
            lives.append(life or 0.0)
        if new and not self._write(name, ParcelHead(head.keys, tuple(sizes)), parts, lives):
            return head.keys
        for key, life in zip(head.keys, lives, strict=True):
            parcels.lives.note(key, life)
        parcels.metrics.add(Metric.REMOTE_REPLACED, len(new))
        parcels.metrics.add(Metric.REMOTE_WRITTEN_RECORDS, len(new))
        parcels.metrics.add(Metric.REMOTE_WRITTEN_BYTES, sum(record.header.record_bytes for record in new))
        return head.keys

    def _write(self, name: str, head: ParcelHead, parts: list[memoryview | bytes], lives: list[float]) -> bool:
        longest = None if 0.0 in lives else max(1.0, max(lives) - time.time())
        whole = [*self.parcels.sealed(name, head.pack()), *parts]
        if not self.parcels.calls.put(name, whole, self.ttl_s(longest), over=True):
            return False
        self.parcels.metrics.add(Metric.REMOTE_WRITTEN_PARCELS)
        self.parcels.wrote(head)
        return True

    def _is_outlived(self, key: bytes, life: float | None, expiries: Mapping[bytes, float]) -> bool:
        """Whether the record of a block, whose life ends then, is to be replaced; None: it is damaged."""
        return key in expiries and (life is None or outlives(expiries[key], life, time.time()))

    def _life(self, key: bytes, data: memoryview) -> float | None:
        """When the life of a record ends, as it lies there; None if it is damaged."""
        try:
            sealer = self.parcels.sealer
            plain = data if sealer is None else sealer.opened(self.parcels.names.block(key), data)
            header = parse(memoryview(plain), len(plain))
        except DamagedRecord:
            return None
        return header.expiry if header.key == key else None

    def _deadline(self) -> float:
        return self.parcels.clock() + self.parcels.write_timeout_s
