"""The tables of the entropy codec: 16 distributions for the channels of keys, 16 for those of values.

They were fitted once (tools/make_entropy_tables.py) and are part of the format: the file never changes, other tables
would be another codec. A distribution is over what is left of a value when the mean exponent of its channel and the
channel's prevailing sign are taken out, so they are not those of one model, nor of one dtype: they were fitted to bf16,
and tables fitted to another dtype would save 0.3 % of it at most.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

RELATIVE = 24  # exponents from 8 above a channel's mean to 15 below
ABOVE = 8
MANTISSA_BITS = 2
ESCAPE = 2 * RELATIVE << MANTISSA_BITS
SYMBOLS = ESCAPE + 1
CLASSES = 16  # of each kind
PROB_BITS = 12
COST_UNIT = 32  # costs are in 1/32 bit; those of the samples add up to less than 2^16
MOST_SAMPLES = 64  # tokens of a channel that its class is chosen by

_FILE = Path(__file__).with_name("tables.bin")
_SHA256 = "9bb4fdb3eeefab17fd91490f271c9b2dc25441e625817c81095e2ade5dfe7c3a"

Table = npt.NDArray[np.uint16]


@lru_cache(maxsize=1)
def tables() -> tuple[Table, Table]:
    """Return frequencies and costs, each uint16 `[2, 16, 193]` (keys, values; class; symbol).

    Frequencies of a class sum to 4,096; a symbol of frequency 0 is escaped. The symbols of one sign that a class knows
    are of one range of exponents. Costs are in 1/32 bit.

    Raises:
        RuntimeError: the installed file is damaged, or of another version of the package.
    """
    data = _FILE.read_bytes()
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise RuntimeError(f"{_FILE} is damaged; install kvstore again")
    both = np.frombuffer(data, "<u2").astype(np.uint16).reshape(2, 2, CLASSES, SYMBOLS)
    return both[0], both[1]
