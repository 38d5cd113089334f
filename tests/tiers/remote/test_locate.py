"""The search for parcels finds what a walk from block to block finds, and asks less."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvstore.tiers.remote.locate import Asking, locate

GROUP = 4


def _chain(count: int, name: str = "a") -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(count)]


@dataclass
class Bucket:
    """Parcels by their first blocks, blocks that are values of their own, and what nobody can say now."""

    parcels: dict[bytes, list[bytes]] = field(default_factory=dict)
    alone: set[bytes] = field(default_factory=set)
    silent: set[bytes] = field(default_factory=set)
    silent_alone: set[bytes] = field(default_factory=set)
    known: set[bytes] = field(default_factory=set)
    lacks: set[bytes] = field(default_factory=set)
    rounds: list[Sequence[bytes]] = field(default_factory=list)

    def asking(self) -> Asking:
        return Asking(self.known.__contains__, self.lacks.__contains__, self._heads, self._alone)

    def _heads(self, keys: Sequence[bytes]) -> list[Sequence[bytes] | None]:
        self.rounds.append(keys)
        return [None if key in self.silent else self.parcels.get(key, ()) for key in keys]

    def _alone(self, keys: Sequence[bytes]) -> tuple[int, bool]:
        count = next((at for at, key in enumerate(keys) if key not in self.alone), len(keys))
        return count, count == len(keys) or keys[count] not in self.silent_alone

    def walk(self, keys: Sequence[bytes], at: int = 0) -> int:
        """The reference: from block to block."""
        begin = at
        while at < len(keys):
            held = self.parcels.get(keys[at], [])
            shared = next((i for i, (a, b) in enumerate(zip(held, keys[at:], strict=False)) if a != b), None)
            shared = min(len(held), len(keys) - at) if shared is None else shared
            if not shared and keys[at] not in self.alone:
                break
            at += max(1, shared)
        return at - begin


def _filled(chance: random.Random, keys: Sequence[bytes], other: Sequence[bytes]) -> Bucket:
    """Parcels of any lengths inside of groups, some of which go on with other blocks; some blocks alone; some holes."""
    bucket, at = Bucket(), 0
    while at < len(keys):
        stop = min(len(keys), at // GROUP * GROUP + GROUP)
        count = chance.randrange(1, stop - at + 1)
        kind = chance.random()
        if kind < 0.1:
            bucket.alone.update(keys[at : at + count])
        elif kind < 0.97:
            more = other[at + count : stop] if chance.random() < 0.4 else []
            bucket.parcels[keys[at]] = [*keys[at : at + count], *more]
        at += count
    return bucket


@pytest.mark.parametrize("seed", range(300))
def test_it_finds_what_a_walk_finds(seed: int) -> None:
    chance = random.Random(seed)
    keys, other = _chain(chance.randrange(1, 40)), _chain(40, "b")
    bucket = _filled(chance, keys, other)
    assert locate(keys, 0, GROUP, bucket.asking()) == (bucket.walk(keys), True)
    asked = [key for some in bucket.rounds for key in some]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("seed", range(100))
def test_what_is_known_need_not_be_asked(seed: int) -> None:
    chance = random.Random(seed)
    keys = _chain(chance.randrange(1, 40))
    bucket = _filled(chance, keys, _chain(40, "b"))
    count = bucket.walk(keys)
    held = [*bucket.parcels.values(), *([key] for key in bucket.alone)]
    bucket.known = {key for some in held if chance.random() < 0.5 for key in some}
    assert locate(keys, 0, GROUP, bucket.asking()) == (count, True)
    assert not bucket.known.intersection(key for some in bucket.rounds for key in some)


@pytest.mark.parametrize("wanted", range(12))
def test_what_begins_before_the_blocks_that_are_wanted_is_found(wanted: int) -> None:
    keys = _chain(11)
    parcels = {keys[0]: keys[:1], keys[1]: keys[1:4], keys[4]: keys[4:8], keys[8]: keys[8:]}
    border = wanted // GROUP * GROUP
    bucket = Bucket(parcels)
    assert locate(keys[border:], border, GROUP, bucket.asking(), wanted - border) == (max(0, 11 - wanted), True)


def test_what_is_wanted_is_found_where_what_comes_before_is_not_there() -> None:
    keys = _chain(8)
    bucket = Bucket({keys[2]: keys[2:4], keys[4]: keys[4:]})
    assert locate(keys, 0, GROUP, bucket.asking(), 2) == (6, True)
    assert locate(keys, 0, GROUP, Bucket(alone=set(keys[2:])).asking(), 2) == (6, True)
    assert locate(keys, 0, GROUP, Bucket().asking(), 2) == (0, True)


def test_whole_groups_take_one_question_each_and_few_rounds() -> None:
    keys = _chain(100 * GROUP)
    bucket = Bucket({keys[at]: keys[at : at + GROUP] for at in range(0, len(keys), GROUP)})
    assert locate(keys, 0, GROUP, bucket.asking()) == (len(keys), True)
    assert [len(some) for some in bucket.rounds] == [8, 16, 32, 44]


def test_where_nothing_is_few_questions_are_asked_and_none_where_that_is_known() -> None:
    keys = _chain(100 * GROUP)
    bucket = Bucket()
    assert locate(keys, 0, GROUP, bucket.asking()) == (0, True)
    assert [len(some) for some in bucket.rounds] == [8]
    bucket = Bucket(lacks=set(keys))
    assert locate(keys, 0, GROUP, bucket.asking()) == (0, True)
    assert [len(some) for some in bucket.rounds] == [1]  # `heads` knows that itself


def test_values_of_their_own_are_found_without_a_question_for_each_group() -> None:
    keys = _chain(100 * GROUP)
    bucket = Bucket(alone=set(keys))
    assert locate(keys, 0, GROUP, bucket.asking()) == (len(keys), True)
    assert len(bucket.rounds) == 1


@pytest.mark.parametrize("at", range(0, 12, GROUP))
def test_what_is_not_answered_ends_the_search_and_is_not_sure(at: int) -> None:
    keys = _chain(12)
    parcels = {keys[i]: keys[i : i + GROUP] for i in range(0, 12, GROUP)}
    bucket = Bucket(parcels, silent={keys[at]})
    assert locate(keys, 0, GROUP, bucket.asking()) == (at, False)
    del parcels[keys[at]]
    assert locate(keys, 0, GROUP, Bucket(parcels, silent_alone={keys[at]}).asking()) == (at, False)


def test_a_hole_before_what_is_not_answered_is_sure() -> None:
    keys = _chain(12)
    assert locate(keys, 0, GROUP, Bucket({keys[0]: keys[:4]}, silent={keys[8]}).asking()) == (4, True)
