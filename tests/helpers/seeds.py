"""The seed of a run: every choice that the tests leave to chance follows from it, so that a run can be made again.

KVSTORE_SEED sets it. Without it is 0, and each run of `make test` chooses as the last one did; `make test-long` draws
a new one and prints it. Worker processes inherit it.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
from hashlib import blake2b

import numpy as np

SEED = int(os.environ.get("KVSTORE_SEED", "0"))


def nth(number: int) -> int:
    """The seed of trial `number`: the number itself in a run with the seed 0, another one in every other run."""
    return number + SEED * 1_000_003


def of(*parts: object) -> int:
    """64 bits that follow from `parts` and from the seed of the run."""
    return int.from_bytes(blake2b(repr((SEED, *parts)).encode(), digest_size=8).digest(), "little")


def fix(name: str) -> None:
    """Seeds the libraries' own generators for the test of that name, and what a store draws from the system: the hashes
    of its content index, which decide which of the shorter passages it finds."""
    secrets.randbits = lambda bits: of("system") >> max(0, 64 - bits)
    random.seed(of(name))
    np.random.seed(of(name) % (1 << 32))
    if "torch" in sys.modules:  # whose first seed is the same in every process
        sys.modules["torch"].manual_seed(of(name))
