"""The simulated fleet finds what is to be found."""

from __future__ import annotations

import pytest
from benchmodules import load

simulation = load("drills.simulation")
CALLS = [(float(second), [second % 7 * 10 + i for i in range(8)]) for second in range(200)]  # 7 prompts of 8 blocks


@pytest.mark.parametrize("machines", [1, 10, 1000])
def test_with_locality_or_a_remote_tier_all_that_was_computed_is_found(machines: int) -> None:
    assumed = simulation.Assumed(per_copy=10, most_copies=1)
    backlogs = None if machines <= 10 else [0.0]
    most = (len(CALLS) - 7) * 7 / (len(CALLS) * 8)  # the last block of a prompt is always computed
    near = simulation.settled(CALLS, assumed, machines, "locality", False, backlogs)
    assert near.local / near.blocks == pytest.approx(most)
    far = simulation.settled(CALLS, assumed, machines, "chance", True, backlogs)
    assert (far.local + far.remote) / far.blocks == pytest.approx(most)
    assert far.stored == far.written == 7 * 8
    assert sum(near.ttft) < sum(far.ttft) or machines == 1


def test_by_chance_alone_large_fleets_find_little() -> None:
    assumed = simulation.Assumed(most_copies=1)
    found = simulation.settled(CALLS, assumed, 1000, "chance", False, [0.0])
    assert found.local / found.blocks < 0.1
    assert found.remote == found.written == 0


def test_a_machine_that_is_busy_makes_requests_wait() -> None:
    assumed = simulation.Assumed(flops=1e14)  # 15 s a prompt and more
    found = simulation.Simulation(assumed, 1, "chance", False, 0.0, None).run(CALLS[:10])
    assert found.ttft == sorted(found.ttft)
    assert found.ttft[-1] > 5 * found.ttft[0]
