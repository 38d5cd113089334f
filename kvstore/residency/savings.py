"""What is known of each record that matters for what to keep: which block it is, and what having it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.core.record import key_tag
from kvstore.residency.block import Block, StoredBlock

_EVERY = 256  # uses of prefixes between two looks at what computing takes
_MEAN_OF = 1024  # the mean of about so many rates is 1


class Savings:
    """The names of blocks, and what computing them takes.

    A block that is put again after it was evicted has another record. Policies remember what left, so they know a block
    by its name: the first bits of its key, which is the same whenever it is put. Records that other processes wrote
    while this one was open have their numbers as names.

    Thread-safe: each entry is read and changed in one step. Memory: about 250 bytes a record.

    Args:
        wanted: whether anybody will ask; nothing is taken in otherwise.

    Example:
        >>> savings = Savings()
        >>> savings.load([7], [1 << 60], [64], [64])
        >>> savings.name(7) == 1 << 60, savings.name(8)
        (True, 8)
        >>> savings.rate(7, nbytes=64) > savings.rate(7, nbytes=128)
        True
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._blocks: dict[int, tuple[int, int, int]] = {}  # by record: (name, start, tokens)
        self._growth = 0.0
        self._mean = 0.0
        self._uses = 0
        self.ask: Callable[[], float] | None = None
        """Says how much longer each token before it makes the computing of a token, as a share; 0 for unknown."""

    def arrived(self, blocks: Iterable[Block] | Iterable[StoredBlock]) -> None:
        """Take in blocks that are put."""
        for block in blocks if self._wanted else ():
            if block.queued is not None:
                self._blocks[block.record] = (_name(key_tag(block.queued.key)), block.start, len(block.tokens))

    def load(self, records: Iterable[int], tags: Iterable[int], starts: Iterable[int], counts: Iterable[int]) -> None:
        """Take in what is stored when the store is opened: of each record the tag of its key, the position of its first
        token, and how many it has."""
        for record, tag, start, count in zip(records, tags, starts, counts, strict=True) if self._wanted else ():
            self._blocks[record] = (_name(tag), start, count)

    def forget(self, record: int) -> None:
        """Forget a record. Does nothing if it is not known."""
        self._blocks.pop(record, None)

    def name(self, record: int) -> int:
        """Return the name of a record's block, > 0; the number of the record if it is not known."""
        known = self._blocks.get(record)
        return record if known is None else known[0]

    def rate(self, record: int, nbytes: int) -> float:
        """Return what computing a record's tokens takes for each of its bytes, as a multiple of what that is in the
        mean; 1 where nothing is known."""
        known = self._blocks.get(record)
        if known is None or nbytes <= 0:
            return 1.0
        _, start, tokens = known
        rate = tokens * (1 + self._growth * (start + tokens / 2)) / nbytes
        self._mean += (rate - self._mean) / _MEAN_OF if self._mean else rate
        return rate / self._mean

    def count_use(self) -> None:
        """Note a use of a prefix; now and then `ask` is called. The caller holds no lock."""
        if self._uses % _EVERY == 0 and self.ask is not None:
            self._growth = self.ask()
        self._uses += 1


def _name(tag: int) -> int:
    return tag & (1 << 63) - 1 or 1
