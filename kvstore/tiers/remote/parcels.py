"""What the remote tier does with parcels: finds what they hold, reads parts of them, writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvstore.core.explanation import Reason
from kvstore.core.record import DamagedRecord
from kvstore.core.workers import Task, Workers
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.remote.beliefs import Beliefs
from kvstore.tiers.remote.calls import RemoteCalls
from kvstore.tiers.remote.listing import Listing
from kvstore.tiers.remote.lives import Lives
from kvstore.tiers.remote.locate import Asking, locate
from kvstore.tiers.remote.names import RemoteNames, parcel_of
from kvstore.tiers.remote.parcel import HEAD_BYTES, ParcelHead
from kvstore.tiers.remote.sealing import OVERHEAD, Sealer
from kvstore.tiers.remote.search import leading
from kvstore.tiers.remote.spots import Spots

Exist = Callable[[Sequence[bytes], float], Sequence[bool | None]]


@dataclass(frozen=True)
class Parcels:
    """Parcels of one identity. Thread-safe. No call raises what a server does wrong.

    Attributes:
        calls: to the server.
        beliefs: what goes by which bytes there: parcels by `parcel_of`, and blocks that are values of their own.
        listing: which were not there when they were listed; None where that is not done.
        spots: where blocks lie.
        exist: asks whether values of their own are there, by a deadline.
        workers: ask for heads.
        lives: is told how long records live that are written.
        most_bytes: of a record.
        sealer: seals each head and each record; None: they are as they are.
        write_timeout_s: what a call may take that writes.
        clock: what deadlines go by.
    """

    calls: RemoteCalls
    names: RemoteNames
    metrics: Metrics
    beliefs: Beliefs
    listing: Listing | None
    spots: Spots
    exist: Exist
    workers: Workers
    lives: Lives
    most_bytes: int
    sealer: Sealer | None
    write_timeout_s: float
    clock: Callable[[], float]

    @property
    def head_bytes(self) -> int:
        """Where the records of a parcel begin."""
        return HEAD_BYTES + (0 if self.sealer is None else OVERHEAD)

    def locate(
        self, keys: Sequence[bytes], first: int, group: int, deadline: float, batch: int, wanted: int = 0
    ) -> tuple[int, bool]:
        """Return how many of these blocks seem to be there from `wanted` on, and whether that is sure; see `locate`.

        batch: so many values of their own are asked for as fast as one.
        """
        return locate(
            keys,
            first,
            group,
            Asking(
                self.has,
                lambda key: self._believed(parcel_of(key)) is False,
                lambda some: self._heads(some, deadline),
                lambda some: self._alone(some, deadline, batch),
            ),
            wanted,
        )

    def has(self, key: bytes) -> bool:
        """Return whether a block is believed to be there, in a parcel or as a value of its own."""
        known = self.beliefs.of(key)  # False also of a record that was read in a parcel, and is damaged
        return known is True or (known is None and self.spots.of(key) is not None)

    def _believed(self, value: bytes) -> bool | None:
        """Whether a value is there, if that need not be asked."""
        known = self.beliefs.of(value)
        if known is None and self.listing is not None and self.listing.lacks(value):
            return False
        return known

    def _heads(self, keys: Sequence[bytes], deadline: float) -> list[Sequence[bytes] | None]:
        """The keys in the parcels that begin with these blocks; see `Asking`."""
        tasks = list[Task[ParcelHead | Reason] | None]()
        for key in keys:
            lacks = self._believed(parcel_of(key)) is False
            tasks.append(None if lacks else Task(self.head, key, deadline))
            if lacks and self.beliefs.of(parcel_of(key)) is None:
                self.metrics.add(Metric.REMOTE_UNLISTED)
        for task in tasks:
            if task is not None:
                self.workers.start(task)
        found = list[Sequence[bytes] | None]()
        for task in tasks:
            if task is None:
                found.append(())
            elif not task.is_done(max(0.0, deadline - self.clock())):
                task.cancel()
                found.append(None)
            else:
                head = task.result()
                is_none = head in (Reason.REMOTE_GONE, Reason.REMOTE_REFUSED)
                found.append(self._usable(head) if isinstance(head, ParcelHead) else () if is_none else None)
        return found

    def _usable(self, head: ParcelHead) -> Sequence[bytes]:
        """The blocks in a parcel before the first that was read, and is damaged; another parcel may begin with that."""
        return [head.keys[0], *takewhile(lambda key: self.beliefs.of(key) is not False, head.keys[1:])]

    def head(self, key: bytes, deadline: float) -> ParcelHead | Reason:
        """Return the head of the parcel that begins with a block, or why it does not come, and note what it says."""
        value, buffer = parcel_of(key), memoryview(bytearray(self.head_bytes))
        name = self.names.block(value)
        size = self.calls.read_part(name, 0, [buffer], deadline)
        if isinstance(size, Reason):
            if size is Reason.REMOTE_GONE:
                self.beliefs.note([value], False)
            return size
        try:
            data = buffer[:size] if self.sealer is None else self.sealer.opened(name, buffer[:size])
            head = ParcelHead.unpack(data, key, self.most_bytes)
        except DamagedRecord as damage:
            self.metrics.add(Metric.REMOTE_DAMAGED, because=f"{name}: {damage}")
            self.beliefs.note([value], False)
            return Reason.REMOTE_REFUSED
        self._note(head)
        return head

    def lost(self, keys: Sequence[bytes]) -> None:
        """The first of these blocks is not where it lay, or damaged: their parcels may have been written anew."""
        parcels = self.spots.forget(keys)
        self.beliefs.forget(map(parcel_of, parcels))
        self.beliefs.note([parcel_of(key) for key in keys[:1] if key in parcels], False)

    def _note(self, head: ParcelHead) -> None:
        self.beliefs.note([parcel_of(head.keys[0])], True)
        self.spots.note(head)

    def _alone(self, keys: Sequence[bytes], deadline: float, batch: int) -> tuple[int, bool]:
        """How many of the first of these blocks are values of their own, and whether that is sure."""
        is_sure = True

        def ask(some: Sequence[bytes]) -> Sequence[bool | None]:
            nonlocal is_sure
            answers = self.exist(some, deadline)
            is_sure = is_sure and None not in answers
            return answers

        if self.beliefs.of(keys[0]) is None and self._believed(keys[0]) is False:
            self.metrics.add(Metric.REMOTE_UNLISTED)
        # Of the first alone: mostly there is none.
        here = leading(keys[:1], self._believed, ask, 1)
        if here:
            here += leading(keys[1:], self._believed, ask, batch)
        return here, is_sure

    # ---- writing: for one thread ---------------------------------------------------------------------------------

    def write(
        self, keys: Sequence[bytes], records: Sequence[memoryview], ttl_s: float | None, expiries: Sequence[float]
    ) -> int | None:
        """Write records of blocks that follow each other as one parcel, unless there is one that begins so.

        Args:
            expiries: when the lives of the records end, 0 for never.

        Returns:
            How many of the first of them are in the parcel that is there now; 0 if what is there is no parcel; None if
            that failed.
        """
        value = parcel_of(keys[0])
        name = self.names.block(value)
        parts = [self.sealed(self.names.block(key), record) for key, record in zip(keys, records, strict=True)]
        sizes = tuple(sum(memoryview(part).nbytes for part in some) for some in parts)
        head = ParcelHead(tuple(keys), sizes)
        whole = [*self.sealed(name, head.pack()), *(part for some in parts for part in some)]
        new = self.calls.put(name, whole, ttl_s)
        if self.listing is not None:  # after: one that began meanwhile may have passed it. It may be there if it failed
            self.listing.add([value])
        if new is None:
            return None
        if new:
            self.wrote(head)
            for key, expiry in zip(keys, expiries, strict=True):
                self.lives.note(key, expiry)
            self.metrics.add(Metric.REMOTE_WRITTEN_PARCELS)
            self.metrics.add(Metric.REMOTE_WRITTEN_RECORDS, len(keys))
            self.metrics.add(Metric.REMOTE_WRITTEN_BYTES, sum(record.nbytes for record in records))
            return len(keys)
        found = self.head(keys[0], self.clock() + self.write_timeout_s)
        if isinstance(found, Reason):
            return 0 if found is Reason.REMOTE_REFUSED else None
        here = found.shared(keys)
        self.metrics.add(Metric.REMOTE_PRESENT, here)
        return here

    def put_again(self, head: ParcelHead, records: memoryview, ttl_s: float | None) -> None:
        """Write a parcel whose records were read there, if nobody wrote another one meanwhile."""
        name = self.names.block(parcel_of(head.keys[0]))
        if self.calls.put(name, [*self.sealed(name, head.pack()), records], ttl_s):
            self._note(head)

    def wrote(self, head: ParcelHead) -> None:
        """This parcel is there now."""
        self.beliefs.forget(head.keys)  # that they are not there
        self._note(head)

    def sealed(self, name: str, data: memoryview | bytes) -> Sequence[memoryview | bytes]:
        """Return what is stored of some bytes under a name."""
        return [data] if self.sealer is None else self.sealer.seal(name, data)
