"""The policy that goes by whichever of several orders would have saved most."""

from __future__ import annotations

import random

import pytest
import seeds
from policyruns import use

from kvstore.eviction import Adaptive, EvictionPolicy, PriorGuided
from kvstore.eviction.adaptive import EXPERTS


def replay(policy: EvictionPolicy, trace: list[list[int]], capacity: int, held: set[int] | None = None) -> int:
    """Hit records of requests as a tier with room for so many records serves them."""
    held = set() if held is None else held
    return sum(use(policy, held, path, capacity) for path in trace)


def mixed(requests: int, seed: int) -> list[list[int]]:
    """Sessions that grow by two records a turn, and prompts of six that come once."""
    chance, fresh = random.Random(seeds.nth(seed)), iter(range(1, 1 << 30))
    opened: list[list[int]] = []
    trace = []
    for _ in range(requests):
        if len(opened) < 8:
            opened.append([1 << 31])
        if chance.random() < 0.4:
            trace.append([next(fresh) for _ in range(6)])
            continue
        path = opened.pop(chance.randrange(len(opened)))
        path = [*path, next(fresh), next(fresh)]
        trace.append(path)
        if len(path) < 16:
            opened.append(path)
    return trace


@pytest.mark.parametrize("name", EXPERTS)
def test_with_one_order_it_does_what_that_order_does(name: str) -> None:
    trace = mixed(500, seed=5)
    assert replay(Adaptive(experts=[name]), trace, 60) == replay(EXPERTS[name](None), trace, 60) > 0


def test_it_comes_close_to_the_best_order_and_changes_with_the_requests() -> None:
    chance = random.Random(seeds.nth(6))
    # Favourites among many that come once, then other ones.
    scan = [[chance.choice(range(1, 40))] if chance.random() < 0.5 else [1000 + i] for i in range(3000)]
    phase = [[chance.choice(range(500, 540))] if chance.random() < 0.5 else [9000 + i] for i in range(3000)]
    trace = scan + phase
    policy = Adaptive()
    found = {name: replay(make(None), trace, 40) for name, make in EXPERTS.items()}
    assert max(found.values()) - min(found.values()) > 100  # the control: it matters which is followed
    assert replay(policy, trace, 40) >= max(found.values()) - 0.02 * len(trace)


def test_it_follows_another_order_once_that_saves_more() -> None:
    policy = Adaptive(experts=["prior", "arc"])
    prior, arc = policy._shadows
    held = set[int]()
    prior.saved = 1e6
    replay(policy, mixed(100, seed=7), 40, held)
    assert policy._leader is prior
    arc.saved = 2e6
    replay(policy, [[1 << 40]], 40, held)
    assert policy._leader is arc
    had_left = arc.held - held
    replay(policy, [[(1 << 41) + 2 * i, (1 << 41) + 2 * i + 1] for i in range(200)], 40, held)
    # What it holds became what that order would hold, but for what it had given up before.
    assert held == set(policy._leaves)
    assert arc.held - held <= had_left
    assert len(arc.held & held) > 10


def test_what_saves_more_is_worth_more_to_the_shadows() -> None:
    policy = Adaptive(saving=lambda record: 10.0 if record == 1 else 1.0)
    for record in (1, 2, 1, 2):
        policy.touch([record])
        policy.add(record)
    assert [shadow.saved for shadow in policy._shadows] == [11.0, 11.0, 11.0]


def test_a_record_that_was_deleted_leaves_the_shadows_and_one_that_was_evicted_stays() -> None:
    policy = Adaptive()
    for record in (1, 2, 3):
        policy.touch([record])
        policy.add(record)
    policy.discard(1)
    assert all(1 not in shadow.held for shadow in policy._shadows)
    victim = next(policy.victims())
    policy.discard(victim)
    assert all(victim in shadow.held for shadow in policy._shadows)


def test_shadows_hold_no_more_than_the_tier_did_when_it_was_full() -> None:
    policy = Adaptive()
    replay(policy, mixed(300, seed=8), 50)
    assert all(0 < len(shadow.held) <= 50 for shadow in policy._shadows)
    assert all(len(shadow.order) == len(shadow.held) for shadow in policy._shadows)
    assert len(policy._leaves.queues()) <= 4


def test_what_a_store_found_at_open_has_its_parents_and_uses_in_the_shadows_too() -> None:
    policy = Adaptive()
    for record, parent, uses in [(5, 0, 7), (3, 5, 1), (9, 3, 1)]:
        policy.add(record, parent, 1, uses)
    for shadow in policy._shadows:
        assert list(shadow.order.victims()) == [9, 3, 5]
    prior = policy._shadows[0].order
    assert isinstance(prior, PriorGuided)
    assert [prior._known[record].uses for record in (5, 3, 9)] == [7, 1, 1]
