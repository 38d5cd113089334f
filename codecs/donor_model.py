"""What the donor codec needs of a calibration profile to carry differences from layer to layer: the arrays, checked.

Where a block differs from its donor in one layer, it differs in the next one in a way that is nearly linear: int8
weights, as the predictive codec has them (predictive_model.py), but fitted to differences, of one layer's reach, and
without bias. The arithmetic is in donor_reference.py; FORMAT.md has the arrays' names and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codecs.predictive_model import FINE, MAX_INPUTS, Part, rotates
from kvstore.codecs.profile import Profile
from kvstore.errors import ProfileError
from kvstore.layout import KVLayout

SECTION = "donor"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DonorModel:
    """How differences from a donor go on from layer to layer. Immutable.

    parts: K and V of every layer; of each, `bias`, `scale` and `adapt` are zeros, for nothing reads them.
    """

    layout: KVLayout
    parts: tuple[tuple[Part, Part], ...]
    rope_fine: Array | None
    rope_coarse: Array | None
    """int16 [2 (cos, sin), 128 or N, key_dim / 2] in 1/16384; None without rotation."""

    @property
    def positions(self) -> int:
        """Blocks with tokens at positions from here on are coded without the model."""
        return 1 << 31 if self.rope_coarse is None else FINE * self.rope_coarse.shape[1]

    @classmethod
    def from_profile(cls, profile: Profile) -> DonorModel | None:
        """None for a profile without the section."""
        if SECTION not in profile.sections:
            return None
        return cls.from_arrays(profile.layout, profile.section(SECTION))

    @classmethod
    def from_arrays(cls, layout: KVLayout, arrays: Mapping[str, Array]) -> DonorModel:
        """Of the profile's section "donor". Raises `ProfileError` naming the array that is not as it must be."""
        rope = rotates(layout)
        half = layout.layers[0].key_dim // 2
        if layout.dtype != "bfloat16":
            raise ProfileError(f"donor: for bfloat16, not {layout.dtype}")
        if rope and any(x.key_dim != 2 * half for x in layout.layers):
            raise ProfileError("donor: keys of different or odd dimensions cannot be rotated")
        widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
        parts = []
        for number, width in enumerate(widths):
            before = sum(widths[number - 1]) if number else 0
            pair = []
            for which, name in enumerate("kv"):
                inputs = before + (width[0] if which else 0) if number else 0
                pair.append(_part(arrays, f"{number}.{name}.", width[which], inputs, half if rope and not which else 0))
            parts.append((pair[0], pair[1]))
        fine = coarse = None
        if rope:
            fine = _take(arrays, "rope_fine", np.int16, (2, FINE, half), 16384)
            given = arrays.get("rope_coarse")
            rows = given.shape[1] if given is not None and given.ndim == 3 else 1
            if not 1 <= rows <= 1 << 24:
                raise ProfileError("donor/rope_coarse: of a shape that cannot be")
            coarse = _take(arrays, "rope_coarse", np.int16, (2, rows, half), 16384)
        return cls(layout, tuple(parts), fine, coarse)


def _part(arrays: Mapping[str, Array], prefix: str, width: int, inputs: int, half: int) -> Part:
    """half: of a head that is rotated, else 0."""
    if inputs > MAX_INPUTS:
        raise ProfileError(f"donor/{prefix}weight: at most {MAX_INPUTS} inputs, not {inputs}")
    fix = _take(arrays, prefix + "fix", np.int8, (width,), 30) if half else None
    if fix is not None:
        pairs = fix.reshape(-1, 2, half)
        if (pairs[:, 0] != pairs[:, 1]).any() or fix.min() < -14:
            raise ProfileError(f"donor/{prefix}fix: from -14 to 30, and the same in both halves of a pair")
    return Part(
        in_scale=_positive(arrays, prefix + "in_scale", width),
        out_scale=_positive(arrays, prefix + "out_scale", width),
        scale=np.zeros(width, np.int16),
        bias=np.zeros(width, np.int32),
        adapt=np.zeros(3, np.int32),
        fix=fix,
        weight=_take(arrays, prefix + "weight", np.int8, (inputs, width), 127) if inputs else None,
    )


def _take(
    arrays: Mapping[str, Array], name: str, dtype: Any, shape: tuple[int, ...], limit: int | None = None
) -> Array:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise ProfileError(f"donor/{name}: expected {np.dtype(dtype)} {list(shape)}, found {found}")
    if limit is not None and array.size and (int(array.min()) < -limit or int(array.max()) > limit):
        raise ProfileError(f"donor/{name}: expected -{limit}..{limit}")
    return np.ascontiguousarray(array)


def _positive(arrays: Mapping[str, Array], name: str, width: int) -> Array:
    array = _take(arrays, name, np.float32, (width,))
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ProfileError(f"donor/{name}: expected finite numbers above 0")
    return array
