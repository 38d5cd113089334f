"""How far a sequence is stored in parcels: asks for few of their heads. Pure but for what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FIRST_HEADS, _MOST_HEADS = 8, 64  # that are asked for at a time


@dataclass(frozen=True)
class Asking:
    """What a search asks.

    Attributes:
        known: whether it is known that a block is there.
        lacks: whether it is known that no parcel begins with a block; asks nobody.
        heads: the keys in the parcels that begin with these blocks, asking for all at once; () for no parcel, None
            where that cannot be known now.
        alone: how many of the first of these blocks are values of their own, and whether that is sure.
    """

    known: Callable[[bytes], bool]
    lacks: Callable[[bytes], bool]
    heads: Callable[[Sequence[bytes]], Sequence[Sequence[bytes] | None]]
    alone: Callable[[Sequence[bytes]], tuple[int, bool]]


def locate(keys: Sequence[bytes], first: int, group: int, asking: Asking, wanted: int = 0) -> tuple[int, bool]:
    """Return how many of these blocks, which follow each other, seem to be there without a gap from `wanted` on, and
    whether that is sure: False if a question was not answered in time.

    Where nothing else is there, a parcel begins at a border of groups, or where another one ends. So groups are asked
    side by side, some at first and then more, each at its first block of which nothing is known; the search ends at the
    first block that is neither in a parcel nor a value of its own.

    Args:
        first: number of the first block in its sequence.
        group: blocks of a group.
        wanted: blocks before that one, of the same group, are only asked for what comes with them.

    Example:
        >>> parcels, asked = {b"a": [b"a", b"b"], b"c": [b"c"]}, []
        >>> def heads(keys):
        ...     asked.append(b"".join(keys))
        ...     return [parcels.get(key, ()) for key in keys]
        >>> asking = Asking(lambda key: False, lambda key: False, heads, lambda keys: (0, True))
        >>> locate([b"a", b"b", b"c", b"d"], 0, 2, asking), asked
        ((3, True), [b'ac', b'd'])
    """
    there = set[int]()
    headless, end, is_sure, most = set[int](), len(keys), True, _FIRST_HEADS

    def ask(places: Sequence[int]) -> None:
        nonlocal end, is_sure
        asked = [at for at in places if at not in headless]
        for at, held in zip(asked, asking.heads([keys[at] for at in asked]) if asked else (), strict=True):
            if held:
                there.update(range(at, at + _shared(held, keys[at:])))
            elif held is not None or at < wanted:
                headless.add(at)
            else:
                end, is_sure = min(end, at), False

    def known() -> set[int]:
        there.update(at for at, key in enumerate(keys) if at not in there and asking.known(key))
        return there

    while fronts := _fronts(known(), end, first, group, most, lambda at: asking.lacks(keys[at]), wanted):
        before = [at for at in range(wanted) if at not in there][:1] if fronts[0] == wanted else []
        ask([at for at in before if at not in headless] + fronts)
        if before and not headless.issuperset(before):
            continue  # the next parcel may have what is wanted
        stuck = next((at for at in fronts if at in headless and at not in there), end)
        if stuck < end:
            here, is_answered = asking.alone(keys[stuck : next((i for i in range(stuck, end) if i in there), end)])
            there.update(range(stuck, stuck + here))
            if not here:
                end, is_sure = stuck, is_answered
        most = min(2 * most, _MOST_HEADS)
    return max(0, end - wanted), is_sure


def _fronts(
    there: set[int], end: int, first: int, group: int, most: int, lacks: Callable[[int], bool], begin: int
) -> list[int]:
    """The first block from `begin` on that is not known to be there, of each of the first groups that have one; none
    behind a block with which no parcel begins."""
    fronts = list[int]()
    while begin < end and len(fronts) < most and not (fronts and lacks(fronts[-1])):
        stop = min(end, begin + group - (first + begin) % group)
        fronts += [at for at in range(begin, stop) if at not in there][:1]
        begin = stop
    return fronts


def _shared(held: Sequence[bytes], keys: Sequence[bytes]) -> int:
    """How many blocks both begin with; at least the one that was asked for."""
    count = 1
    while count < min(len(held), len(keys)) and held[count] == keys[count]:
        count += 1
    return count
