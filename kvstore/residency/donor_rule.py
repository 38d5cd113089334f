"""Who may be a donor: the one rule, for one block and for the columns of a whole catalog alike."""

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
) -> npt.NDArray[np.bool_]:
    """Whether others may be coded against a block. Scalars, or arrays of one length; the result is 0-D or an array.

    record, parent: its number and that of the block before it. tokens: how many it has. is_indexed: whether it can be
    found. is_unwritten: whether its write failed, so that it is in memory only.
    """
    whole = np.equal(tokens, block_tokens)  # tails are replaced when a sequence grows
    lasting = np.equal(expiry, 0)  # it would have to keep its members alive beyond its own end
    alone = np.logical_not(is_member)  # reading a member takes one step and not a chain of them
    sane = np.not_equal(record, parent)  # an entry that names itself as its parent is damaged
    there = np.logical_and(is_indexed, np.logical_not(is_unwritten))
    return np.asarray(whole & lasting & alone & sane & there)
