"""What blocks show of layer 0: it depends on the token alone, so a token that was seen tells it of all that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import Floats, floats
from kvstore.calibration.targets import unrotated
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.read.stored_block import StoredWords


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
        cls, records: Iterable[int], read: Callable[[int], StoredWords | None], pause: Callable[[], None]
    ) -> SeenTokens:
        """Look at the blocks of these records. Memory is that of the rows, and of one block.

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
            for token, row in zip(block.header.tokens.tolist(), _first_layer(block), strict=True):
                place = places.setdefault(token, len(sums))
                if place == len(sums):
                    sums.append(row.astype(np.float64))
                    counts.append(1)
                else:
                    sums[place] += row
                    counts[place] += 1
        order = sorted(places)
        by_token = [places[token] for token in order]
        rows = np.stack([(sums[place] / counts[place]).astype(np.float32) for place in by_token])
        return cls(np.array(order, np.uint32), rows, np.array([counts[place] == 1 for place in by_token]))


def _first_layer(block: StoredWords) -> Floats:
    """K and V of layer 0, as fits see them (`targets.target`); float32 `[tokens, C]`."""
    k, v = (floats(words) for words in block.layer(0))
    if rotates(block.layout):
        positions = np.arange(block.header.start, block.header.start + block.header.count)
        k = unrotated(k, block.layout, block.layout.layers[0].key_dim, positions)
    return np.concatenate([k, v], 1)
