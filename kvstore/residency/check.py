"""`KVStore.check`: compares everything that a store says of itself, and repairs nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.config import PAGE_BYTES
from kvstore.residency.census import Census
from kvstore.residency.donor_rule import may_be_donor
from kvstore.residency.record_check import RecordCheck
from kvstore.residency.residency import Residency
from kvstore.residency.states import Marks, State, problems
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.survey import Survey
from kvstore.tiers.host import HostTier

# What is only under way is seen once; what is wrong is seen every time.
_LOOKS, _PAUSE_S = 4, 0.05
_NONE: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class CheckReport:
    """What `KVStore.check` found.

    Attributes:
        problems: one sentence each; () if all is well.
        records: in the index.
        disk_records, host_records, device_records, queued_records: in each tier, and in the write queue.
        members: records that are coded against others.
        pinned: pinned sequences.
        sessions: saved sessions.
        verified_records: records that were read from disk, with deep=True.
        unreadable_records: those of them that are whole and cannot be decoded here, for their profile is not here, or
            this version does not know their codec. A get of their tokens is a miss; a put of them stores them anew.

    Example:
        >>> CheckReport().ok
        True
    """

    problems: tuple[str, ...] = ()
    records: int = 0
    disk_records: int = 0
    host_records: int = 0
    device_records: int = 0
    queued_records: int = 0
    members: int = 0
    pinned: int = 0
    sessions: int = 0
    verified_records: int = 0
    unreadable_records: int = 0

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def lost_at_open(counters: Mapping[str, int | float]) -> list[str]:
    """Return what opening left out because it was damaged, which is not in the books any more, from the counters of a
    store that did nothing since."""
    return [
        f"{count} {name.replace('_', ' ')}"
        for name, count in counters.items()
        if name.startswith("damaged_") or name in ("lost_entries", "unreachable_records", "lost_members")
    ]


@dataclass(frozen=True)
class _Look:
    """Everything that is compared, as of one moment: no put, delete or write went on."""

    census: Census
    disk: Survey | None
    host: dict[int, int]
    device: dict[int, int]

    @property
    def on_disk(self) -> npt.NDArray[np.uint64]:
        return self.disk.scan.entries["record"] if self.disk is not None else _NONE

    @cached_property
    def _indexed(self) -> set[int]:
        return set(self.census.indexed.tolist())

    @cached_property
    def _stored(self) -> set[int]:
        return set(self.on_disk.tolist())

    def marks(self, record: int) -> Marks:
        """Where the record is, and what is known of it."""
        census = self.census
        return Marks(
            indexed=record in self._indexed,
            queued=record in census.queued,
            on_disk=record in self._stored,
            in_memory=record in self.host or record in self.device,
            unwritten=record in census.unwritten,
            replaced=record in census.replaced,
            member=record in census.donors,
            pinned=record in census.pinned or record in census.kept,
            expires=record in census.expiry,
        )

    @property
    def leaving(self) -> frozenset[int]:
        """Records that are to go from the catalog, and are not in the index any more."""
        return self.census.leaving | (self.disk.leaving if self.disk is not None else frozenset())


@dataclass(frozen=True)
class Checker:
    """Holds a store against its invariants. Thread-safe.

    Attributes:
        records: verifies the records on disk.
        paused: gives a context in which nobody puts or deletes.
        is_idle: whether no other call is under way; nobody may hold a segment then.
    """

    residency: Residency
    records: RecordCheck
    paused: Callable[[], AbstractContextManager[object]]
    is_idle: Callable[[], bool]

    def check(self, deep: bool) -> CheckReport:
        """See `KVStore.check`."""
        found, look = self._look()
        for _ in range(_LOOKS - 1):
            if not found:
                break
            time.sleep(_PAUSE_S)
            again, look = self._look()
            found = [problem for problem in found if problem in set(again)]
        verified, unreadable, damage = self._read(look) if deep else (0, 0, [])
        census = look.census
        return CheckReport(
            problems=(*found, *damage),
            records=len(census.indexed),
            disk_records=len(look.on_disk),
            host_records=len(look.host),
            device_records=len(look.device),
            queued_records=len(census.queued),
            members=len(census.donors),
            pinned=len(census.pinned),
            sessions=look.disk.sessions if look.disk is not None else 0,
            verified_records=verified,
            unreadable_records=unreadable,
        )

    def state_of(self, record: int) -> State:
        """What the record is to the store now."""
        return self._look()[1].marks(record).state(self.residency.disk is not None)

    def _look(self) -> tuple[list[str], _Look]:
        residency, found, survey = self.residency, [], None
        idle_before = self.is_idle()
        with self.paused(), self._disk_paused():
            try:
                survey = residency.disk.survey() if residency.disk is not None else None
            except CatalogError as error:
                found.append(f"the catalog cannot be read: {error}")
            except OSError as error:
                found.append(f"the files cannot be looked at: {error}")
            host, device = residency.host.sizes(), residency.device.sizes()
            look = _Look(residency.census(), survey, host[1], device[1])
            offered = [*self._offered(look), *self._tenant_problems(look)]
            if residency.host.miscounted():
                offered.append("what is counted for tenants in the host tier differs from what its records take")
        found += [*_tier_problems(residency.host, *host), *_tier_problems(residency.device, *device)]
        found += survey.problems if survey is not None else ()
        if survey is not None and survey.held and idle_before and self.is_idle():
            found += [
                f"segment {number}: {reads} reads hold it, and no call is under way"
                for number, reads in survey.held.items()
            ]
        if residency.disk is None or survey is not None:
            found += [*self._state_problems(look), *_family_problems(look), *offered]
        if residency.disk is not None and not residency.disk.read_only and survey is not None:
            found += _hole_problems(look)
        return found + _mark_problems(look.census), look

    def _disk_paused(self) -> AbstractContextManager[object]:
        disk = self.residency.disk
        return disk.paused() if disk is not None else contextlib.nullcontext()

    def _state_problems(self, look: _Look) -> Iterator[str]:
        """Every record is where its state says (`states.ALLOWED`); most are durable and indexed, and need no look."""
        census, has_disk = look.census, look.disk is not None
        stored = np.intersect1d(census.indexed, look.on_disk)
        plain = set(stored.tolist())
        known = {*census.donors, *census.kept, *census.pinned, *census.expiry, *look.host, *look.device}
        odd = {*np.setxor1d(census.indexed, look.on_disk).tolist(), *census.queued, *census.unwritten}
        odd |= census.replaced | (known - plain)
        read_only = self.residency.disk is not None and self.residency.disk.read_only
        for record in sorted(odd):
            marks = look.marks(record)
            if read_only and marks.indexed != marks.on_disk:
                continue  # a reader takes in what a writer process did when it looks something up
            nowhere = not (marks.queued or marks.on_disk or marks.in_memory)
            if marks.indexed and nowhere:
                yield f"record {record} is in the index, and nowhere else"
            elif marks.on_disk and not (marks.indexed or marks.replaced or record in look.leaving):
                yield f"record {record} is in the catalog, not in the index, and nothing is to remove it"
            else:
                yield from problems(record, marks, has_disk)

    def _offered(self, look: _Look) -> list[str]:
        """What others may be coded against is in the content index only while it may be a donor."""
        content, census = self.residency.content, look.census
        if content is None:
            return []
        indexed = [record for record in census.indexed.tolist() if record in content]
        found = []
        if len(indexed) != len(content):
            found.append(f"{len(content) - len(indexed)} records in the content index are not in the index")
        counts = self._token_counts(look)
        records = np.array(indexed, np.uint64)
        block_tokens = self.residency.config.block_tokens
        good = may_be_donor(
            record=records,
            parent=0,
            tokens=np.array([counts.get(record, block_tokens) for record in indexed], np.int64),
            block_tokens=block_tokens,
            expiry=np.array([census.expiry.get(record, 0.0) for record in indexed]),
            is_member=np.array([record in census.donors for record in indexed], bool),
            is_indexed=True,
            is_unwritten=np.array([record in census.unwritten for record in indexed], bool),
        )
        bad = records[~good].tolist()
        return found + [f"record {record} is in the content index and may not be a donor" for record in bad]

    def _tenant_problems(self, look: _Look) -> Iterator[str]:
        """What tenants take is what the catalog says of the records that the index has."""
        counted = self.residency.tenant_bytes()
        if counted is None or look.disk is None:
            return
        sizes, by_tenant, others = counted
        rows = look.disk.scan.entries
        rows = rows[np.isin(rows["record"], look.census.indexed)]
        nbytes = rows["pages"].astype(np.int64) * PAGE_BYTES
        if sizes != dict(zip(rows["record"].tolist(), nbytes.tolist(), strict=True)):
            yield "what is counted for tenants of records on disk differs from the catalog"
        found = {
            digest: int(nbytes[rows["namespace"] == look.disk.namespaces.get(digest, 0)].sum()) for digest in by_tenant
        }
        if (found, int(nbytes.sum()) - sum(found.values())) != (by_tenant, others):
            yield f"tenants count {by_tenant} bytes and {others} of others, the catalog has other sums"

    @staticmethod
    def _token_counts(look: _Look) -> dict[int, int]:
        counts = {record: len(block.tokens) for record, block in look.census.queued.items()}
        if look.disk is not None:
            rows = look.disk.scan.entries
            counts |= dict(zip(rows["record"].tolist(), rows["count"].tolist(), strict=True))
        return counts

    def _read(self, look: _Look) -> tuple[int, int, list[str]]:
        disk = self.residency.disk
        return self.records.check(disk, look.disk) if disk is not None and look.disk is not None else (0, 0, [])


def _tier_problems(tier: HostTier | DeviceTier, taken: int, sizes: dict[int, int]) -> Iterator[str]:
    total = sum(sizes.values())
    if total != taken:
        yield f"the {tier.name} tier counts {taken} bytes, its records take {total}"
    if taken > tier.budget:
        yield f"the {tier.name} tier holds {taken} bytes, more than its budget of {tier.budget}"


def _family_problems(look: _Look) -> Iterator[str]:
    census = look.census
    inverse: dict[int, set[int]] = {}
    for member, donors in census.donors.items():
        for donor in donors:
            inverse.setdefault(donor, set()).add(member)
        if census.donors.keys() & set(donors):
            yield f"member {member} is coded against a member"
    for donor in inverse.keys() | census.members.keys():
        if inverse.get(donor, set()) != census.members.get(donor, frozenset()):
            yield f"donor {donor}: the list of its members differs from the members that name it"
    if look.disk is None:
        return
    stored = look.disk.scan.donors
    indexed, on_disk = set(census.indexed.tolist()), set(look.on_disk.tolist())
    for member, donors in stored.items():
        if not on_disk.issuperset(donors):
            yield f"member {member} is on disk without its donors {sorted(set(donors) - on_disk)}"
        if stored.keys() & set(donors):
            yield f"member {member} is coded on disk against a member"
    for record in (stored.keys() | census.donors.keys()) & indexed & on_disk - census.queued.keys():
        if stored.get(record, ()) != census.donors.get(record, ()):
            yield f"record {record}: the catalog names other donors than the families do"


def _hole_problems(look: _Look) -> Iterator[str]:
    """The catalog has the holes that the index has, so that whatever is behind them can be placed at the next open."""
    census, disk = look.census, look.disk
    assert disk is not None
    stored = set(disk.scan.holes["record"].tolist())
    on_disk = set(look.on_disk.tolist())
    for record in sorted(census.holes - stored - census.holes_due - (on_disk & look.leaving)):
        yield f"record {record} left a hole that is not in the catalog"
    going = census.replaced | census.released | look.leaving
    for record in sorted(stored - census.holes - census.unwritten - going):
        yield f"hole {record} is in the catalog, and nothing needs it"
    if census.holes_due:
        return
    rows = disk.scan.entries
    tags = np.concatenate([rows["tag"], disk.scan.holes["tag"]])
    placed = (rows["start"] == 0) | np.isin(rows["parent_tag"], tags) | ~np.isin(rows["record"], census.indexed)
    for record in rows["record"][~placed].tolist():
        yield f"record {record} is on disk, and what comes before it is not, nor a hole in its place"


def _mark_problems(census: Census) -> list[str]:
    """Pins and ends of life."""
    found = []
    indexed = set(census.indexed.tolist()) if census.pinned or census.expiry else set()
    found += [f"pinned record {record} is not in the index" for record in census.pinned - indexed]
    kept = {record for path in census.paths.values() for record in path}
    if kept != census.kept.keys():
        found.append(f"records {sorted(kept ^ census.kept.keys())[:8]}: kept without a pin, or pinned and not kept")
    if sum(census.kept.values()) != census.pinned_bytes:
        found.append(f"pins count {census.pinned_bytes} bytes, the records that they keep {sum(census.kept.values())}")
    for record, end in census.expiry.items():
        if (end, record) not in census.waiting:
            found.append(f"record {record} has an end of life that is not in the queue of ends")
    return found
