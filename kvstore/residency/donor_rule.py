"""Which blocks may be donors: the one rule, for one block and for the columns of a whole catalog."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Flag = bool | npt.NDArray[np.bool_]
Number = int | float | npt.NDArray[Any]


def may_be_donor(
    *,
    record: Number,
    parent: Number,
    tokens: Number,
    block_tokens: int,
    expiry: Number,
    is_member: Flag,
    is_indexed: Flag,
    is_unwritten: Flag = False,
) -> Flag:
    """Return whether others may be coded against a block.

    Args are scalars, or arrays `[n]` of one length.

    Args:
        record: its number.
        parent: number of the block before it.
        tokens: how many tokens it has.
        block_tokens: how many a whole block has.
        expiry: unix seconds; 0 for never.
        is_member: it is coded against others itself.
        is_indexed: it can be found.
        is_unwritten: its write failed, so it is in memory only.

    Returns:
        A bool, or bools `[n]`.

    Example:
        >>> rule = dict(parent=6, tokens=64, block_tokens=64, expiry=0.0, is_member=False, is_indexed=True)
        >>> may_be_donor(record=7, **rule)
        True
    """
    whole = tokens == block_tokens  # tails are replaced when a sequence grows
    lasting = expiry == 0  # it would have to keep its members alive beyond its own end
    alone = is_member ^ True  # reading a member takes one step and not a chain of them
    sane = record != parent  # an entry that names itself as its parent is damaged
    return whole & lasting & alone & sane & is_indexed & (is_unwritten ^ True)
