"""Weights to whole numbers, so that errors of rounding make up for each other (GPTQ, arXiv:2210.17323).

Large products are torch's: its threads have the priority of the one that asks, numpy's that of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.predictive.cholesky import factored, forward

_ROWS = 64  # of weights whose errors are passed on together
Floats = npt.NDArray[Any]


def rounded(weight: Floats, gram: Floats, pause: Callable[[], None] = lambda: None) -> Floats:
    """Round weights one input after the other; what each loses, later ones make up for as well as they can.

    Args:
        weight: `[inputs, columns]`, in units of one.
        gram: products of the inputs, `[inputs, inputs]`, positive definite.
        pause: called before every step of some milliseconds.

    Returns:
        Whole numbers from -127 to 127, float64 of the shape of `weight`.
    """
    left, found = weight.astype(np.float64), np.zeros(weight.shape)
    if not len(left):
        return found
    # With the inputs in reverse `gram` is L L^T, and so its inverse U^T U, where U is the inverse of L in reverse.
    lower = factored(torch.from_numpy(gram).flip(0, 1), pause)
    upper = forward(lower, torch.eye(len(gram), dtype=torch.double), pause).flip(0, 1).numpy()
    for begin in range(0, len(left), _ROWS):
        pause()
        rows = slice(begin, begin + _ROWS)
        inner, part = upper[rows, rows], left[rows]
        errors = np.zeros_like(part)
        for i in range(len(part)):
            found[begin + i] = np.rint(part[i]).clip(-127, 127)
            errors[i] = (part[i] - found[begin + i]) / inner[i, i]
            part[i + 1 :] -= inner[i, i + 1 :, None] * errors[i]
        left[begin + _ROWS :] -= (torch.from_numpy(upper[rows, begin + _ROWS :].T) @ torch.from_numpy(errors)).numpy()
    return found
