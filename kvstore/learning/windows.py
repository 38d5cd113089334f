"""Blocks of a store as windows of a calibration dump, so that the calibration's own fit can be made to them.

A window is a row of blocks of any sequences, one behind the other, and its positions count from 0. So the keys of each
block are rotated to its place in the window, and rounded to bf16 again: half a last place more of noise, where what is
left to be coded spans tens of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import Bits, KVDump, floats, nearest_bits
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.codecs.predictive.token_table import rows_of
from kvstore.core.layout import KVLayout
from kvstore.core.rope import rotate
from kvstore.learning.seen import BlocksGone, SeenTokens
from kvstore.read.stored_block import GroupWords

Layers = list[tuple[Bits, Bits]]


@dataclass(frozen=True)
class BlockWindows(KVDump):
    """Windows that are read when they are asked for. All of them are to fit to.

    Attributes:
        blocks: record numbers, those of each window; all windows have as many.
        read: gives the layers of a block; None if it left.
        pause: called before every step of the work.
        kept: how many windows stay in memory; the rest is read again when it is needed.
        seen: the tokens of all blocks.
        hide: take the tokens that were seen once for unseen.
    """

    blocks: tuple[tuple[int, ...], ...] = ()
    read: Callable[[int], GroupWords | None] = lambda record: None
    pause: Callable[[], None] = lambda: None
    kept: int = 1
    seen: SeenTokens | None = None
    hide: bool = False
    _cache: dict[int, tuple[npt.NDArray[np.uint32], Layers]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_blocks(
        cls,
        layout: KVLayout,
        block_tokens: int,
        blocks: tuple[tuple[int, ...], ...],
        read: Callable[[int], GroupWords | None],
        pause: Callable[[], None],
        seen: SeenTokens,
        kept: int = 1,
        hide: bool = False,
    ) -> BlockWindows:
        """See the attributes. layout: of the caches, bfloat16."""
        length = block_tokens * len(blocks[0])
        return cls(
            *(Path(), layout, len(blocks), length),
            blocks=blocks,
            read=read,
            pause=pause,
            kept=kept,
            seen=seen,
            hide=hide,
        )

    @property
    def held_out(self) -> range:
        """None: what is kept back is measured block by block."""
        return range(0)

    @property
    def first_layer(self) -> Bits:
        """Of the tokens that were seen, in their order."""
        return nearest_bits(self._seen.rows)

    def tokens(self, window: int) -> npt.NDArray[np.int64]:
        """The row of `first_layer` of each token; one behind the last for those that are hidden."""
        rows = rows_of(self._window(window)[0], self._seen.tokens).astype(np.int64)
        return np.where(self._seen.once[rows], len(self._seen.tokens), rows) if self.hide else rows

    def layer(self, layer: int, window: int) -> tuple[Bits, Bits]:
        self.pause()
        return self._window(window)[1][layer]

    @property
    def _seen(self) -> SeenTokens:
        assert self.seen is not None
        return self.seen

    def _window(self, window: int) -> tuple[npt.NDArray[np.uint32], Layers]:
        if window not in self._cache:
            while len(self._cache) >= self.kept:
                del self._cache[next(iter(self._cache))]
            self._cache[window] = self._read_window(window)
        return self._cache[window]

    def _read_window(self, window: int) -> tuple[npt.NDArray[np.uint32], Layers]:
        tokens: list[npt.NDArray[np.uint32]] = []
        columns: list[Layers] = []
        for place, record in enumerate(self.blocks[window]):
            self.pause()
            block = self.read(record)
            if block is None or not block.is_finite:
                raise BlocksGone
            tokens.append(block.tokens)
            columns.append(self._moved(block, place * len(block.tokens)))
        layers = [
            (np.concatenate([k for k, _ in same]), np.concatenate([v for _, v in same]))
            for same in zip(*columns, strict=True)
        ]
        return np.concatenate(tokens), layers

    def _moved(self, block: GroupWords, position: int) -> Layers:
        """The layers of a block, keys rotated to where it stands in the window; those of latents as they are, for no
        predictor takes them for rotated."""
        shift = position - block.start
        if not shift or not rotates(self.layout):
            return block.layers()
        by, moved = np.full(len(block.tokens), shift), list[tuple[Bits, Bits]]()
        for shape, (k, v) in zip(self.layout.layers, block.layers(), strict=True):
            self.pause()
            moved.append((nearest_bits(rotate(floats(k), shape.heads, by, self.layout.rope, 1)), v))
        return moved
