"""The prefix tree: what is shown adds up to what is stored, whatever is folded."""

from __future__ import annotations

import numpy as np
import pytest
import seeds
from reportcases import table_of

from kvstore.report.tree import PrefixTree
from kvstore.residency.block_table import ROW, BlockTable


@pytest.mark.parametrize("count", [0, 1, 7, 500, 5000])
@pytest.mark.parametrize("most", [3, 40, 10_000])
def test_every_block_is_in_some_node(count: int, most: int) -> None:
    table = table_of(count, seeds.nth(count))
    tree = PrefixTree(table)
    nodes = tree.nodes(most)
    assert len(nodes) <= most + 2
    whole = [node for node in nodes if node.parent < 0]
    assert sum(node.bytes for node in whole) == int(table.rows["bytes"].sum())
    assert sum(node.all_tokens for node in whole) == int(table.rows["count"].sum())
    assert sum(node.sequences for node in whole) == int(tree.is_last.sum())
    for node in nodes:
        behind = [each for each in nodes if each.parent == node.id]
        assert all(each.id > node.id for each in behind)
        if behind:  # all of them are there, as themselves or as "other"
            assert sum(each.all_tokens for each in behind) + node.tokens == node.all_tokens
            assert sum(each.sequences for each in behind) in (node.sequences, node.sequences - 1)
        else:
            assert node.tokens == node.all_tokens or node.folded or node.kind == "namespace"
        assert node.probability is None or 0 < node.probability <= 1


def test_runs_that_are_used_alike_are_one_and_probabilities_follow_traffic() -> None:
    rows = np.zeros(5, ROW)
    rows["record"], rows["parent"] = [1, 2, 3, 4, 5], [0, 1, 2, 2, 4]
    rows["start"], rows["count"], rows["bytes"] = [0, 4, 8, 8, 12], 4, 4096
    rows["uses"], rows["bits"] = [10, 10, 9, 1, 1], 64  # 16 bits a token
    space, run, often, seldom = PrefixTree(BlockTable(rows, np.arange(20, dtype=np.uint32), (bytes(32),))).nodes()
    assert (space.kind, space.sequences, space.uses) == ("namespace", 2, 10)
    assert (run.tokens, run.uses, run.begins) == (8, 10, (0, 1, 2, 3))
    assert {often.tokens, seldom.tokens} == {4, 8}
    by_uses = {node.uses: node.probability for node in (often, seldom)}
    assert by_uses[9] == pytest.approx((9 + 4 * 2**-16) / 14)
    assert by_uses[1] == pytest.approx((1 + 4 * 2**-16) / 14)


def test_what_sequences_would_take_alone() -> None:
    rows = np.zeros(3, ROW)
    rows["record"], rows["parent"], rows["start"], rows["count"] = [1, 2, 3], [0, 1, 1], [0, 4, 4], [4, 4, 2]
    assert PrefixTree(BlockTable(rows, np.zeros(10, np.uint32), (bytes(32),))).sequence_tokens == 8 + 6
