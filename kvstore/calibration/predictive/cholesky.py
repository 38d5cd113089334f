"""Systems of positive definite matrices, solved block by block, so that whoever works in idle time can pause between.

Left-looking Cholesky factors (Golub and Van Loan, Matrix Computations, 4.2). A step is a product of blocks: some
milliseconds, however large the matrix is. Nothing here changes its arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

SINGULAR = (np.linalg.LinAlgError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""What factoring a matrix raises that is not positive definite, here and in NumPy."""
_BLOCK = 128  # rows that are worked on together
_COLUMNS = 256  # right-hand sides that are worked on together
Pause = Callable[[], None]
Tensor = torch.Tensor


def nothing() -> None:
    """Do not pause."""


def factored(gram: Tensor, pause: Pause = nothing) -> Tensor:
    """Return the lower triangular factor L of `gram` = L L^T.

    Args:
        gram: symmetric and positive definite, float64 `[n, n]`.
        pause: called before every step.

    Raises:
        torch.linalg.LinAlgError: `gram` is not positive definite.

    Example:
        >>> factored(torch.tensor([[4.0, 2.0], [2.0, 10.0]]).double()).tolist()
        [[2.0, 0.0], [1.0, 3.0]]
    """
    found = gram.clone()
    for begin in range(0, len(gram), _BLOCK):
        own = slice(begin, begin + _BLOCK)
        pause()
        corner = torch.linalg.cholesky(found[own, own] - found[own, :begin] @ found[own, :begin].T)
        found[own, own] = corner
        for below in range(begin + _BLOCK, len(gram), _BLOCK):
            rows = slice(below, below + _BLOCK)
            pause()
            left = found[rows, own] - found[rows, :begin] @ found[own, :begin].T
            found[rows, own] = torch.linalg.solve_triangular(corner.T, left, upper=True, left=False)
    return found.tril()


def forward(lower: Tensor, right: Tensor, pause: Pause = nothing) -> Tensor:
    """Return X of `lower` X = `right`, float64 `[n, m]`; lower: as of `factored`."""
    found = right.clone()
    for columns in _strips(found):
        for begin in range(0, len(lower), _BLOCK):
            own = slice(begin, begin + _BLOCK)
            pause()
            left = columns[own] - lower[own, :begin] @ columns[:begin]
            columns[own] = torch.linalg.solve_triangular(lower[own, own], left, upper=False)
    return found


def solved(gram: Tensor, right: Tensor, pause: Pause = nothing) -> Tensor:
    """Return X of `gram` X = `right`, float64 `[n, m]`; as `factored`."""
    lower = factored(gram, pause)
    found = forward(lower, right, pause)
    for columns in _strips(found):
        for begin in reversed(range(0, len(lower), _BLOCK)):
            own, after = slice(begin, begin + _BLOCK), slice(begin + _BLOCK, None)
            pause()
            left = columns[own] - lower[after, own].T @ columns[after]
            columns[own] = torch.linalg.solve_triangular(lower[own, own].T, left, upper=True)
    return found


def _strips(x: Tensor) -> list[Tensor]:
    """Views of some columns each."""
    return [x[:, begin : begin + _COLUMNS] for begin in range(0, x.shape[1], _COLUMNS)]
