"""Which loops the C++ core takes on this machine."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.splitzip.codec import bound_values, encode_values

LEVELS = ("scalar", "avx2", "avx512")


def cpu_level() -> str:
    """Return the best level that this machine runs; `KVSTORE_CPU` may ask for a lower one.

    Example:
        >>> cpu_level() in LEVELS
        True
    """
    found = LEVELS[0]
    for level in LEVELS:
        try:
            encode_values(np.zeros(1, np.uint16), "bfloat16", level, bytearray(bound_values(1, "bfloat16")))
        except ValueError:
            continue
        found = level
    return found
