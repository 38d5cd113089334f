"""How much of what is drawn at random a run tries: all in `make test-long` and `make test-faults`, a third in
`make test`."""

from __future__ import annotations

import os

FULL = os.environ.get("KVSTORE_FAULTS") == "full"


def part(number: int) -> int:
    """Of `number` examples, turns or steps."""
    return number if FULL else -(-number // 3)
