"""What the lossless predictor needs of a calibration profile: the arrays, checked, as one object.

The integer arithmetic that they are used in is in predictive_reference.py; FORMAT.md has their names and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ProfileError
from kvstore.layout import KVLayout

SYMBOLS = 193  # residuals -96..95, and the escape
ESCAPE = 192
OFFSET = 96
CLASSES = 36  # of K, and as many of V
RANGE = 23170  # 32767 / sqrt(2): what a rotation leaves within 16 bits
MAX_BIAS = 1 << 28
MAX_ADAPT = 1 << 12
MAX_SCALE = 400  # quarter octaves
MAX_INPUTS = 1 << 16
FINE = 128  # positions of the fine table of angles

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Part:
    """K or V of one layer, C values a token. `weight` is None for layer 0, `fix` where there is no rotation."""

    in_scale: Array
    """float32 [C]: what a value is multiplied by to become an 8-bit input of later parts."""
    out_scale: Array
    """float32 [C]: what the sum is multiplied by to become the prediction (times 2**fix for K)."""
    scale: Array
    """int16 [C]: quarter octaves of the residual's standard deviation."""
    bias: Array
    """int32 [C], in units of the sum."""
    adapt: Array
    """int32 [3]: see `predictive_reference.offsets`."""
    fix: Array | None
    """int8 [C]: binary places of K's fixed point."""
    weight: Array | None
    """int8 [inputs, C]."""

    @property
    def width(self) -> int:
        return len(self.scale)


@dataclass(frozen=True)
class PredictiveModel:
    """Everything that both sides of the codec know. Immutable."""

    layout: KVLayout
    parts: tuple[tuple[Part, Part], ...]
    token_kv: Array
    """int8 [vocabulary, C of K_0 + C of V_0]."""
    freqs: Array
    """uint16 [2 * CLASSES, SYMBOLS], rows sum to 4096."""
    rope_fine: Array | None
    rope_coarse: Array | None
    """int16 [2 (cos, sin), 128 or N, key_dim / 2] in 1/16384; None without rotation."""

    @property
    def positions(self) -> int:
        """Tokens at positions from here on cannot be predicted."""
        return 1 << 31 if self.rope_coarse is None else FINE * self.rope_coarse.shape[1]

    @classmethod
    def from_arrays(cls, layout: KVLayout, arrays: Mapping[str, Array]) -> PredictiveModel:
        """Of the profile's section "lossless". Raises `ProfileError` naming the array that is not as it must be."""
        taken = _Taker(arrays)
        rope = rotates(layout)
        half = layout.layers[0].key_dim // 2
        if layout.dtype != "bfloat16":
            raise ProfileError(f"lossless: for bfloat16, not {layout.dtype}")
        if rope and (any(x.key_dim != 2 * half for x in layout.layers)):
            raise ProfileError("lossless: keys of different or odd dimensions cannot be rotated")
        widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
        vocabulary = taken.rows("token_kv")
        token_kv = taken.take("token_kv", np.int8, (vocabulary, sum(widths[0])))
        parts = []
        for number, width in enumerate(widths):
            before = sum(sum(widths[i]) for i in range(max(0, number - 2), number))
            pair = []
            for which, name in enumerate("kv"):
                prefix, inputs = f"{number}.{name}.", before + (width[0] if which else 0)
                pair.append(_part(taken, prefix, width[which], inputs if number else 0, rope and which == 0, half))
            parts.append((pair[0], pair[1]))
        freqs = taken.take("freqs", np.uint16, (2 * CLASSES, SYMBOLS))
        if (freqs.astype(np.int64).sum(1) != 4096).any() or not freqs.all():
            raise ProfileError("lossless/freqs: every row must sum to 4096, every frequency be at least 1")
        fine = coarse = None
        if rope:
            fine = taken.take("rope_fine", np.int16, (2, FINE, half), 16384)
            coarse = taken.take("rope_coarse", np.int16, (2, taken.rows("rope_coarse", 1), half), 16384)
        return cls(layout, tuple(parts), token_kv, freqs, fine, coarse)


def rotates(layout: KVLayout) -> bool:
    """Whether K is held after a rotary embedding."""
    return layout.rope != "none"


def _part(taken: _Taker, prefix: str, width: int, inputs: int, rotated: bool, half: int) -> Part:
    if inputs > MAX_INPUTS:
        raise ProfileError(f"lossless/{prefix}weight: at most {MAX_INPUTS} inputs, not {inputs}")
    fix = taken.take(prefix + "fix", np.int8, (width,), 30) if rotated else None
    if fix is not None:
        pairs = fix.reshape(-1, 2, half)
        if (pairs[:, 0] != pairs[:, 1]).any() or fix.min() < -14:
            raise ProfileError(f"lossless/{prefix}fix: from -14 to 30, and the same in both halves of a pair")
    return Part(
        in_scale=taken.positive(prefix + "in_scale", width),
        out_scale=taken.positive(prefix + "out_scale", width),
        scale=taken.take(prefix + "scale", np.int16, (width,), MAX_SCALE),
        bias=taken.take(prefix + "bias", np.int32, (width,), MAX_BIAS),
        adapt=taken.take(prefix + "adapt", np.int32, (3,), MAX_ADAPT),
        fix=fix,
        weight=taken.take(prefix + "weight", np.int8, (inputs, width), 127) if inputs else None,
    )


class _Taker:
    """Arrays by name, each checked when it is taken."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def rows(self, name: str, axis: int = 0) -> int:
        array = self._arrays.get(name)
        if array is None or array.ndim <= axis or not 1 <= array.shape[axis] <= 1 << 24:
            raise ProfileError(f"lossless/{name}: missing, or of a shape that cannot be")
        return int(array.shape[axis])

    def take(self, name: str, dtype: Any, shape: tuple[int, ...], limit: int | None = None) -> Array:
        array = self._arrays.get(name)
        if array is None or array.dtype != dtype or array.shape != shape:
            found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise ProfileError(f"lossless/{name}: expected {np.dtype(dtype)} {list(shape)}, found {found}")
        if limit is not None and array.size and (int(array.min()) < -limit or int(array.max()) > limit):
            raise ProfileError(f"lossless/{name}: expected -{limit}..{limit}")
        return np.ascontiguousarray(array)

    def positive(self, name: str, width: int) -> Array:
        array = self.take(name, np.float32, (width,))
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ProfileError(f"lossless/{name}: expected finite numbers above 0")
        return array
