"""Records as another store can read them: whole blocks that stand alone, as they are on disk but for the padding."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from kvstore.codecs import KVView
from kvstore.core.keys import chain_key
from kvstore.core.layout import KVLayout
from kvstore.core.record import DamagedRecord, seal
from kvstore.core.tokens import Tokens
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.read.fetch import Fetcher
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.residency.whole_record import read_whole
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.codecs import NewCodecs
from kvstore.tiers.host import HostRecord
from kvstore.write.keep_places import room_for


@dataclass(frozen=True)
class Portable:
    """A record for other stores.

    Attributes:
        record: it, and the memory that it is in.
        life_s: how long it is of use; None: for ever.
    """

    record: HostRecord
    life_s: float | None


@dataclass(frozen=True)
class PortableRecords:
    """Gives the bytes of stored records. Thread-safe: has no state of its own. What is coded against others is coded
    anew, standing alone, for numbers of donors mean nothing elsewhere."""

    residency: Residency
    fetcher: Fetcher
    pool: BufferPool
    layout: KVLayout
    codecs: NewCodecs

    def __call__(self, record: int, parent_key: bytes) -> Portable | None:
        """Return a record; None if it is gone, or cannot be read. parent_key: key of the block before it."""
        member = bool(self.residency.donors_of(record))
        found = self._alone(record, parent_key) if member else self._as_stored(record)
        if found is None:
            return None
        expiry = self.residency.expiry(record)
        if found.header.expiry != expiry:  # its life was extended since it was written
            found = self._with_expiry(found, expiry)
        return self._living(found)

    def beginning(self, record: int, parent_key: bytes, namespace: bytes, tokens: Tokens, cut: int) -> Portable | None:
        """Return the first tokens of a record, decoded and coded anew as a block of their own; None if it is gone, or
        cannot be read.

        Args:
            tokens: of the sequence, up to where the block is to end.
            cut: of that block.
        """
        found = self._recoded(record, parent_key, namespace, tokens, cut)
        if found is None:
            return None
        self.residency.metrics.add(Metric.REMOTE_RECODED_ENDS)
        return self._living(found)

    def _living(self, found: HostRecord) -> Portable:
        expiry = found.header.expiry
        return Portable(found, max(1.0, expiry - time.time()) if expiry else None)

    def _as_stored(self, record: int) -> HostRecord | None:
        disk, metrics = self.residency.disk, self.residency.metrics
        entry = disk.locate([record])[0] if disk is not None else None
        if disk is None or entry is None:
            return self.residency.host.get(record)
        try:
            found = read_whole(disk, self.pool, entry)
        except OSError as error:
            metrics.add(Metric.DISK_READ_ERRORS, because=error)
            return None
        except DamagedRecord as damage:
            return self._as_stored(record) if self.residency.reject(record, entry, damage.metric) else None
        finally:
            disk.release([entry])
        return None if found.header.donors else found

    def _alone(self, record: int, parent_key: bytes) -> HostRecord | None:
        """A member, decoded and coded anew."""
        path = self.residency.whole_path(record)
        found = None if path is None else self._recoded(record, parent_key, *path)
        if found is not None:
            self.residency.metrics.add(Metric.REMOTE_RECODED_MEMBERS)
        return found

    def _recoded(
        self, record: int, parent_key: bytes, namespace: bytes, tokens: Tokens, cut: int = 0
    ) -> HostRecord | None:
        """The last block of a sequence, which a record holds or begins with, decoded and coded anew, without states."""
        source = self.residency.find([record])[0]
        if source is None:
            return None
        size = self.residency.config.block_tokens
        start = (len(tokens) - 1) // size * size
        here = tokens[start:].copy()
        read = BlockRead(record, start, here, parent_key, source)
        view = self._room(start, len(here), cut)
        good, _ = self.fetcher.fetch([read], view, origin=start)
        if not good:
            return None
        before = self.residency.index.match(namespace, tokens[:start], touch=False).bits
        block = Block(
            record=record,
            parent=0,
            key=chain_key(parent_key, here),
            parent_key=parent_key,
            namespace=namespace,
            start=start,
            tokens=here,
            view=view,
            bits=max(0.0, self.residency.index.match(namespace, tokens, touch=False).bits - before),
            expiry=self.residency.expiry(record),
            pinned=False,
            alone=True,
            cut=cut,
        )
        return block.encode(self.codecs.disk, self.pool)

    def _room(self, start: int, count: int, cut: int) -> KVView:
        """Memory for what is decoded."""
        if self.layout.is_grouped:
            return room_for(self.layout, start, count, cut, self.pool)
        buffer = self.pool.take(count * self.layout.bytes_per_token)
        return KVView.packed(self.layout, count, buffer.address, buffer)

    def _with_expiry(self, found: HostRecord, expiry: float) -> HostRecord:
        header, buffer = replace(found.header, expiry=expiry), self.pool.take(found.header.record_bytes)
        buffer.view[:] = found.buffer.view[: len(buffer.view)]
        seal(header, buffer.view)
        return HostRecord(header, buffer)
