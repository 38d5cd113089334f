"""Information in tokens: what the trie accumulates along its edges, and how it mixes model and traffic.

The information of a token is -log2 of its probability given what came before. Where the caller has the
model's log-probabilities they are used; where not, every token counts the same. What passes through the
trie corrects both: `mixture_bits`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONCENTRATION",
    "LEAST_BITS_PER_TOKEN",
    "MAX_BITS_PER_TOKEN",
    "UNIFORM_BITS_PER_TOKEN",
    "UNIFORM_LOGPROB",
    "bits_from_logprobs",
    "mixture_bits",
]

# log2 of a vocabulary of 65,536: what a token costs when nothing is known about it. Only ratios matter for
# ranking.
UNIFORM_BITS_PER_TOKEN = 16.0
UNIFORM_LOGPROB = -UNIFORM_BITS_PER_TOKEN * math.log(2.0)  # the same in nats, for a token that no model scored

# A token that the model held for impossible (-inf) counts as 64 bits: finite, so that sums stay ordered,
# and far above what a float32 softmax can express for a real token.
MAX_BITS_PER_TOKEN = 64.0

# In the mixture no token is certain: paths of different length are never at distance zero.
LEAST_BITS_PER_TOKEN = 2.0**-20

# How many observations the model's word is worth in the mixture.
CONCENTRATION = 4.0


def mixture_bits(count: int, total: int, bits: float, concentration: float = CONCENTRATION) -> float:
    """Return -log2 of the Dirichlet mixture `(count + a p) / (total + a)` of traffic and model.

    Args:
        count: operations through the prefix that went on with this token, 0 <= count <= total; not checked.
        total: operations through the prefix.
        bits: what the model gives the token, so that p = 2^-bits; at least `LEAST_BITS_PER_TOKEN` is taken.
        concentration: a, above 0; not checked.

    Example:
        >>> mixture_bits(count=0, total=0, bits=16.0)
        16.0
        >>> mixture_bits(count=90, total=100, bits=16.0) < 0.3
        True
    """
    bits = max(bits, LEAST_BITS_PER_TOKEN)
    if count == 0:
        return bits + math.log2(total / concentration + 1)
    # In steps from 1, so that nothing cancels where the token is nearly certain.
    missed = total - count + concentration * -math.expm1(-bits * math.log(2.0))
    return math.log1p(missed / (count + concentration * 2.0**-bits)) / math.log(2.0)


def bits_from_logprobs(logprobs: npt.NDArray[np.floating] | Sequence[float], n: int) -> npt.NDArray[np.float32]:
    """Return the bits of `n` tokens from their log-probabilities.

    Args:
        logprobs: `n` natural logarithms (nats) in one dimension, each <= 0. -inf and very small ones are clamped to
            `MAX_BITS_PER_TOKEN`.
        n: how many tokens there are.

    Returns:
        float32 `[n]`, from 0 to `MAX_BITS_PER_TOKEN`.

    Raises:
        ValueError: another shape or length, a NaN, or a value above 0.

    Example:
        >>> bits_from_logprobs([0.0, math.log(0.5)], 2)
        array([0., 1.], dtype=float32)
    """
    try:
        values = np.asarray(logprobs, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"logprobs: expected {n} numbers, found {type(logprobs).__name__}") from error
    if values.ndim != 1 or values.shape[0] != n:
        raise ValueError(f"logprobs: expected {n} values in one dimension, found shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError("logprobs: must not be NaN")
    if (values > 0).any():
        raise ValueError(f"logprobs: expected values <= 0, found {float(values.max())}")
    bits = np.minimum(values * (-1.0 / math.log(2.0)), MAX_BITS_PER_TOKEN)
    return np.abs(bits).astype(np.float32)  # abs: no -0.0
