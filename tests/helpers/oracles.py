"""A fast implementation beside a slow and plain one: whatever is asked of both, both must answer the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def u32(values: Any) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(values: Any) -> np.ndarray:
    return np.array(values, np.uint64)


def plain(result: Any) -> Any:
    """A result without arrays, so that two of them can be compared."""
    if isinstance(result, tuple):
        return [plain(part) for part in result]
    return result.tolist() if isinstance(result, np.ndarray) else result


def both(fast: Any, slow: Any, name: str, *arguments: Any) -> Any:
    """Calls the method of that name of both; their equal results, or `ValueError` where both raise it."""
    outcomes = []
    for one in (fast, slow):
        try:
            outcomes.append(plain(getattr(one, name)(*arguments)))
        except ValueError:
            outcomes.append(ValueError)
    assert outcomes[0] == outcomes[1], (name, arguments)
    return outcomes[1]


def same_stats(fast: Any, slow: Any) -> dict[str, int]:
    """Checks that `fast` says of itself what `slow` does; returns all that it says."""
    found, want = fast.stats(), slow.stats()
    assert {name: found[name] for name in want} == want
    stats: dict[str, int] = found
    return stats


def run_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Runs so many histories of a state machine, of at most so many steps each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
