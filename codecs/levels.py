"""Which loops the C++ core takes on this machine."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.splitzip.codec import bound_values, encode_values

LEVELS = ("scalar", "avx2", "avx512", "amx", "neon")  # of aarch64 the first and the last, of x86-64 all but that


def cpu_levels() -> list[str]:
    """Return the levels that this machine runs, worst first.

    Example:
        >>> cpu_levels()[0]
        'scalar'
    """
    found = []
    for level in LEVELS:
        try:
            encode_values(np.zeros(1, np.uint16), "bfloat16", level, bytearray(bound_values(1, "bfloat16")))
        except ValueError:
            continue
        found.append(level)
    return found


def cpu_level() -> str:
    """Return the best level that this machine runs; `KVSTORE_CPU` may ask for a lower one.

    Example:
        >>> cpu_level() in LEVELS
        True
    """
    return cpu_levels()[-1]
