"""What stays in the catalog of records that leave the middle of their sequences."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from kvstore.tiers.disk.entry import Entry


class HoleKeeper(Protocol):
    """Says which records left a hole; the disk tier asks before each commit. Thread-safe."""

    def take_released(self) -> list[int]:
        """Return the holes that nothing is behind any more, each once: the next commit removes them."""

    def give_back(self, released: Sequence[int]) -> None:
        """Note that these could not be removed."""

    def kept(self, leaving: Sequence[Entry], coming: Container[int], namespaces: Mapping[bytes, int]) -> list[Entry]:
        """Return the entries of holes that the next commit must contain.

        Args:
            leaving: entries that this commit would remove.
            coming: records that it adds.
            namespaces: numbers by digest, of those that the catalog knows.

        Returns:
            What stays of some of `leaving`, and holes of blocks that never came to the disk.
        """

    def written(self, holes: Sequence[Entry]) -> None:
        """Note that the catalog has what `kept` returned."""


class NoHoles:
    """For a tier whose index keeps no holes: every record leaves as a whole. See `HoleKeeper`."""

    def take_released(self) -> list[int]:
        return []

    def give_back(self, released: Sequence[int]) -> None:
        pass

    def kept(self, leaving: Sequence[Entry], coming: Container[int], namespaces: Mapping[bytes, int]) -> list[Entry]:
        return []

    def written(self, holes: Sequence[Entry]) -> None:
        pass
