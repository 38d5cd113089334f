"""What blocks show of layer 0: it depends on the token alone, so a token that was seen tells it of all that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import Floats, floats
from kvstore.calibration.targets import unrotated
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.read.stored_block import GroupWords


class BlocksGone(Exception):
    """Too many of the chosen blocks left meanwhile. Internal: it is tried again."""


@dataclass(frozen=True)
class SeenTokens:
    """The tokens of some blocks, and what layer 0 holds of each. Immutable.

    Attributes:
        tokens: uint32 `[n]`, ascending.
        rows: float32 `[n, C of K + C of V]`: means, K before the rotation and in `rope.pair_order`.
        once: bool `[n]`: seen no more than once. Of other text about as large a share has never been seen (Good and
            Turing), so tables that take these for unseen are right for it.
    """

    tokens: npt.NDArray[np.uint32]
    rows: Floats
    once: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        records: Iterable[int],
        read: Callable[[int], GroupWords | None],
        pause: Callable[[], None],
        damp: float = 0.0,
    ) -> SeenTokens:
        """Look at the blocks of these records. Memory is that of the rows, and of one block.

        Args:
            records: of the blocks.
            read: gives the layers of one that are looked at; None if it left.
            pause: called before each block.
            damp: times that a token must have been seen to stand as far from the mean of all as half of what it showed;
                0 where the layer depends on nothing but the token.

        Raises:
            BlocksGone: one has left, or holds values that are no numbers.
            What `pause` raises.
        """
        places: dict[int, int] = {}
        sums: list[npt.NDArray[np.float64]] = []
        counts: list[int] = []
        for record in records:
            pause()
            block = read(record)
            if block is None or not block.is_finite:
                raise BlocksGone
            for token, row in zip(block.tokens.tolist(), _first_layer(block), strict=True):
                place = places.setdefault(token, len(sums))
                if place == len(sums):
                    sums.append(row.astype(np.float64))
                    counts.append(1)
                else:
                    sums[place] += row
                    counts[place] += 1
        order = sorted(places)
        by_token = [places[token] for token in order]
        middle = np.sum(sums, 0) / sum(counts) if damp else 0.0
        rows = np.stack([_damped(sums[place], counts[place], middle, damp) for place in by_token])
        return cls(np.array(order, np.uint32), rows, np.array([counts[place] == 1 for place in by_token]))


def _damped(total: npt.NDArray[np.float64], count: int, middle: npt.NDArray[np.float64] | float, damp: float) -> Floats:
    """The mean of so many rows, moved towards the middle."""
    found: Floats = (middle + (total - count * middle) / (count + damp)).astype(np.float32)
    return found


def _first_layer(block: GroupWords) -> Floats:
    """K and V of layer 0, as fits see them (`targets.target`); float32 `[tokens, C]`."""
    k, v = (floats(words) for words in block.layer(0))
    if rotates(block.layout):
        positions = np.arange(block.start, block.start + len(block.tokens))
        k = unrotated(k, block.layout, block.layout.layers[0].key_dim, positions)
    return np.concatenate([k, v], 1)
