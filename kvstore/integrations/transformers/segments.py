"""Many prompts as a tree: each run of tokens that they share is one segment, computed once. Pure.

Prompts are sorted, and what neighbours have in common gives the tree (as a suffix tree is made of a suffix array).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.core.tokens import Tokens, as_tokens


@dataclass(frozen=True)
class Segment:
    """Positions [start, end) of some prompts that all begin alike up to `end`.

    Attributes:
        tokens: of one of these prompts, `[end]`: from its first token on.
        start: where the segment before it ends.
        is_prompt: whether a prompt ends here.
    """

    tokens: Tokens
    start: int
    is_prompt: bool

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def new(self) -> int:
        """How many tokens it has of its own."""
        return len(self.tokens) - self.start


@dataclass
class _Node:
    depth: int
    prompt: int
    parent: _Node | None
    is_prompt: bool


def segments_of(prompts: Iterable[Sequence[int] | Tokens]) -> list[list[Segment]]:
    """Return the segments of prompts by their level: none needs another one than those of the level before.

    Args:
        prompts: token ids; repeated ones count once, empty ones not at all.

    Raises:
        ValueError: a prompt is no list of token ids.

    Example:
        >>> levels = segments_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [9]])
        >>> [[segment.tokens[segment.start :].tolist() for segment in level] for level in levels]
        [[[1, 2], [9]], [[3]], [[4], [5]]]
    """
    ordered = in_order(prompts)
    root = _Node(0, 0, None, False)
    stack, nodes = [root], list[_Node]()
    for number, tokens in enumerate(ordered):
        shared = shared_tokens(ordered[number - 1], tokens) if number else 0
        last: _Node | None = None
        while stack[-1].depth > shared:
            last = stack.pop()
        if stack[-1].depth < shared:
            assert last is not None
            last.parent = middle = _Node(shared, number, stack[-1], False)
            nodes.append(middle)
            stack.append(middle)
        leaf = _Node(len(tokens), number, stack[-1], True)
        nodes.append(leaf)
        stack.append(leaf)
    return _by_level(nodes, ordered)


def in_order(prompts: Iterable[Sequence[int] | Tokens]) -> list[Tokens]:
    """Return different prompts in the order of their tokens: neighbours share the longest beginnings.

    Raises:
        ValueError: a prompt is no list of token ids.
    """
    arrays = [as_tokens(prompt) for prompt in prompts if len(prompt)]
    unique = {array.astype(">u4").tobytes(): array for array in arrays}  # big-endian bytes sort as the numbers do
    return [unique[key] for key in sorted(unique)]


def distinct_tokens(levels: Sequence[Sequence[Segment]]) -> int:
    """Return how many tokens have to be computed if nothing is stored.

    Example:
        >>> distinct_tokens(segments_of([[1, 2, 3], [1, 2, 4]]))
        4
    """
    return sum(segment.new for level in levels for segment in level)


def _by_level(nodes: list[_Node], ordered: list[Tokens]) -> list[list[Segment]]:
    levels: list[list[tuple[int, int, Segment]]] = []
    height: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: node.depth):  # a parent is less deep than its children
        parent = node.parent
        assert parent is not None
        height[id(node)] = own = height.get(id(parent), -1) + 1
        while len(levels) <= own:
            levels.append([])
        segment = Segment(ordered[node.prompt][: node.depth], parent.depth, node.is_prompt)
        levels[own].append((node.prompt, node.depth, segment))
    return [[segment for _, _, segment in sorted(level, key=lambda row: row[:2])] for level in levels]


def shared_tokens(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two sequences begin with in common."""
    count = min(len(a), len(b))
    differ = np.flatnonzero(a[:count] != b[:count])
    return int(differ[0]) if len(differ) else count
