"""The CPU levels that this machine runs, worst first."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.splitzip.codec import bound_values, encode_values


def cpu_levels() -> list[str]:
    found = []
    for level in ("scalar", "avx2", "avx512"):
        try:
            encode_values(np.zeros(1, np.uint16), "bfloat16", level, bytearray(bound_values(1, "bfloat16")))
        except ValueError:
            continue
        found.append(level)
    return found
