"""Requests to a tier that evicts in the order of a policy."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction import EvictionPolicy


def use(policy: EvictionPolicy, held: set[int], path: Sequence[int], capacity: int) -> int:
    """One request as a tier with room for so many records serves it: how many of its records it held."""
    policy.touch(path)
    hits = 0
    for record in path[:capacity]:
        if record in held:
            hits += 1
            continue
        if len(held) == capacity:
            victim = next(policy.victims())
            held.remove(victim)
            policy.discard(victim)
        held.add(record)
        policy.add(record)
    policy.touch(path)
    return hits
