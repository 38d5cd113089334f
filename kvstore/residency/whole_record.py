"""Reads one whole record from disk, checked, for what reads no prefix: donors, and learning."""

from __future__ import annotations

import numpy as np

from kvstore.core.keys import chain_key
from kvstore.core.record import Damage, DamagedRecord, check_payload, parse
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.host import HostRecord


def read_whole(disk: DiskTier, pool: BufferPool, entry: Entry) -> HostRecord:
    """Return the record of a located entry.

    Raises:
        OSError: the disk cannot be read.
        DamagedRecord: the bytes are not the record that the entry names.
    """
    buffer: Buffer = pool.take(entry.extent.nbytes)
    disk.read([entry], [buffer])
    header = parse(buffer.view, len(buffer.view))
    check_payload(header, buffer.view)
    if chain_key(header.parent, header.tokens) != header.key or not np.array_equal(header.tokens, entry.tokens):
        raise DamagedRecord(Damage.KEY, "another block's record")
    return HostRecord(header, buffer)
