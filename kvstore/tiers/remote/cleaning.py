"""What of a remote tier is to go: what is of no use, what is old, and ends of sequences."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import dropwhile, groupby
from typing import cast

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engine import AgingEngine, RemoteEngine
from kvstore.tiers.remote.names import PREFIX
from kvstore.tiers.remote.sealing import Sealer
from kvstore.tiers.remote.survey import MOST_BYTES, Value, head_of, names

_BATCH = 64


def orphans(values: Sequence[Value]) -> set[str]:
    """Return the names of good values that no get reaches: records, for a block before them is missing or damaged,
    places, for one of their records is, and marks without places."""
    good = {value.name: value for value in values if not (value.problem or value.is_profile or value.is_sealed)}
    blocks = dict[str, Value]()  # of which a record can be reached
    lost = set[str]()
    for value in sorted((v for v in good.values() if v.is_record), key=lambda value: value.depth):
        if value.parent and value.parent not in blocks:
            lost.add(value.name)
        else:
            blocks[value.block] = value
    marked = set[str]()
    for value in (value for value in good.values() if value.parts):
        if all(name in good and name not in lost for name in _parts_of(value, blocks)):
            marked.add(blocks[value.parent].after)
        else:
            lost.add(value.name)
    return lost | {name for name, value in good.items() if value.is_mark and value.block not in marked}


def _parts_of(place: Value, blocks: Mapping[str, Value]) -> Iterator[str]:
    """The names of the records that a place names, the last first; "" where a block cannot be reached."""
    block = place.parent
    for part in reversed(place.parts):
        found = blocks.get(block)
        yield block + part if found is not None else ""
        block = found.parent if found is not None else ""


def to_remove(values: Sequence[Value], budget: int | None, old: Collection[str] = ()) -> list[Value]:
    """Return what is to go, in this order: what is of no use, what is `old`, by the name of its object, and then ends
    of sequences, the farthest from their beginning first, until the rest takes no more than `budget`. A block never
    comes before those that continue it, nor before places behind it: an old one stays if one of these is not. Profiles
    stay, and so does what is sealed with a key that is not known.

    The records of a parcel go together, but for what is of no use: from there on the parcel is cut off.

    Example:
        >>> root = Value("kvs1/i/a", 10)
        >>> values = [root, Value("kvs1/i/b", 10, parent="kvs1/i/a", depth=64), Value("kvs1/i/c", 10, problem="bad")]
        >>> [value.name[-1] for value in to_remove(values, budget=15)]
        ['c', 'b']
    """
    useless = _useless(values)
    going = sorted((value for value in values if value.name in useless), key=lambda value: -value.depth)
    rest = [v for v in values if not (v.name in useless or v.is_profile or v.is_sealed)]
    for unit in _ends_first(rest, lambda unit: unit[0].object in old) if old else ():
        going += unit
    if budget is not None:
        gone = {value.name for value in going}
        total = sum(value.nbytes for value in values) - sum(value.nbytes for value in going)
        for unit in _ends_first([value for value in rest if value.name not in gone], lambda unit: True):
            if total <= budget:
                break
            going += unit
            total -= sum(value.nbytes for value in unit)
    gone = {value.name for value in going}
    left = [value for value in rest if value.name not in gone]
    without = orphans(left)
    return going + [value for value in left if value.is_mark and value.name in without]


def _useless(values: Sequence[Value]) -> set[str]:
    """The names of what is damaged or not reached, and of what lies behind that in its parcel or continues that."""
    gone = {value.name for value in values if value.problem}
    while True:
        found = gone | orphans([value for value in values if value.name not in gone])
        for unit in objects(values):
            found.update(value.name for value in dropwhile(partial(_is_good, found), unit))
        if found == gone:
            return gone
        gone = found


def _is_good(bad: Collection[str], value: Value) -> bool:
    return value.name not in bad


def objects(values: Iterable[Value]) -> list[list[Value]]:
    """Return the values by object; objects by their last value."""
    found = dict[str, list[Value]]()
    for value in values:
        found[value.object] = [*found.pop(value.object, []), value]
    return list(found.values())


def _ends_first(values: Sequence[Value], goes: Callable[[list[Value]], bool]) -> Iterator[list[Value]]:
    """Yield the good values of each object that is to go, the farthest from the beginning first, none before what
    continues it, or if that stays; no marks."""
    units = {unit[0].object: unit for unit in objects(value for value in values if not value.is_mark)}
    holders = dict[str, set[str]]()  # objects by the blocks of which they have records
    for name, unit in units.items():
        for value in unit:
            if value.is_record:
                holders.setdefault(value.block, set()).add(name)
    before = {name: [o for v in unit for o in _others(holders.get(v.parent, ()), name)] for name, unit in units.items()}
    waits = Counter(name for some in before.values() for name in some)
    order = {name: (-max(value.depth for value in unit), number) for number, (name, unit) in enumerate(units.items())}
    ends = [(order[name], name) for name in units if not waits[name]]
    heapq.heapify(ends)
    while ends:
        name = heapq.heappop(ends)[1]
        if not goes(units[name]):
            continue
        yield units[name]
        for other in before[name]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ends, (order[other], other))


def _others(holders: Collection[str], name: str) -> Collection[str]:
    """The objects that have the block before a value; none if its own has it."""
    return () if name in holders else holders


def older(engine: RemoteEngine, identity: str, seconds: float, timeout_s: float) -> set[str]:
    """Return the names of the values of an identity, or of all, that were neither written nor touched for so long.

    Raises:
        ConfigError: the server does not keep that.
        RemoteError: it failed.
    """
    if not engine.limits.has_ages:
        raise ConfigError(
            f"{engine.endpoint(PREFIX)} does not say how old values are; there a value goes by itself ttl_s after its "
            "last use, and gc --to removes ends of sequences"
        )
    found, left = set[str](), names(engine, timeout_s, identity)
    for first in range(0, len(left), _BATCH):
        some = left[first : first + _BATCH]
        ages = cast(AgingEngine, engine).ages(some, timeout_s)
        found |= {name for name, age in zip(some, ages, strict=True) if age is not None and age > seconds}
    return found


def remove(
    engine: RemoteEngine,
    values: Sequence[Value],
    going: Sequence[Value],
    timeout_s: float,
    old: Collection[str] = (),
    seconds: float = 0.0,
    sealer: Sealer | None = None,
) -> list[Value]:
    """Remove values in the order of `to_remove`, and return those that are gone. What was used since it was found `old`
    stays after all, and so does what comes before it. What stays of a parcel is written again, and is young then.

    Args:
        values: all that there are, of which these go.
        seconds: how old what is old must be still.
        sealer: opens and seals the heads of parcels.

    Raises:
        RemoteError: the server failed.
    """
    after = {value.block: value.after for value in values if value.is_record}
    sizes = Counter(value.object for value in values)
    gone, stays, marked = list[Value](), set[str](), set[str]()
    news: bool | None = None  # whether places were written since, which may need any mark
    for some in _batches(objects(going)):
        asked = [unit[0].object for unit in some if unit[0].object in old]
        ages = cast(AgingEngine, engine).ages(asked, timeout_s) if asked else []
        young = {name for name, age in zip(asked, ages, strict=True) if age is not None and age <= seconds}
        left = list[list[Value]]()
        for unit in some:
            first = unit[0]
            if first.object in young or any(value.is_record and value.block in stays for value in unit):
                stays |= {value.parent for value in unit}
                marked |= {after.get(value.parent, "") for value in unit if value.parts}
            elif not first.is_mark:
                left.append(unit)
            elif first.block not in marked:
                news = _has_news(engine, values, timeout_s) if news is None else news
                left += [] if news else [unit]
        whole = [unit[0].object for unit in left if len(unit) == sizes[unit[0].object]]
        if whole:
            engine.delete(whole, timeout_s)
        for unit in left:
            count = sizes[unit[0].object] - len(unit)
            if count:
                _shorten(engine, unit[0].object, count, timeout_s, sealer)
            gone += unit
    return gone


def _shorten(engine: RemoteEngine, name: str, count: int, timeout_s: float, sealer: Sealer | None) -> None:
    """Remove a parcel, and write its first records again."""
    data = memoryview(bytearray(MOST_BYTES))
    size = engine.get_into(name, data, timeout_s)
    if size is None:
        return
    head, begin = head_of(name, data[:size], sealer)
    first = head.first(count)
    packed = [first.pack()] if sealer is None else sealer.seal(name, first.pack())
    engine.delete([name], timeout_s)
    engine.put(name, [*packed, data[begin : begin + first.nbytes]], timeout_s)


def _has_news(engine: RemoteEngine, values: Sequence[Value], timeout_s: float) -> bool:
    known = {value.name for value in values}
    return any(name.endswith(".place") and name not in known for name in names(engine, timeout_s))


def _batches(going: Sequence[list[Value]]) -> Iterator[list[list[Value]]]:
    """Yield what goes in order, some at a time; no batch has a block and one that continues it in another object."""
    for _, group in groupby(going, lambda unit: max(value.depth for value in unit)):
        here = list(group)
        for first in range(0, len(here), _BATCH):
            yield here[first : first + _BATCH]
