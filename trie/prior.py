"""Information in tokens: the bits that the trie accumulates along its edges.

The information of a token is -log2 of its probability given what came before. Where the caller has the
model's log-probabilities they are used; where not, every token counts the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_BITS_PER_TOKEN", "UNIFORM_BITS_PER_TOKEN", "bits_from_logprobs"]

# log2 of a vocabulary of 65,536: what a token costs when nothing is known about it. Only ratios matter for
# ranking.
UNIFORM_BITS_PER_TOKEN = 16.0

# A token that the model held for impossible (-inf) counts as 64 bits: finite, so that sums stay ordered,
# and far above what a float32 softmax can express for a real token.
MAX_BITS_PER_TOKEN = 64.0


def bits_from_logprobs(
    logprobs: npt.NDArray[np.floating] | Sequence[float], n: int
) -> npt.NDArray[np.float32]:
    """Bits of `n` tokens from their log-probabilities.

    `logprobs`: 1-D, `n` values, natural logarithms (nats), each <= 0; -inf and anything below is clamped to
    `MAX_BITS_PER_TOKEN`. Returns float32 `[n]`, 0 <= bits <= `MAX_BITS_PER_TOKEN`. Mutates nothing.

    Raises `ValueError` naming `logprobs` for another shape or length, a NaN, or a value above 0.
    """
    try:
        values = np.asarray(logprobs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"logprobs: expected {n} numbers, found {type(logprobs).__name__}") from error
    if values.ndim != 1 or values.shape[0] != n:
        raise ValueError(f"logprobs: expected {n} values in one dimension, found shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError("logprobs: found NaN")
    if (values > 0).any():
        raise ValueError(f"logprobs: expected values <= 0, found {float(values.max())}")
    bits = np.minimum(values * (-1.0 / math.log(2.0)), MAX_BITS_PER_TOKEN)
    return np.abs(bits).astype(np.float32)  # abs: no -0.0
