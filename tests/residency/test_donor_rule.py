"""One rule of who may be a donor, for one block and for a whole catalog alike."""

from __future__ import annotations

from itertools import product

import numpy as np

from kvstore.residency.donor_rule import may_be_donor


def test_only_a_whole_lasting_block_that_stands_alone_and_is_there_may_be_a_donor() -> None:
    good = {"record": 5, "parent": 4, "tokens": 64, "block_tokens": 64, "expiry": 0.0, "is_member": False}
    assert may_be_donor(**good, is_indexed=True)  # type: ignore[arg-type]
    changes = [{"parent": 5}, {"tokens": 63}, {"expiry": 1.0}, {"is_member": True}, {"is_unwritten": True}]
    for change in [*changes, {"is_indexed": False}]:
        assert not may_be_donor(**{**good, "is_indexed": True, **change})  # type: ignore[arg-type]


def test_columns_are_judged_as_single_blocks_are() -> None:
    rows = list(product([5, 6], [5, 0], [64, 10], [0.0, 1e12], [False, True], [False, True], [False, True]))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    names = ("record", "parent", "tokens", "expiry", "is_member", "is_indexed", "is_unwritten")
    together = may_be_donor(block_tokens=64, **dict(zip(names, columns, strict=True)))
    one_by_one = [bool(may_be_donor(block_tokens=64, **dict(zip(names, row, strict=True)))) for row in rows]
    assert together.tolist() == one_by_one
    assert 0 < sum(one_by_one) < len(rows)
