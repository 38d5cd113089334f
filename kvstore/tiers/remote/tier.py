"""The remote tier: records that stores of one identity share, read within a deadline, written in the background.

It is no `StorageTier`. That one is asked by record number, for blocks that the index knows; the remote tier is asked by
key, for blocks that this store has never seen, and may take its time. So a get looks there itself (`read.remote`), and
what it brings goes on as records in memory, checked before anybody sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvstore.core.explanation import Reason
from kvstore.core.workers import Task, Workers
from kvstore.metrics import Metric, Metrics
from kvstore.remote_config import RemoteConfig
from kvstore.tiers.buffers import BufferPool
from kvstore.tiers.remote.beliefs import Beliefs
from kvstore.tiers.remote.calls import RemoteCalls
from kvstore.tiers.remote.fetching import Check, Fetched, RemoteFetcher
from kvstore.tiers.remote.link import RemoteLink
from kvstore.tiers.remote.listing import Listing
from kvstore.tiers.remote.lives import Lives, end_of, outlives
from kvstore.tiers.remote.names import RemoteNames, parcel_of
from kvstore.tiers.remote.parcel import ParcelHead, group_of
from kvstore.tiers.remote.parcel_erase import ParcelErasure
from kvstore.tiers.remote.parcel_renew import ParcelRenewal, Take
from kvstore.tiers.remote.parcels import Parcels
from kvstore.tiers.remote.profiles import RemoteProfiles
from kvstore.tiers.remote.record import TIER
from kvstore.tiers.remote.sealing import Sealer
from kvstore.tiers.remote.search import leading
from kvstore.tiers.remote.spots import Spots

_CLOSING_S = 1.0  # see `RemoteLink`
_SEAL_BYTES = 1 << 10  # more than sealing adds


class RemoteTier:
    """Reads and writes the values of one identity. Thread-safe. No call raises what a server does wrong.

    Args:
        most_bytes: of a record; a larger one is a miss.
        block_bytes: raw bytes of a block, which say how many make a parcel; 0: no blocks are put together.
        sealer: seals values; None: they are records as they are.
        beliefs: which blocks are there, where others note that, too.
        listing: which are not; None: each is asked for.

    Attributes:
        config: the settings.
        profiles: what records are coded with.
        beliefs: which values are there, by what they go by.
        listing: which were not there when they were listed; None where that is not done.
    """

    def __init__(
        self,
        config: RemoteConfig,
        names: RemoteNames,
        link: RemoteLink,
        metrics: Metrics,
        pool: BufferPool,
        profiles: RemoteProfiles,
        most_bytes: int,
        sealer: Sealer | None = None,
        clock: Callable[[], float] = time.monotonic,
        beliefs: Beliefs | None = None,
        listing: Listing | None = None,
        block_bytes: int = 0,
    ) -> None:
        self.config = config
        self.profiles = profiles
        self.beliefs = Beliefs(config.belief_s, config.miss_s, clock) if beliefs is None else beliefs
        self.clock = clock
        self._fresh = Beliefs(config.ttl_s / 2, 0.0, clock)  # whose life was renewed not long ago
        self._names = names
        self._link = link
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._sealer = sealer
        self.listing = listing
        self._block_bytes = block_bytes
        self._calls = RemoteCalls(link, metrics, config.write_timeout_s, clock)
        self._workers = Workers(config.in_flight, "kvstore-remote")
        self._lives = Lives()
        self._parcels = Parcels(
            self._calls,
            names,
            metrics,
            self.beliefs,
            listing,
            Spots(config.belief_s, clock),
            self._exist,
            self._workers,
            self._lives,
            most_bytes,
            sealer,
            config.write_timeout_s,
            clock,
        )
        self._fetcher = RemoteFetcher(
            self._calls, names, metrics, pool, self._workers, profiles, self._parcels, self._lives, sealer, clock
        )

    @property
    def name(self) -> str:
        """What metrics and hits call the tier."""
        return TIER

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """How many blocks may make one parcel; 1: each is a value of its own."""
        engine = self._link.engine()
        return 1 if engine is None or not self._block_bytes else group_of(engine.limits.parcel_bytes, self._block_bytes)

    def leading(self, keys: Sequence[bytes], deadline: float, first: int = 0) -> int:
        """Return how many blocks of a sequence seem to be there without a gap, from block `first` on.

        Args:
            keys: of all blocks, from the beginning of the sequence on.
            deadline: by `clock`; what is not known by then does not count.
        """
        if not self._link.is_up("read"):
            self._metrics.add(Metric.REMOTE_SKIPPED, len(keys) - first)
            return 0
        if self.group > 1:
            border = first - first % self.group
            return self._parcels.locate(keys[border:], border, self.group, deadline, self._batch, first - border)[0]
        return leading(keys[first:], self._believed, lambda asked: self._exist(asked, deadline), self._batch)

    @property
    def _batch(self) -> int:
        engine = self._link.engine()
        return engine.limits.exist_batch if engine is not None else 1

    def there(self, keys: Sequence[bytes], deadline: float, sure: bool = False) -> list[bool | None]:
        """Return for each key whether its value seems to be there, asking for all that is not known at once; None where
        that cannot be known in time. sure: ask also for what is believed not to be there."""
        known = [(self.beliefs.of(key) or None) if sure else self._believed(key) for key in keys]
        unknown = [key for key, there in zip(keys, known, strict=True) if there is None]
        if not unknown:
            return known
        if not self._link.is_up("read"):
            self._metrics.add(Metric.REMOTE_SKIPPED, len(unknown))
            return known
        asked = iter(self._exist(unknown, deadline))
        return [next(asked) if there is None else there for there in known]

    def _believed(self, key: bytes) -> bool | None:
        """Whether a value is there, if that need not be asked."""
        known = self.beliefs.of(key)
        if known is None and self.listing is not None and self.listing.lacks(key):
            self._metrics.add(Metric.REMOTE_UNLISTED)
            return False
        return known

    def lost(self, keys: Sequence[bytes]) -> None:
        """The first of these keys, which follow each other, turned out not to be there: nothing is believed any more of
        those behind it."""
        self.beliefs.lost(keys)
        self._parcels.lost(keys)

    def fetch(
        self, keys: Sequence[bytes], deadline: float, checks: Sequence[Check], more_bytes: int = 0
    ) -> list[Task[Fetched]]:
        """Begin to read the values of some keys, and return a task for each, in order. They never raise.

        more_bytes: so much larger than others the values may be.
        """
        return self._fetcher.fetch(keys, deadline, checks, self._most_bytes + more_bytes)

    def read(self, key: bytes, most_bytes: int, deadline: float) -> bytes | Reason:
        """Return a small value that is no record; or why it does not come."""
        return self._fetcher.read(key, most_bytes + _SEAL_BYTES, deadline)

    def _exist(self, keys: Sequence[bytes], deadline: float) -> list[bool | None]:
        """Whether each is there; None where that cannot be known in time. One call for each server."""
        engine = self._link.engine()
        if engine is None:
            return [None] * len(keys)
        names = [self._names.block(key) for key in keys]
        groups: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(engine.endpoint(name), []).append(i)
        tasks = [(which, Task(self._calls.exist, [names[i] for i in which], deadline)) for which in groups.values()]
        for _, task in tasks:
            self._workers.start(task)
        found: list[bool | None] = [None] * len(keys)
        for which, task in tasks:
            if not task.is_done(max(0.0, deadline - self.clock())):
                task.cancel()
                continue
            for i, answer in zip(which, task.result(), strict=True):
                found[i] = answer
        for there in (True, False):
            self.beliefs.note([key for key, answer in zip(keys, found, strict=True) if answer is there], there)
        return found

    # ---- writing: for one thread ---------------------------------------------------------------------------------

    def absent(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """Return those of the keys that are not known to be there, asking for all of them at once; None if the servers
        may not be asked now."""
        unknown = [key for key in keys if self.beliefs.of(key) is not True]
        if not unknown:
            return []
        found = self._exist(unknown, self.clock() + self.config.write_timeout_s)
        if None in found:
            return None
        return [key for key, there in zip(unknown, found, strict=True) if not there]

    def write(
        self, key: bytes, record: memoryview, profile: bytes, life_s: float | None = None, over: bool = False
    ) -> bool:
        """Write a record, unless there is one; return whether it is there now. What fails is counted.

        Args:
            profile: what it needs; it is written first.
            life_s: how long it is of use; None: for ever.
            over: it takes the place of one that is there.
        """
        if not self.profiles.send(profile):
            return False
        new = self._put(self._names.block(key), record, self._ttl_s(life_s), over)
        self._metrics.add(Metric.REMOTE_REPLACED, int(over and bool(new)))
        if new:
            self._lives.note(key, end_of(life_s))
        if self.listing is not None:
            self.listing.add([key])  # after: one that began meanwhile may have passed it. It may be there if it failed
        if new is None:
            return False
        self.beliefs.note([key], True)
        self._fresh.note([key], True)
        return True

    def _ttl_s(self, life_s: float | None) -> float | None:
        return min((seconds for seconds in (self.config.ttl_s or None, life_s) if seconds is not None), default=None)

    def held(self, keys: Sequence[bytes], first: int) -> int | None:
        """Return how many of the first of these blocks, which follow each other, are known to be there, asking for what
        is not known; None if the servers may not be asked now. Of an engine with parcels.

        first: number of the first block in its sequence.
        """
        deadline = self.clock() + self.config.write_timeout_s
        count, is_sure = self._parcels.locate(keys, first, self.group, deadline, self._batch)
        return count if is_sure else None

    def has(self, key: bytes) -> bool:
        """Return whether a block is believed to be there; asks nobody."""
        return self._parcels.has(key)

    def holds(self, key: bytes) -> bool | None:
        """Return whether a block is there, asking the server; None if it may not be asked now. One in a parcel of which
        this store never heard is not found."""
        spot = self._parcels.spots.last(key)
        head: ParcelHead | Reason = Reason.REMOTE_GONE
        if spot is not None:
            head = self._parcels.head(spot.parcel, self.clock() + self.config.write_timeout_s)
        if isinstance(head, ParcelHead) and key in head.keys:
            return True
        if head in (Reason.REMOTE_LATE, Reason.REMOTE_FAILED):
            return None
        absent = self.absent([key])
        return None if absent is None else not absent

    def write_parcel(
        self,
        keys: Sequence[bytes],
        records: Sequence[memoryview],
        profiles: Sequence[bytes],
        lives_s: Sequence[float | None],
    ) -> int:
        """Write records of blocks of one group, which follow each other, as one parcel; return how many of the first
        are there now, 0 if that failed. See `write`."""
        if not all(map(self.profiles.send, dict.fromkeys(profiles))):
            return 0
        lives = [life_s for life_s in lives_s if life_s is not None]
        longest = max(lives) if len(lives) == len(lives_s) else None
        done = self._parcels.write(keys, records, self._ttl_s(longest), list(map(end_of, lives_s)))
        if done == 0:  # what has its name is no parcel: the block comes as a value of its own
            return int(self.write(keys[0], records[0], profiles[0], lives_s[0]))
        self._fresh.note(keys[: done or 0], True)
        return done or 0

    def renew(self, keys: Sequence[bytes]) -> None:
        """Let values that were used live on, unless that was done not long ago."""
        engine, ttl_s = self._link.engine(), self.config.ttl_s
        old = [key for key in keys if self._fresh.of(key) is None]
        if not old or engine is None or not ttl_s or not self.takes_writes:
            return
        if not (engine.limits.has_ttl or engine.limits.keeps_use):
            return
        self._fresh.note(old, True)  # also where it fails: it is tried again after as long
        groups: dict[str, list[str]] = {}
        for name in dict.fromkeys(map(self._value_of, old)):
            groups.setdefault(engine.endpoint(name), []).append(name)
        for names in groups.values():
            if self._calls.touch(names, ttl_s):
                self._metrics.add(Metric.REMOTE_TOUCHED, len(names))

    def _value_of(self, key: bytes) -> str:
        """The name of the value that has a block."""
        spot = self._parcels.spots.last(key)
        return self._names.block(key if spot is None else parcel_of(spot.parcel))

    def renew_soon(self, keys: Sequence[bytes], profiles: Iterable[bytes]) -> None:
        """What `renew` does, on a thread of the tier; profiles that are needed with the values are written, too, if
        they are not there any more."""
        if self.config.read_only:
            return
        if self.config.ttl_s and any(self._fresh.of(key) is None for key in keys):
            self._workers.start(Task(self.renew, keys))
        for profile in self.profiles.unseen(profiles) if self.takes_writes else ():
            self._workers.start(Task(self.profiles.send, profile))

    def recall_soon(self, key: bytes, most_bytes: int) -> None:
        """Read a small value that was only asked for, on a thread of the tier: a server that gives up what was not read
        for long knows nothing of that."""
        deadline = self.clock() + self.config.write_timeout_s
        self._workers.start(Task(self.read, key, most_bytes, deadline))

    def suspects(self, keys: Sequence[bytes], expiries: Sequence[float], there: Iterable[bytes]) -> list[bytes]:
        """Return the keys of values that may live so much shorter than their blocks here that they are to be replaced,
        which `is_outlived` finds out. Asks nobody.

        They are those that are known to, and those of which nothing is known, if their blocks have a `ttl` or others of
        the sequence are known to; of such in one parcel the last stands for all.

        Args:
            keys: of blocks that follow each other.
            expiries: when their lives end here, 0 for never.
            there: those of which values are there.
        """
        now, there = time.time(), frozenset(there)
        lives = [self._lives.of(key) for key in keys]
        known = [life is not None and outlives(expiry, life, now) for life, expiry in zip(lives, expiries, strict=True)]
        met, found = any(known), list[bytes]()
        for i, (key, expiry) in enumerate(zip(keys, expiries, strict=True)):
            asks = lives[i] is None and key in there and (expiry != 0.0 or met)
            if known[i] or (asks and not self._is_inside(keys, i)):
                found.append(key)
        return found

    def _is_inside(self, keys: Sequence[bytes], i: int) -> bool:
        """Whether the block behind this one lies in the same parcel, and lives no longer."""
        spot, after = (self._parcels.spots.last(key) for key in (keys[i], keys[min(i + 1, len(keys) - 1)]))
        return i + 1 < len(keys) and spot is not None and after is not None and spot.parcel == after.parcel

    def is_outlived(self, key: bytes, expiry: float) -> bool:
        """Read the value of a block; return whether it lives so much shorter than the block here that it is to be
        replaced. expiry: when the life of that ends, 0 for never."""
        life = self._fetcher.life(key, self.clock() + self.config.write_timeout_s, self._most_bytes)
        return life is not None and outlives(expiry, life, time.time())

    def life(self, key: bytes) -> float | None:
        """Return when the life of a value ends, 0 for never; None if that is not known. Asks nobody."""
        return self._lives.of(key)

    def renew_parcel(self, key: bytes, expiries: Mapping[bytes, float], take: Take) -> Sequence[bytes]:
        """Write the parcel that has a block anew, if one has it, and return what it holds; see `ParcelRenewal`."""
        spot = self._parcels.spots.last(key)
        if spot is None:
            return ()
        return ParcelRenewal(self._parcels, self.profiles.send, self._ttl_s).run(spot.parcel, expiries, take)

    def is_in_parcel(self, key: bytes) -> bool:
        """Return whether a block lay in a parcel when that was read last."""
        return self._parcels.spots.last(key) is not None

    def delete(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Remove records; return how many were removed, and of how many that is not known."""
        engine = self._link.engine()
        if engine is None or not keys:
            return 0, len(keys)
        removed = left = 0
        groups: dict[str, list[bytes]] = {}
        for key in keys:
            groups.setdefault(engine.endpoint(self._names.block(key)), []).append(key)
        for group in groups.values():
            for start in range(0, len(group), engine.limits.exist_batch):
                part = group[start : start + engine.limits.exist_batch]
                done = self._calls.delete([self._names.block(key) for key in part])
                if done is None:
                    left += len(part)
                    continue
                removed += done
                self.beliefs.note(part, False)
        self._metrics.add(Metric.REMOTE_ERASED, removed)
        return removed, left

    def erase(self, keys: Sequence[bytes], before: Sequence[bytes]) -> tuple[int, int]:
        """Remove blocks, wherever they lie; return how many were removed, and of how many that is not known.

        before: blocks that stay, of the groups of those that go.
        """
        if self.group == 1:
            return self.delete(keys)
        erasure = ParcelErasure(self._parcels, frozenset(keys), self._batch, self._ttl_s(None))
        return erasure.run(before)

    def _put(self, name: str, data: memoryview, ttl_s: float | None, over: bool) -> bool | None:
        """Write a value; return whether it was stored, None if that failed."""
        parts: Sequence[memoryview | bytes] = [data] if self._sealer is None else self._sealer.seal(name, data)
        new = self._calls.put(name, parts, ttl_s, over)
        if new:
            self._metrics.add(Metric.REMOTE_WRITTEN_RECORDS)
            self._metrics.add(Metric.REMOTE_WRITTEN_BYTES, len(data))
        elif new is not None:
            self._metrics.add(Metric.REMOTE_PRESENT)
        return new

    @property
    def takes_writes(self) -> bool:
        """Whether a server may be written to now."""
        return not self.config.read_only and self._link.is_up("write")

    # ---- the rest ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return plain numbers: what is believed, which breakers are open, and the counters of the engine."""
        listing = {} if self.listing is None else self.listing.stats()
        return {"believed": len(self.beliefs), **listing, **self._link.stats()}

    def close(self) -> None:
        """Close the engine, and end the threads that do not hang in it. Idempotent."""
        if self.listing is not None:
            self.listing.close()
        self._link.close()
        self._workers.close(cancel=True, timeout_s=_CLOSING_S)
        self.profiles.close()
