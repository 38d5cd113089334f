"""What of a remote tier is to go: what is of no use, what is old, and ends of sequences."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engine import AgingEngine, RemoteEngine
from kvstore.tiers.remote.names import PREFIX
from kvstore.tiers.remote.survey import Value, names

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
    """Return what is to go, in this order: what is of no use, what is `old`, by name, and then ends of sequences, the
    farthest from their beginning first, until the rest takes no more than `budget`. A block never comes before those
    that continue it, nor before places behind it: an old one stays if one of these is not. Profiles stay, and so does
    what is sealed with a key that is not known.

    Example:
        >>> root = Value("kvs1/i/a", 10)
        >>> values = [root, Value("kvs1/i/b", 10, parent="kvs1/i/a", depth=64), Value("kvs1/i/c", 10, problem="bad")]
        >>> [value.name[-1] for value in to_remove(values, budget=15)]
        ['c', 'b']
    """
    lost = orphans(values)
    useless = [value for value in values if value.problem or value.name in lost]
    going = sorted(useless, key=lambda value: -value.depth)
    rest = [v for v in values if not (v.problem or v.name in lost or v.is_profile or v.is_sealed)]
    if old:
        going += _ends_first(rest, lambda value: value.name in old)
    if budget is not None:
        gone = {value.name for value in going}
        total = sum(value.nbytes for value in values) - sum(value.nbytes for value in going)
        for value in _ends_first([value for value in rest if value.name not in gone], lambda value: True):
            if total <= budget:
                break
            going.append(value)
            total -= value.nbytes
    gone = {value.name for value in going}
    left = [value for value in rest if value.name not in gone]
    without = orphans(left)
    return going + [value for value in left if value.is_mark and value.name in without]


def _ends_first(values: Sequence[Value], goes: Callable[[Value], bool]) -> Iterator[Value]:
    """Yield good values that are to go, the farthest from the beginning first, none before what continues it, or if
    that stays; no marks."""
    children = Counter(value.parent for value in values)
    blocks = dict[str, list[int]]()
    for number, value in enumerate(values):
        if value.is_record:
            blocks.setdefault(value.block, []).append(number)
    ends = [
        (-value.depth, number)
        for number, value in enumerate(values)
        if not (value.is_mark or (value.is_record and children[value.block]))
    ]
    heapq.heapify(ends)
    while ends:
        value = values[heapq.heappop(ends)[1]]
        if not goes(value):
            continue
        yield value
        children[value.parent] -= 1
        if value.parent in blocks and not children[value.parent]:
            for number in blocks[value.parent]:
                heapq.heappush(ends, (-values[number].depth, number))


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
) -> list[Value]:
    """Remove values in the order of `to_remove`, and return those that are gone. What was used since it was found `old`
    stays after all, and so does what comes before it.

    Args:
        values: all that there are, of which these go.
        seconds: how old what is old must be still.

    Raises:
        RemoteError: the server failed.
    """
    after = {value.block: value.after for value in values if value.is_record}
    gone, stays, marked = list[Value](), set[str](), set[str]()
    news: bool | None = None  # whether places were written since, which may need any mark
    for some in _batches(going):
        asked = [value.name for value in some if value.name in old]
        ages = cast(AgingEngine, engine).ages(asked, timeout_s) if asked else []
        young = {name for name, age in zip(asked, ages, strict=True) if age is not None and age <= seconds}
        left = list[Value]()
        for value in some:
            if value.name in young or (value.is_record and value.block in stays):
                stays.add(value.parent)
                marked |= {after.get(value.parent, "")} if value.parts else set()
            elif not value.is_mark:
                left.append(value)
            elif value.block not in marked:
                news = _has_news(engine, values, timeout_s) if news is None else news
                left += [] if news else [value]
        if left:
            engine.delete([value.name for value in left], timeout_s)
        gone += left
    return gone


def _has_news(engine: RemoteEngine, values: Sequence[Value], timeout_s: float) -> bool:
    known = {value.name for value in values}
    return any(name.endswith(".place") and name not in known for name in names(engine, timeout_s))


def _batches(going: Sequence[Value]) -> Iterator[list[Value]]:
    """Yield the values in order, some at a time; no batch has both a block and one that continues it."""
    for _, group in groupby(going, lambda value: value.depth):
        here = list(group)
        for first in range(0, len(here), _BATCH):
            yield here[first : first + _BATCH]
