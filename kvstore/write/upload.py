"""Writes records to the remote tier in the background, parents before children, each at most once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvstore.core.keys import chain_keys
from kvstore.core.record import RecordHeader
from kvstore.core.waiting import Bell
from kvstore.core.workers import Workers
from kvstore.metrics import Metric
from kvstore.read.lookup import Lookup
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.remote.lives import outlives
from kvstore.tiers.remote.tier import RemoteTier
from kvstore.write.leaving import LeavingRecord, LeavingRecords
from kvstore.write.portable import PortableRecords
from kvstore.write.upload_parcels import ParcelUpload
from kvstore.write.upload_places import PlaceUpload

_Prefix = tuple[int, int]  # number of the last record, and where the prefix ends in it; 0: where the record does
_LOOK_S = 0.2  # a server that was down, and a block that was not written yet, are looked at again
_MOST_SENT = 1 << 20
_SENT_S = 900.0  # so long a server is taken to keep what it has; whoever puts or uses it then looks again


class Uploader:
    """A bounded queue of prefixes, and the thread that writes what the remote tier lacks of them. Thread-safe.

    A prefix is named by the last of its records, and where places are written by where it ends in that, too. Nothing of
    it is held in memory: it is read when its turn comes. What left the store by then is counted. `_lock` guards `_due`,
    `_busy`, `_is_leaving` and `_bytes`.

    Args:
        portable: gives the bytes of a record.
        root: gives the key before the first block of a namespace.
        block_bytes: raw bytes of a block, which the queue counts with.
        leaving: the records that the disk gave up.
        lookup: of a layout with windows or states, whose places are written; None of any other.
    """

    def __init__(
        self,
        residency: Residency,
        tier: RemoteTier,
        portable: PortableRecords,
        root: Callable[[bytes], bytes],
        block_bytes: int,
        leaving: LeavingRecords,
        lookup: Lookup | None = None,
    ) -> None:
        self._residency = residency
        self._tier = tier
        self._portable = portable
        self._root = root
        self._block_bytes = block_bytes
        self._leaving = leaving
        self._due: OrderedDict[_Prefix, int] = OrderedDict()  # bytes of what may be missing
        self._bytes = 0
        self._busy: _Prefix | None = None
        self._is_leaving = False  # a record that the disk gave up is being written
        # What is there, until when that need not be looked at, and when the life of a record ended that was written;
        # replaced as a whole if there is too much.
        self._sent: dict[int, dict[int, tuple[float, float]]] = {}  # by record and end
        self._sent_s = min(tier.config.ttl_s / 2 or _SENT_S, _SENT_S)
        self._closing = False
        self._places = None
        if lookup is not None:
            layout = lookup.layout
            self._places = PlaceUpload(residency, tier, portable, lookup, layout, lambda: self._closing)
        self._parcels = ParcelUpload(
            residency, tier, portable, root, lambda: self._closing, lambda records, keys: self.there(records, keys=keys)
        )
        self._lock = threading.Lock()
        self._changed = Bell()
        self._worker = Workers(1, "kvstore-upload")
        self._worker.start(self._run)

    # ---- what is due ---------------------------------------------------------------------------------------------

    def due(self, records: Sequence[int], end: int = 0) -> None:
        """Write the records of a prefix, root first, as far as they are not there; return at once.

        end: where the prefix ends in the last record, which counts only where places are written; 0: where that does.
        """
        if self._places is None:
            end = 0
        asked = records if self._places is None else records[-1:]  # what lies before a place may be there without it
        new = [record for record in asked if record and not self._is_sent(record, end)]
        if not new or self._closing:
            return
        nbytes, prefix = len(new) * self._block_bytes, (new[-1], end)
        with self._lock:
            if prefix in self._due:  # one that is being written may have passed what changed since
                return
            fits = not self._due or self._bytes + nbytes <= self._tier.config.queue_bytes
            if fits:
                self._due[prefix] = nbytes
                self._bytes += nbytes
        if not fits:
            self._residency.metrics.add(Metric.DROPPED_REMOTE_QUEUE, len(new))
        self._changed.ring()

    def written(self, blocks: Sequence[Block]) -> None:
        """The blocks of a put are written: all of them are due."""
        if blocks:
            self.due([block.record for block in blocks], blocks[-1].end)

    def evicted(self, entries: Sequence[Entry]) -> None:
        """The disk gives up records: they are due, and read now."""
        for entry in entries:
            if not self._closing and self._leaving.take(entry):
                self._changed.ring()

    def there(self, records: Sequence[int], end: int = 0, keys: Sequence[bytes] = ()) -> None:
        """These records are in the remote tier.

        Args:
            end: as in `due`.
            keys: what they go by there, as many; none: they came from there, and live as long.
        """
        if len(self._sent) > _MOST_SENT:
            self._sent = {}
        known = [self._tier.life(key) for key in keys] or [None] * len(records)
        rows = list(zip(records, known, strict=True))
        for record, life in rows if self._places is None else rows[-1:]:
            expiry, for_s = self._residency.expiry(record) if life is None else life, self._sent_s
            if expiry:
                for_s = min(for_s, max(0.0, expiry - time.time()) / 2)
            here = self._tier.clock() + for_s, expiry
            self._sent[record] = {0: here} if self._places is None else {**self._sent.get(record, {}), end: here}

    def _is_sent(self, record: int, end: int) -> bool:
        until, expiry = self._sent.get(record, {}).get(end, (0.0, 0.0))
        return until > self._tier.clock() and not outlives(self._residency.expiry(record), expiry, time.time())

    def forget(self, record: int) -> None:
        """A record left the store."""
        self._sent.pop(record, None)

    @property
    def waiting(self) -> int:
        """How many prefixes, and records that the disk gave up, are due."""
        with self._lock:
            return len(self._due) + (self._busy is not None) + len(self._leaving)

    def stats(self) -> dict[str, float]:
        """Return plain numbers: what is due, and how many records are known to be there."""
        return {"due": self.waiting, "due_bytes": self._bytes + self._leaving.nbytes}

    def flush(self, timeout_s: float) -> int:
        """Wait until nothing is due any more, the server cannot be written to, or time is over; return how many
        prefixes are still due."""
        self._changed.ring()
        self._changed.wait_for(lambda: not self.waiting or not self._tier.takes_writes, timeout_s)
        return self.waiting

    def erase(self, keys: Iterable[bytes], namespace: bytes | None) -> list[RecordHeader]:
        """Give up what the disk gave up of erased blocks: see `LeavingRecords.erase`."""
        return self._leaving.erase(keys, namespace)

    def settle(self) -> bool:
        """Return when what is being written is; what is due and not begun is not waited for. False if that takes too
        long."""
        self._changed.wait_for(lambda: self._is_idle or self._closing, self._tier.config.write_timeout_s)
        return self._is_idle

    @property
    def _is_idle(self) -> bool:
        with self._lock:
            return self._busy is None and not self._is_leaving

    def close(self, timeout_s: float) -> None:
        """Write what is due, as long as that takes no longer; then end the thread. Idempotent."""
        if not self._closing:
            left = self.flush(timeout_s)
            self._closing = True
            self._residency.metrics.add(Metric.DROPPED_REMOTE_CLOSE, left)
        self._changed.ring()
        self._worker.close(timeout_s=self._tier.config.write_timeout_s)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            if not (self._has_work and self._tier.takes_writes):
                self._changed.wait_for(lambda: self._closing or (self._has_work and self._tier.takes_writes), _LOOK_S)
                continue
            if len(self._leaving) and not self._leave():
                self._changed.wait_for(lambda: self._closing, _LOOK_S)
            if not self._due:
                self._changed.ring()
                continue
            with self._lock:
                prefix, nbytes = self._due.popitem(last=False)
                self._busy = prefix
            try:
                done = self._upload(*prefix)
            except Exception as error:  # nothing may end this thread
                self._residency.metrics.add(Metric.DROPPED_REMOTE_ERROR, because=error)
                done = True
            with self._lock:
                self._busy = None
                if done or prefix in self._due:
                    self._bytes -= nbytes
                else:
                    self._due[prefix] = nbytes
            self._changed.ring()
            if not done:
                self._changed.wait_for(lambda: self._closing, _LOOK_S)

    @property
    def _has_work(self) -> bool:
        return bool(self._due or len(self._leaving))

    def _leave(self) -> bool:
        """Write some records that the disk gave up; False to try again later."""
        with self._lock:
            self._is_leaving = True  # first: an erase takes out of the queue what is not begun, and waits for what is
        chain = self._leaving.next()
        try:
            return not chain or self._write_leaving(chain)
        except Exception as error:  # nothing may end this thread
            self._residency.metrics.add(Metric.DROPPED_REMOTE_ERROR, len(chain), because=error)
            for each in chain:
                self._leaving.done(each)
            return True
        finally:
            with self._lock:
                self._is_leaving = False

    def _write_leaving(self, chain: Sequence[LeavingRecord]) -> bool:
        """Write records that the disk gave up, after what stands before them; False to try again later."""
        if self._places is not None:
            if not self._places.leave(chain, self._leaving.may_come):
                return False
            self._leaving.done(chain[-1])  # those before it may be waited for by others
            return True
        if self._tier.group > 1:
            return self._parcels.leave(chain, self._leaving)
        first = chain[0].record.header
        if first.start and self._tier.absent([first.parent]) != [] and chain[0].parent in self._residency.index:
            self._upload(chain[0].parent, 0)
        headers = [leaving.record.header for leaving in chain]
        keys = [header.key for header in headers]
        suspects = set(self._tier.suspects(keys, [header.expiry for header in headers], keys))
        for i, leaving in enumerate(chain):
            header = leaving.record.header
            absent = self._tier.absent([header.key] if not header.start else [header.parent, header.key])
            if absent is None:
                return False
            if header.parent in absent:
                if self._leaving.may_come(header.key):
                    return False  # what it follows may be leaving, too, and not be read yet
                self._residency.metrics.add(Metric.DROPPED_REMOTE_LEFT, len(chain) - i)
                for each in chain[i:]:
                    self._leaving.done(each)
                return True
            over = not absent and header.key in suspects and self._tier.is_outlived(header.key, header.expiry)
            if (absent or over) and not self._tier.write(
                header.key, leaving.record.data, header.profile, leaving.life_s, over
            ):
                if not self._tier.takes_writes:
                    return False
                self._residency.metrics.add(Metric.DROPPED_REMOTE_ERROR)
            self._leaving.done(leaving)
        return True

    def _upload(self, last: int, end: int) -> bool:
        """Write what is missing of a prefix; False if that is to be tried again later."""
        if self._places is not None:
            return self._places.upload(last, end, lambda key: self.there([last], end, [key]))
        residency, size = self._residency, self._residency.config.block_tokens
        path = residency.whole_path(last)
        if path is None:
            residency.metrics.add(Metric.DROPPED_REMOTE_LEFT)
            return True
        namespace, tokens = path
        tokens = tokens[: len(tokens) // size * size]  # a tail is replaced by what follows it
        if not len(tokens):
            return True
        records = residency.index.match(namespace, tokens, touch=False).records.tolist()[: len(tokens) // size]
        keys = [self._root(namespace), *chain_keys(self._root(namespace), tokens, size)]
        if self._tier.group > 1:
            return self._parcels.upload(records, keys[: len(records) + 1])
        missing = self._tier.absent(keys[1 : len(records) + 1])
        if missing is None:
            return False
        absent = set(missing)
        here = keys[1 : len(records) + 1]
        expiries = [residency.expiry(record) for record in records]
        suspects = set(self._tier.suspects(here, expiries, set(here) - absent))
        self._tier.renew([key for key in keys[1 : len(records) + 1] if key not in absent])
        for i, record in enumerate(records):
            key, is_there = keys[i + 1], keys[i + 1] not in absent
            over = is_there and key in suspects and self._tier.is_outlived(key, expiries[i])
            if is_there and not over:
                self.there([record], keys=[key])
            elif self._closing:
                return True
            elif not record or residency.is_expired(record):
                residency.metrics.add(Metric.DROPPED_REMOTE_LEFT, len(records) - i)
                return True
            elif residency.queued(record) is not None:
                return False  # not written yet
            else:
                written = self._write(record, keys[i], key, over)
                if written is None:
                    residency.metrics.add(Metric.DROPPED_REMOTE_LEFT, len(records) - i)
                    return True
                if not written:
                    if not self._tier.takes_writes:
                        return False
                    residency.metrics.add(Metric.DROPPED_REMOTE_ERROR, len(records) - i)
                    return True
                self.there([record], keys=[key])
        return True

    def _write(self, record: int, parent_key: bytes, key: bytes, over: bool) -> bool | None:
        found = self._portable(record, parent_key)
        if found is None:
            return None
        whole = found.record
        return self._tier.write(key, whole.data, whole.header.profile, found.life_s, over)
