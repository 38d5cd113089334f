"""The tables of the donor codec: what is left of a value when its donor's is taken out, by class.

They were fitted once (tools/make_donor_tables.py) and are part of the format: the file never changes, other tables
would be another codec. Classes and symbols are the predictive codec's.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.codecs.predictive.model import CLASSES, SYMBOLS


@lru_cache(maxsize=1)
def frequencies() -> npt.NDArray[np.uint16]:
    """uint16 [2 * CLASSES, SYMBOLS], rows sum to 4096: part of the format."""
    data = Path(__file__).with_name("tables.bin").read_bytes()
    return np.frombuffer(data, "<u2").reshape(2 * CLASSES, SYMBOLS).astype(np.uint16)
