"""The stores of a soak and their oracle: keys and values follow from namespace and tokens, so every get can be checked.

Two worlds take turns: blocks that have nothing in common, in a store with three tiers; and families, whose members are
coded against each other. Budgets are tiny, so that everything is evicted all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_stores
import small_stores

from kvstore import KVStore, StoreConfig

THREADS = 8
NAMESPACES = (b"", b"other")
PINS = 2  # sequences that a thread pins at the beginning of each life
NUMBERS = 100  # sequences of a thread


@dataclass(frozen=True)
class World:
    """One of the stores. lengths: of the puts; longest: of any sequence."""

    name: str
    config: StoreConfig
    lengths: tuple[int, ...]
    helper: Any
    sequence: Callable[[int, int], Any]

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def open(self, folder: Path, read_only: bool = False) -> KVStore:
        return KVStore(folder / self.name, self.helper.IDENTITY, self.config, read_only=read_only)

    def tokens(self, number: int, length: int | None = None) -> Any:
        return self.sequence(number, self.longest if length is None else length)

    def kv(self, tokens: Any, namespace: bytes = b"") -> Any:
        return self.helper.kv_of(tokens, namespace)

    def exact(self, hit: Any, tokens: Any, namespace: bytes = b"") -> bool:
        return bool(self.helper.is_exact(hit, tokens, namespace))

    def budget(self) -> int:
        """The most bytes on disk, everything in the folder of the store counted."""
        return self.config.disk.bytes


def _alike(number: int, length: int) -> Any:
    """Every fifth sequence is a text, the four behind it hold it at other places."""
    text = family_stores.passage(number - number % 5, 3 * family_stores.BLOCK)
    whole = text if number % 5 == 0 else family_stores.behind(1_000_000 + number, text, 7 * (number % 5))
    return whole[:length]


_SEGMENT = small_stores.SEGMENT
WORLDS = (
    World(
        "plain",
        small_stores.config(host=1 << 16, disk=16 * _SEGMENT, device=1 << 14, eviction="lru"),
        (3, 4, 9, 16, 23, 40),
        small_stores,
        small_stores.tokens_of,
    ),
    World(
        "families",
        family_stores.config(disk=16 * _SEGMENT, host=1 << 16),
        (20, 40, 64, 96, 110),
        family_stores,
        _alike,
    ),
)
