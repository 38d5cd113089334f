"""Weights to whole numbers, so that errors of rounding make up for each other (GPTQ, arXiv:2210.17323)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROWS = 64  # of weights whose errors are passed on together
Floats = npt.NDArray[Any]


def rounded(weight: Floats, gram: Floats) -> Floats:
    """Round weights one input after the other; what each loses, later ones make up for as well as they can.

    Args:
        weight: `[inputs, columns]`, in units of one.
        gram: products of the inputs, `[inputs, inputs]`, positive definite.

    Returns:
        Whole numbers from -127 to 127, float64 of the shape of `weight`.
    """
    left, found = weight.astype(np.float64), np.zeros(weight.shape)
    if not len(left):
        return found
    upper = np.linalg.cholesky(np.linalg.inv(gram)).T
    for begin in range(0, len(left), _ROWS):
        rows = slice(begin, begin + _ROWS)
        inner, part = upper[rows, rows], left[rows]
        errors = np.zeros_like(part)
        for i in range(len(part)):
            found[begin + i] = np.rint(part[i]).clip(-127, 127)
            errors[i] = (part[i] - found[begin + i]) / inner[i, i]
            part[i + 1 :] -= inner[i, i + 1 :, None] * errors[i]
        left[begin + _ROWS :] -= upper[rows, begin + _ROWS :].T @ errors
    return found
