"""What lies in a remote tier, whoever wrote it: read whole, and checked by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvstore.codecs.profile import profile_id_of
from kvstore.core.keys import chain_key
from kvstore.core.places import MARK, Place
from kvstore.core.record import FLAG_STATES, Damage, DamagedRecord, check_payload, parse
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.names import PARCEL, PREFIX, part_of, place_of, split
from kvstore.tiers.remote.parcel import HEAD_BYTES, ParcelHead
from kvstore.tiers.remote.sealing import MAGIC, OVERHEAD, Sealer

_THREADS = 8
MOST_BYTES = 1 << 28  # of a value; memory that is not written is not taken

EXPIRED = "its time to live is over"
"""What is wrong with a value that is whole, and that no get returns any more."""


@dataclass(frozen=True)
class Value:
    """One value, or one record of a parcel.

    Attributes:
        name: its key in the remote tier; of a record of a parcel that of the parcel, "/" and the key of its block.
        nbytes: what it takes; of the first record of a parcel with the head.
        problem: what is wrong with it; "" for nothing.
        parent: the name of the block before it; "" for none, and of profiles. That of a place is the block which ends
            there.
        depth: tokens before it; of a mark 0.
        tokens: how many it has; 0 of a place or a mark.
        after: the name of the block before it, also where that is the beginning of all; of a record.
        parts: behind the name of each block, what tells apart the records that a place names.
        is_sealed: nothing is known of it without the fleet key.

    Example:
        >>> Value("kvs1/00/profile/11", 8).is_profile
        True
    """

    name: str
    nbytes: int
    problem: str = ""
    parent: str = ""
    depth: int = 0
    tokens: int = 0
    is_sealed: bool = False
    after: str = ""
    parts: tuple[str, ...] = ()

    @property
    def object(self) -> str:
        """The key in the remote tier of what is removed with it."""
        within, parcel, _ = self.name.partition(PARCEL)
        return within + parcel

    @property
    def is_profile(self) -> bool:
        """Whether it is a profile, and no record."""
        return "/profile/" in self.name

    @property
    def is_record(self) -> bool:
        """Whether it is a record, damaged or not."""
        return not (self.is_profile or self.name.endswith((".place", ".mark")))

    @property
    def is_mark(self) -> bool:
        """Whether it is a mark, which says that there are places behind a block."""
        return self.name.endswith(".mark")

    @property
    def block(self) -> str:
        """The name of its block: one block may have several records, of which some lack tokens of windows."""
        return _block_of(self.name)

    @property
    def identity(self) -> str:
        """The beginning of the digest of the identity that it belongs to."""
        return self.name.split("/")[1] if "/" in self.name else ""


def survey(engine: RemoteEngine, timeout_s: float, identity: str = "", sealer: Sealer | None = None) -> list[Value]:
    """Read and check every value of an identity (its 16 hex digits), or of all: also what is written meanwhile, which
    others that were read may need.

    Args:
        timeout_s: of each call.
        sealer: opens sealed values.

    Raises:
        RemoteError: the server failed.
    """
    here, known, found = threading.local(), set[str](), list[Value]()
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in range(2):
            new = [name for name in names(engine, timeout_s, identity) if name not in known]
            known.update(new)
            for values in threads.map(partial(_look, engine, here, timeout_s, sealer), new):
                found += values
    return found


def names(engine: RemoteEngine, timeout_s: float, identity: str = "") -> list[str]:
    """Return the names of all values of an identity (its 16 hex digits), or of all."""
    return sorted(set(engine.list(f"{PREFIX}/{identity}" + "/" * bool(identity), timeout_s)))


def _look(
    engine: RemoteEngine, here: threading.local, timeout_s: float, sealer: Sealer | None, name: str
) -> list[Value]:
    """A value, or the records of a parcel, in their order; [] if it left meanwhile."""
    if not hasattr(here, "buffer"):
        here.buffer = np.empty(MOST_BYTES, np.uint8)
    view = memoryview(here.buffer)
    size = engine.get_into(name, view, timeout_s)
    if size is None:
        return []
    data = view[:size]
    if sealer is None and data[: len(MAGIC)] == MAGIC:
        return [Value(name, size, is_sealed=True)]
    try:
        return list(_records(name, data, sealer)) if name.endswith(PARCEL) else [_value(name, data, sealer)]
    except DamagedRecord as damage:
        return [Value(name, size, str(damage))]


def _value(name: str, data: memoryview, sealer: Sealer | None) -> Value:
    """A value of its own. Raises `DamagedRecord` if it is not sealed as it must be."""
    opened = data if sealer is None else memoryview(sealer.opened(name, data))
    return replace(_checked(name, opened), nbytes=len(data))


def _records(name: str, data: memoryview, sealer: Sealer | None) -> Iterator[Value]:
    """The records of a parcel. Raises `DamagedRecord` if its head does not say where they are."""
    head, begin = head_of(name, data, sealer)
    if len(data) != begin + head.nbytes:
        raise DamagedRecord(Damage.LENGTH, f"a parcel of {begin + head.nbytes} bytes, found {len(data)}")
    folder, before = name.rpartition("/")[0], ""
    for key, offset, size in zip(head.keys, head.offsets, head.sizes, strict=True):
        block, part = f"{folder}/{key.hex()}", data[begin + offset : begin + offset + size]
        try:
            value = _value(block, part, sealer)
        except DamagedRecord as damage:
            value = Value(block, size, str(damage))
        if before and not value.problem and value.after != before:
            value = replace(value, problem="does not follow the record before it")
        yield replace(value, name=f"{name}/{key.hex()}", nbytes=size if before else begin + size)
        before = block


def head_of(name: str, data: memoryview, sealer: Sealer | None) -> tuple[ParcelHead, int]:
    """Return the head of a parcel, and how many bytes it takes. Raises `DamagedRecord`."""
    begin, found = HEAD_BYTES + (0 if sealer is None else OVERHEAD), split(name)
    opened = data[:begin] if sealer is None else sealer.opened(name, data[:begin])
    return ParcelHead.unpack(opened, found[0] if found is not None else b"", MOST_BYTES), begin


def _checked(name: str, data: memoryview) -> Value:
    size = len(data)
    if "/profile/" in name:
        good = profile_id_of(data).hex() == name.rpartition("/")[2]
        return Value(name, size, "" if good else "is not the profile that its name says")
    if name.endswith((".place", ".mark")):
        return _checked_place(name, data)
    try:
        header = parse(data, size)
        check_payload(header, data)
    except DamagedRecord as damage:
        return Value(name, size, str(damage))
    before, found = name.rpartition("/")[0], split(name)
    part = part_of(header.key, header.cut, bool(header.flags & FLAG_STATES))
    problem = ""
    if chain_key(header.parent, header.tokens) != header.key or found is None or _joined(found) != part:
        problem = "key: another block's record"
    elif header.record_bytes != size:
        problem = f"length: a record of {header.record_bytes} bytes, found {size}"
    elif header.donors:
        problem = "field: the record does not stand alone"
    elif header.expiry and header.expiry < time.time():
        problem = EXPIRED
    after = f"{before}/{header.parent.hex()}"
    parent = after if header.start else ""
    return Value(name, size, problem, parent, header.start, len(header.tokens), after=after)


def _checked_place(name: str, data: memoryview) -> Value:
    """A place, which its last block comes before, or a mark."""
    found, size = split(name), len(data)
    if name.endswith(".mark"):
        return Value(name, size, "" if data == MARK and found is not None else "is no mark")
    try:
        place = Place.unpack(data)
        if found is None or place_of(place.key) != _joined(found):
            raise ValueError("key: another place")
    except ValueError as error:
        return Value(name, size, str(error))
    parts = [part_of(b"", *row).decode() for row in zip(place.cuts, place.with_states, strict=True)]
    return Value(name, size, parent=_block_of(name), depth=place.end, parts=tuple(parts))


def _joined(found: tuple[bytes, str]) -> bytes:
    return found[0] + found[1].encode()


def _block_of(name: str) -> str:
    """The name of the block that a value belongs to, without what tells its records apart."""
    folder, found = name.rpartition("/")[0], split(name)
    if folder.endswith(PARCEL):
        folder = folder.rpartition("/")[0]
    return name if found is None else f"{folder}/{found[0].hex()}"
