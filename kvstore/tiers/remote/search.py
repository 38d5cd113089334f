"""How far a sequence is stored: asks for few of its keys, where asking is slow. Pure but for what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def leading(
    keys: Sequence[bytes],
    believed: Callable[[bytes], bool | None],
    ask: Callable[[Sequence[bytes]], Sequence[bool | None]],
    batch: int,
) -> int:
    """Return how many of the first keys seem to be there. What is there without its parents does not count.

    Blocks are written parents first, so where one is there, those before it nearly always are: of many keys only some
    are asked for, `batch` at a time, as in a search with `batch` + 1 ways. Who reads finds out if one is missing.

    Args:
        believed: whether a key is there, if that is known.
        ask: whether keys are there; None where that cannot be known now, which ends the search.
        batch: so many keys are asked for as fast as one.

    Example:
        >>> stored, asked = {b"a", b"b", b"c"}, []
        >>> def ask(keys):
        ...     asked.append(len(keys))
        ...     return [key in stored for key in keys]
        >>> leading([b"a", b"b", b"c", b"d", b"e", b"f"], lambda key: None, ask, batch=2), asked
        (3, [2, 1])
    """
    low, high = 0, len(keys)  # the first `low` are there; the one at `high` is not, or there is none
    while low < high and believed(keys[low]):
        low += 1
    for i in range(low, high):
        if believed(keys[i]) is False:
            high = i
            break
    while low < high:
        count, width = min(max(1, batch), high - low), high - low
        at = (
            [low + i for i in range(count)]
            if count == width
            else [low + (i + 1) * width // (count + 1) for i in range(count)]
        )
        for i, there in zip(at, ask([keys[i] for i in at]), strict=True):
            if there is None:
                return low
            if not there:
                high = i
                break
            low = i + 1
    return low
