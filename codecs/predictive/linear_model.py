"""Linear predictors in 8-bit integers: what the predictive and the donor codec have in common of a profile.

A layer's keys and values are predicted from 8-bit inputs with 8-bit weights, keys before their rotary embedding, which
is done in integers by tables of the profile. reference.py has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.core.layout import KVLayout
from kvstore.core.rope import ONE
from kvstore.errors import ProfileError

RANGE = 23170  # 32767 / sqrt(2): what a rotation leaves within 16 bits
MAX_INPUTS = 1 << 16
FINE = 128  # positions of the fine table of angles


@dataclass(frozen=True)
class LinearPredictor:
    """Of K or V of one layer, C values a token. `weight` is None for layer 0, `fix` where there is no rotation."""

    in_scale: Array
    """float32 [C]: what a value is multiplied by to become an 8-bit input of later parts."""
    out_scale: Array
    """float32 [C]: what the sum is multiplied by to become the prediction (times 2**fix for K)."""
    fix: Array | None
    """int8 [C]: binary places of K's fixed point."""
    weight: Array | None
    """int8 [inputs, C]."""

    @classmethod
    def of(cls, arrays: SectionArrays, prefix: str, width: int, inputs: int, half: int) -> LinearPredictor:
        """Take a predictor's arrays.

        Args:
            arrays: of the section.
            prefix: what the names of its arrays begin with.
            width: values of a token.
            inputs: rows of the weights; 0 for layer 0.
            half: half of a key's dimension if keys are rotated, else 0.

        Raises:
            ProfileError: names the array that is missing or malformed.
        """
        if inputs > MAX_INPUTS:
            raise arrays.error(prefix + "weight", f"expected at most {MAX_INPUTS} inputs, found {inputs}")
        fix = arrays.take(prefix + "fix", np.int8, (width,), 30) if half else None
        if fix is not None:
            pairs = fix.reshape(-1, 2, half)
            if (pairs[:, 0] != pairs[:, 1]).any() or fix.min() < -14:
                raise arrays.error(prefix + "fix", "expected numbers from -14 to 30, the same in both halves of a pair")
        return LinearPredictor(
            in_scale=arrays.positive(prefix + "in_scale", width),
            out_scale=arrays.positive(prefix + "out_scale", width),
            fix=fix,
            weight=arrays.take(prefix + "weight", np.int8, (inputs, width), 127) if inputs else None,
        )


@dataclass(frozen=True, kw_only=True)
class LinearModel:
    """What models of linear predictors know besides these. Immutable."""

    layout: KVLayout
    rope_fine: Array | None
    rope_coarse: Array | None
    """int16 [2 (cos, sin), 128 or N, key_dim / 2] in 1/16384; None without rotation."""

    @property
    def positions(self) -> int:
        """Blocks with tokens at positions from here on cannot be predicted."""
        return 1 << 31 if self.rope_coarse is None else FINE * self.rope_coarse.shape[1]


def rotates(layout: KVLayout) -> bool:
    """Whether predictors take K for rotated. Of a latent it is V that is, and no predictor undoes that."""
    return layout.rope != "none" and not layout.is_latent


def rotated_half(layout: KVLayout, codec: str, dtypes: Sequence[str] = ("bfloat16",)) -> int:
    """Return half of a key's dimension if keys are rotated, else 0. dtypes: that `codec` predicts.

    Raises:
        ProfileError: `codec` cannot predict caches of this layout.
    """
    half = layout.layers[0].key_dim // 2
    if layout.dtype not in dtypes:
        raise ProfileError(
            f"{codec}: expected a profile of {' or '.join(dtypes)} caches, found {layout.dtype}; use another codec"
        )
    if not rotates(layout):
        return 0
    if any(x.key_dim != 2 * half for x in layout.layers):
        raise ProfileError(f"{codec}: keys of different or odd dimensions cannot be rotated; use another codec")
    return half


def rotation_tables(arrays: SectionArrays, half: int) -> tuple[Array | None, Array | None]:
    """`rope_fine` and `rope_coarse` of a model whose keys are rotated (`half` above 0)."""
    if not half:
        return None, None
    fine = arrays.take("rope_fine", np.int16, (2, FINE, half), ONE)
    return fine, arrays.take("rope_coarse", np.int16, (2, arrays.size("rope_coarse", 1), half), ONE)
