"""What the scheduler tells the worker with each step of the engine: which blocks to fill, and which to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.tokens import Tokens


@dataclass(frozen=True)
class Load:
    """Blocks of a waiting request that are to be filled from the store.

    Attributes:
        request: its id.
        namespace: that of the put.
        tokens: ids of the request's tokens up to the last that is loaded.
        start: position of the first; what is before is in vLLM's memory. A multiple of its blocks, as the end is.
        blocks: numbers of the blocks of tokens [start, len(tokens)).
    """

    request: str
    namespace: str
    tokens: Tokens
    start: int
    blocks: tuple[int, ...]

    def failed_blocks(self, loaded: int, block_tokens: int) -> tuple[int, ...]:
        """Return the numbers of the blocks that have no keys and values, if the first `loaded` tokens of the request
        have them.

        Example:
            >>> from kvstore.core.tokens import as_tokens
            >>> Load("a", "", as_tokens(range(12)), 4, (7, 8)).failed_blocks(11, 4)
            (8,)
        """
        return self.blocks[max(0, loaded - self.start) // block_tokens :]


@dataclass(frozen=True)
class Save:
    """Tokens whose keys and values are in vLLM's memory after the step, and are to be stored.

    Attributes:
        namespace: where they are put.
        tokens: ids of the sequence up to the last of them.
        start: position of the first.
        blocks: numbers of the blocks that have tokens [start, len(tokens)).
    """

    namespace: str
    tokens: Tokens
    start: int
    blocks: tuple[int, ...]


@dataclass
class Step:
    """All of a step.

    Attributes:
        idle: the engine computes nothing in this step, so it may wait a moment for loads.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False


def whole(tokens: int, unit: int) -> int:
    """Return `tokens` without the last that fill no `unit`.

    Example:
        >>> whole(605, 128)
        512
    """
    return tokens // unit * unit


def blocks_between(table: list[int], start: int, end: int, block_tokens: int) -> tuple[int, ...]:
    """Return the numbers of the blocks that have tokens [start, end), of the table of all of a request.

    Example:
        >>> blocks_between([7, 8, 9], 5, 8, 4)
        (8,)
    """
    return tuple(table[start // block_tokens : -(-end // block_tokens)])
