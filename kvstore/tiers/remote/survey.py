"""What lies in a remote tier, whoever wrote it: read whole, checked by itself, and removed from the ends on."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from kvstore.codecs.profile import profile_id_of
from kvstore.core.keys import chain_key
from kvstore.core.record import DamagedRecord, check_payload, parse
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.names import PREFIX
from kvstore.tiers.remote.sealing import MAGIC, Sealer

_THREADS = 8
_MOST_BYTES = 1 << 28  # of a value; memory that is not written is not taken
_BATCH = 64


@dataclass(frozen=True)
class Value:
    """One value.

    Attributes:
        name: its key in the remote tier.
        nbytes: what it takes.
        problem: what is wrong with it; "" for nothing.
        parent: the name of the block before it; "" for none, and of profiles.
        depth: tokens before it.
        tokens: how many it has.
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

    @property
    def is_profile(self) -> bool:
        """Whether it is a profile, and no record."""
        return "/profile/" in self.name

    @property
    def identity(self) -> str:
        """The beginning of the digest of the identity that it belongs to."""
        return self.name.split("/")[1] if "/" in self.name else ""


def survey(engine: RemoteEngine, timeout_s: float, identity: str = "", sealer: Sealer | None = None) -> list[Value]:
    """Read and check every value of an identity (its 16 hex digits), or of all.

    Args:
        timeout_s: of each call.
        sealer: opens sealed values.

    Raises:
        RemoteError: the server failed.
    """
    names = sorted(set(engine.list(f"{PREFIX}/{identity}" + "/" * bool(identity), timeout_s)))
    here = threading.local()
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(partial(_look, engine, here, timeout_s, sealer), names)
        return [value for value in found if value is not None]


def _look(
    engine: RemoteEngine, here: threading.local, timeout_s: float, sealer: Sealer | None, name: str
) -> Value | None:
    """A value; None if it left meanwhile."""
    if not hasattr(here, "buffer"):
        here.buffer = bytearray(_MOST_BYTES)
    view = memoryview(here.buffer)
    size = engine.get_into(name, view, timeout_s)
    if size is None:
        return None
    data = view[:size]
    if sealer is not None:
        try:
            data = memoryview(sealer.opened(name, data))
        except DamagedRecord as damage:
            return Value(name, size, str(damage))
    elif data[: len(MAGIC)] == MAGIC:
        return Value(name, size, is_sealed=True)
    return replace(_checked(name, data), nbytes=size)


def _checked(name: str, data: memoryview) -> Value:
    size = len(data)
    if "/profile/" in name:
        good = profile_id_of(data).hex() == name.rpartition("/")[2]
        return Value(name, size, "" if good else "is not the profile that its name says")
    try:
        header = parse(data, size)
        check_payload(header, data)
    except DamagedRecord as damage:
        return Value(name, size, str(damage))
    before, _, last = name.rpartition("/")
    problem = ""
    if chain_key(header.parent, header.tokens) != header.key or header.key.hex() != last:
        problem = "key: another block's record"
    elif header.record_bytes != size:
        problem = f"length: a record of {header.record_bytes} bytes, found {size}"
    elif header.donors:
        problem = "field: the record does not stand alone"
    elif header.expiry and header.expiry < time.time():
        problem = "its time to live is over"
    parent = f"{before}/{header.parent.hex()}" if header.start else ""
    return Value(name, size, problem, parent, header.start, len(header.tokens))


def orphans(values: Sequence[Value]) -> set[str]:
    """Return the names of good records that no get reaches, for a block before them is missing or damaged."""
    good = {value.name for value in values if not (value.problem or value.is_profile or value.is_sealed)}
    lost = set[str]()
    for value in sorted(values, key=lambda value: value.depth):
        if value.name in good and value.parent and (value.parent not in good or value.parent in lost):
            lost.add(value.name)
    return lost


def to_remove(values: Sequence[Value], budget: int | None) -> list[Value]:
    """Return what is to go, in this order: what is of no use, and then ends of sequences, the farthest from their
    beginning first, until the rest takes no more than `budget`. A block never comes before those that continue it.
    Profiles stay, and so does what is sealed with a key that is not known.

    Example:
        >>> root = Value("kvs1/i/a", 10)
        >>> values = [root, Value("kvs1/i/b", 10, parent="kvs1/i/a", depth=64), Value("kvs1/i/c", 10, problem="bad")]
        >>> [value.name[-1] for value in to_remove(values, budget=15)]
        ['c', 'b']
    """
    lost = orphans(values)
    useless = [value for value in values if value.problem or value.name in lost]
    going = sorted(useless, key=lambda value: -value.depth)
    if budget is None:
        return going
    rest = [v for v in values if not (v.problem or v.name in lost or v.is_profile or v.is_sealed)]
    total = sum(value.nbytes for value in values) - sum(value.nbytes for value in useless)
    children = Counter(value.parent for value in rest)
    by_name = {value.name: value for value in rest}
    ends = [(-value.depth, value.name) for value in rest if not children[value.name]]
    heapq.heapify(ends)
    while total > budget and ends:
        value = by_name[heapq.heappop(ends)[1]]
        going.append(value)
        total -= value.nbytes
        children[value.parent] -= 1
        if value.parent in by_name and not children[value.parent]:
            heapq.heappush(ends, (-by_name[value.parent].depth, value.parent))
    return going


def batches(going: Sequence[Value]) -> Iterator[list[str]]:
    """Yield the names in order, some at a time; no batch has both a block and one that continues it."""
    for _, group in groupby(going, lambda value: value.depth):
        names = [value.name for value in group]
        for first in range(0, len(names), _BATCH):
            yield names[first : first + _BATCH]
