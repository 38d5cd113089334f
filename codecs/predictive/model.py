"""What the lossless predictor needs of a calibration profile: the arrays, checked, as one object.

The integer arithmetic that they are used in is in reference.py; FORMAT.md has their names and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.codecs.predictive.linear_model import LinearModel, LinearPredictor, rotated_half, rotation_tables
from kvstore.codecs.predictive.token_table import token_table
from kvstore.codecs.words import KEPT_BITS
from kvstore.core.layout import KVLayout

SYMBOLS = 193  # residuals -96..95, and the escape
ESCAPE = 192
OFFSET = 96
CLASSES = 36  # of K, and as many of V
MAX_BIAS = 1 << 28
MAX_ADAPT = 1 << 12
MAX_SCALE = 400  # quarter octaves


@dataclass(frozen=True)
class CodingTables:
    """Which table the residuals of a part are coded with."""

    scale: Array
    """int16 [C]: quarter octaves of the residual's standard deviation."""
    adapt: Array
    """int32 [3]: see `reference.offsets`."""

    @property
    def width(self) -> int:
        return len(self.scale)


@dataclass(frozen=True, kw_only=True)
class Part(LinearPredictor, CodingTables):
    """K or V of one layer, C values a token: how it is predicted, and how what is left is coded."""

    bias: Array
    """int32 [C], in units of the sum."""


@dataclass(frozen=True, kw_only=True)
class PredictiveModel(LinearModel):
    """Everything that encoder and decoder of the exact mode know. Immutable."""

    parts: tuple[tuple[Part, Part], ...]
    token_kv: Array
    """int8 [rows, C of K_0 + C of V_0]: what layer 0 holds of a token."""
    freqs: Array
    """uint16 [2 * CLASSES, SYMBOLS], rows sum to 4096."""
    seen: Array | None = None
    """uint32 [rows], ascending: the tokens that these rows are of; None: row i is that of token i."""

    @classmethod
    def from_arrays(cls, layout: KVLayout, arrays: Mapping[str, Array]) -> PredictiveModel:
        """Make the model of a profile's section "lossless".

        Raises:
            ProfileError: names the array that is missing or malformed.
        """
        taken = SectionArrays("predictive", "lossless", arrays)
        half = rotated_half(layout, taken.codec, tuple(KEPT_BITS))
        widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
        token_kv, seen = token_table(taken, sum(widths[0]))
        parts = []
        for number, width in enumerate(widths):
            before = sum(sum(widths[i]) for i in range(max(0, number - 2), number))
            k = _part(taken, f"{number}.k.", width[0], before, half)
            v = _part(taken, f"{number}.v.", width[1], before + width[0] if number else 0, 0)
            parts.append((k, v))
        fine, coarse = rotation_tables(taken, half)
        return cls(
            layout=layout,
            parts=tuple(parts),
            token_kv=token_kv,
            seen=seen,
            freqs=taken.all_frequencies("freqs", 2 * CLASSES, SYMBOLS),
            rope_fine=fine,
            rope_coarse=coarse,
        )


def _part(taken: SectionArrays, prefix: str, width: int, inputs: int, half: int) -> Part:
    return Part(
        **vars(LinearPredictor.of(taken, prefix, width, inputs, half)),
        scale=taken.take(prefix + "scale", np.int16, (width,), MAX_SCALE),
        bias=taken.take(prefix + "bias", np.int32, (width,), MAX_BIAS),
        adapt=taken.take(prefix + "adapt", np.int32, (3,), MAX_ADAPT),
    )
