"""A fast implementation beside a slow and plain one: whatever is asked of both, both must answer the same."""

from __future__ import annotations

from typing import Any

import numpy as np


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
