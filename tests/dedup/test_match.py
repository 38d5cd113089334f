"""Which blocks are coded against which: spans that donors hold, and who may be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import family_stores
import numpy as np
import pytest
import seeds
from family_stores import BLOCK, IDENTITY, LAYOUT, behind, config, join, passage

from kvstore.codecs import KVView
from kvstore.core.explanation import Reason
from kvstore.core.keys import chain_keys, chain_root, namespace_digest
from kvstore.dedup.match import _LEAST_SHARE, _MOST_SPANS, DonorMatcher
from kvstore.metrics import Metrics
from kvstore.residency.block import Block
from kvstore.residency.residency import Residency
from kvstore.trie import TrieIndex
from kvstore.trie.content import ContentIndex, DonorSpan

TEXT = passage(1)
Tokens = np.ndarray[Any, Any]
Put = Callable[..., list[Block]]


@pytest.fixture
def matchmaker() -> DonorMatcher:
    content = ContentIndex(seed=1)
    residency = Residency(config(), TrieIndex(BLOCK), Metrics(), content)
    return DonorMatcher(residency, content, BLOCK, members=True, stored_only=False)


@pytest.fixture
def put(matchmaker: DonorMatcher) -> Put:
    """Enters a sequence in index and queue as `PutPath` does; returns its blocks, which are not planned yet."""
    numbers = iter(range(1, 1000))

    def enter(tokens: Tokens, namespace: bytes = b"", expiry: float = 0.0, alone: bool = False) -> list[Block]:
        digest = namespace_digest(namespace)
        root = chain_root(IDENTITY.digest, digest, BLOCK)
        keys = [root, *chain_keys(root, tokens, BLOCK)]
        view = KVView.of_layers(LAYOUT, family_stores.kv_of(tokens, namespace))
        blocks: list[Block] = []
        for i, start in enumerate(range(0, len(tokens), BLOCK)):
            here = np.ascontiguousarray(tokens[start : start + BLOCK])
            blocks.append(
                Block(
                    record=next(numbers),
                    parent=blocks[-1].record if blocks else 0,
                    key=keys[i + 1],
                    parent_key=keys[i],
                    namespace=digest,
                    start=start,
                    tokens=here,
                    view=view.narrow(start, len(here)),
                    bits=1.0,
                    expiry=expiry,
                    pinned=False,
                    alone=alone,
                )
            )
        residency = matchmaker.residency
        residency.arrive(tokens, blocks)
        return blocks

    return enter


def check(blocks: list[Block], plans: list[tuple[DonorSpan, ...]], everything: dict[int, Block]) -> None:
    """Spans rise, are disjoint, lie in their block, and hold the donor's very tokens."""
    for block, spans in zip(blocks, plans, strict=True):
        end = 0
        assert len(spans) <= _MOST_SPANS
        for span in spans:
            donor = everything[span.record]
            assert end <= span.start
            end = span.start + span.length
            assert end <= len(block.tokens)
            theirs = donor.tokens[span.donor_start : span.donor_start + span.length]
            assert block.tokens[span.start : end].tolist() == theirs.tolist()


def test_the_first_of_its_kind_stands_alone_and_the_next_is_a_member(matchmaker: DonorMatcher, put: Put) -> None:
    first = put(TEXT)
    assert matchmaker.plan(first) == [()] * 4
    second = put(behind(10, TEXT))
    plans = matchmaker.plan(second)
    assert [len(spans) for spans in plans] == [0, 1, 1, 1, 1]
    check(second, plans, {block.record: block for block in first})
    donors_of, content = matchmaker.residency.donors_of, matchmaker.content
    assert [donors_of(b.record) for b in second] == [(), (1,), (2,), (3,), (4,)]
    # Depth 1: only what stands alone is in the content index.
    assert [b.record in content for b in [*first, *second]] == [True] * 5 + [False] * 4


@pytest.mark.parametrize("seed", range(12))
def test_spans_are_right_for_any_mixture_of_passages(matchmaker: DonorMatcher, put: Put, seed: int) -> None:
    rng = np.random.default_rng(seeds.nth(seed))
    everything: dict[int, Block] = {}
    found = 0
    for turn in range(8):
        parts = []
        if turn in (0, 7):  # whatever chance says, the last has donors
            parts = [passage(turn + 1, 5), *map(passage, range(1, 5))]
        for number in rng.integers(1, 5, int(rng.integers(1, 4))):
            begin = int(rng.integers(0, 60))
            parts.append(passage(int(number))[begin : begin + int(rng.integers(20, 128))])
            parts.append(passage(int(rng.integers(100, 1000)), int(rng.integers(1, 20))))
        blocks = put(join(*parts))
        everything |= {block.record: block for block in blocks}
        plans = matchmaker.plan(blocks)
        check(blocks, plans, everything)
        for block, spans in zip(blocks, plans, strict=True):
            covered = sum(span.length for span in spans)
            assert not spans or covered >= _LEAST_SHARE * len(block.tokens)
            donors = matchmaker.residency.donors_of(block.record)
            assert donors == tuple(dict.fromkeys(span.record for span in spans))
            assert not any(matchmaker.residency.donors_of(donor) for donor in donors)
            found += bool(spans)
    assert found > 3


def test_blocks_of_one_plan_may_be_coded_against_each_other(matchmaker: DonorMatcher, put: Put) -> None:
    first, second = put(TEXT), put(behind(10, TEXT))
    plans = matchmaker.plan([*first, *second])
    assert [bool(spans) for spans in plans] == [False] * 5 + [True] * 4


def test_without_members_every_block_is_offered(matchmaker: DonorMatcher, put: Put) -> None:
    nobody = DonorMatcher(matchmaker.residency, matchmaker.content, BLOCK, members=False, stored_only=False)
    blocks = put(TEXT) + put(behind(10, TEXT))
    assert nobody.plan(blocks) == [()] * 9
    assert all(block.record in matchmaker.content for block in blocks)


def test_a_block_that_is_to_stand_alone_does(matchmaker: DonorMatcher, put: Put) -> None:
    matchmaker.plan(put(TEXT))
    blocks = put(behind(10, TEXT), alone=True)
    assert matchmaker.plan(blocks) == [()] * 5
    assert all(block.record in matchmaker.content for block in blocks)


def test_what_was_pinned_meanwhile_stands_alone(matchmaker: DonorMatcher, put: Put) -> None:
    matchmaker.plan(put(TEXT))
    blocks = put(behind(10, TEXT))
    matchmaker.residency.pin(blocks[2].record)
    assert [bool(spans) for spans in matchmaker.plan(blocks)] == [False, False, False, True, True]


def test_namespaces_never_meet(matchmaker: DonorMatcher, put: Put) -> None:
    matchmaker.plan(put(TEXT))
    assert matchmaker.plan(put(behind(10, TEXT), b"other")) == [()] * 5


def test_tails_and_what_has_an_end_of_life_are_not_offered(matchmaker: DonorMatcher, put: Put) -> None:
    mortal, tail = put(TEXT, expiry=1e12), put(passage(2, BLOCK + 20))
    matchmaker.plan(mortal)
    matchmaker.plan(tail)
    assert not any(block.record in matchmaker.content for block in mortal)
    assert [block.record in matchmaker.content for block in tail] == [True, False]


@pytest.mark.parametrize("why", ["deleted", "unwritten", "mortal", "not on disk"])
def test_donors_that_may_not_serve_do_not(matchmaker: DonorMatcher, put: Put, why: str) -> None:
    donors = put(TEXT)
    matchmaker.plan(donors)
    residency = matchmaker.residency
    if why == "not on disk":
        matchmaker = DonorMatcher(residency, matchmaker.content, BLOCK, members=True, stored_only=True)
    for block in donors:
        if why == "deleted":
            residency.index.remove(block.record)  # and not yet from the content index
        elif why == "unwritten":
            residency._unwritten.add(block.record)
        elif why == "mortal":
            residency.set_expiry(block.record, 1e12)
    assert matchmaker.plan(put(behind(10, TEXT))) == [()] * 5


def test_a_donor_that_is_deleted_while_it_is_chosen_gets_no_members(matchmaker: DonorMatcher, put: Put) -> None:
    """A delete asks for members after it took the donor out of the index: who enters later must notice that."""
    donors = put(TEXT)
    matchmaker.plan(donors)
    blocks = put(behind(10, TEXT))
    residency = matchmaker.residency
    used = residency.use_donors

    def deleted_meanwhile(records: Any) -> None:
        used(records)
        for block in donors:
            residency.index.remove(block.record)
        assert residency.family_stats()["members"] == 0  # what the delete sees

    residency.use_donors = deleted_meanwhile  # type: ignore[method-assign]
    assert matchmaker.plan(blocks)[1] == ()
    assert residency.family_stats()["members"] == 0


def test_a_sequence_that_was_deleted_since_is_planned_all_the_same(matchmaker: DonorMatcher, put: Put) -> None:
    matchmaker.plan(put(TEXT))
    blocks = put(behind(10, TEXT))
    matchmaker.residency.forget([block.record for block in blocks], Reason.DELETED)
    assert matchmaker.plan(blocks) == [()] * 5
    assert not any(block.record in matchmaker.content for block in blocks)
    assert matchmaker.residency.family_stats()["members"] == 0


def test_a_member_that_stands_alone_after_all_is_offered(matchmaker: DonorMatcher, put: Put) -> None:
    matchmaker.plan(put(TEXT))
    blocks = put(behind(10, TEXT))
    assert matchmaker.plan(blocks)[2]
    matchmaker.stand_alone(blocks[2])
    assert matchmaker.residency.donors_of(blocks[2].record) == ()
    assert blocks[2].record in matchmaker.content


def test_donors_were_used_when_a_member_is_planned(matchmaker: DonorMatcher, put: Put) -> None:
    """So that they are not the next to be evicted."""
    residency = matchmaker.residency
    first, other = put(TEXT), put(passage(2))
    matchmaker.plan([*first, *other])
    matchmaker.plan(put(behind(10, TEXT)))
    evicted = [residency.index.evict() for _ in range(4)]
    assert evicted == [block.record for block in reversed(other)]


def test_nothing_is_planned_for_nobody(matchmaker: DonorMatcher) -> None:
    assert matchmaker.plan([]) == []
