"""Token ids, as every part of the store has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.tensors import as_array
from kvstore.errors import LayoutMismatch

Tokens = npt.NDArray[np.uint32]
"""Token ids, `[n]`, contiguous."""


def as_tokens(tokens: Any) -> Tokens:
    """Return token ids as a contiguous uint32 array, without a copy if they are one.

    Args:
        tokens: at least one token id, `[n]` or `[1, n]` integers in [0, 2**32), any array-like or a tensor.

    Raises:
        ValueError: tokens are anything else.

    Example:
        >>> as_tokens([1, 2, 3])
        array([1, 2, 3], dtype=uint32)
    """
    try:
        if hasattr(tokens, "detach"):
            tokens = as_array(tokens)
        array = np.asarray(tokens)
    except LayoutMismatch as error:
        raise ValueError(f"tokens: {error}") from error
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"tokens: expected a 1-D array of integers, found {type(tokens).__name__}") from error
    if array.ndim == 2 and len(array) == 1:  # a batch of one, as tokenizers return it
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"tokens: expected one dimension, found shape {array.shape}")
    if array.size == 0:
        raise ValueError("tokens: expected at least one token, found none")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens: expected integers, found {array.dtype}")
    if array.dtype != np.uint32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= 1 << 32:
            raise ValueError(f"tokens: expected ids from 0 to 2^32 - 1, found {low if low < 0 else high}")
        array = array.astype(np.uint32)
    return np.ascontiguousarray(array)
