"""What memory this process has."""

from __future__ import annotations

import os
from pathlib import Path


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_mapped(place: int) -> bool:
    """Whether there is memory at an address."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= place < int(end, 16) for first, end in spans)
