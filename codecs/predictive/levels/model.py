"""What a level of the exact predictor needs of a profile: the arrays of the section "levels", checked, as one object.

The arithmetic that they are used in is in reference.py; FORMAT.md has their names and meaning. Columns of a part stand
here, and in C++, in the order in which they are coded (`coding_order`); in the profile they stand as in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.codecs.predictive.linear_model import LinearModel, rotated_half, rotation_tables
from kvstore.codecs.predictive.model import CLASSES, MAX_ADAPT, MAX_BIAS, MAX_SCALE, SYMBOLS, CodingTables
from kvstore.codecs.predictive.token_table import token_table
from kvstore.core.layout import KVLayout

SECTION = "levels"
LEVELS = (1, 2, 3)
REACH = {1: 0, 2: 1, 3: 2}  # layers before that a level takes its inputs from
GROUP = 16  # columns
MAX_WIDTH = 1 << 14
MAX_INPUTS = 1 << 15  # so that sums of products, those of the groups too, fit 32 bits
MAX_SHIFT = 24
MAX_FACTOR = (1 << 15) - 1


@dataclass(frozen=True, kw_only=True)
class LevelPart(CodingTables):
    """K or V of one layer, C values a token, in coding order. Arrays are [C] unless something else is said."""

    rotated: bool
    fix: Array
    """int8: binary places of the fixed point that values are predicted in."""
    gain: Array
    """int16: makes an 8-bit input of later parts of a value in fixed point."""
    narrow: Array
    """int16: makes an 8-bit residual for later groups of one in fixed point."""
    shift: Array
    """int8: how many places a sum has more than the fixed point."""
    bias: Array
    """int32, in units of the sum."""
    row: Array | None
    """int16: layer 0: what the token's 8-bit numbers are multiplied by; None elsewhere."""
    weight: Array | None
    """int8 [inputs, C]; None where there are no inputs."""
    groups: tuple[Array, ...]
    """int8 [GROUP * g, columns of group g] for g from 1 on; empty in layer 0."""


@dataclass(frozen=True, kw_only=True)
class LevelModel(LinearModel):
    """Everything that encoder and decoder of one level know. Immutable."""

    level: int
    parts: tuple[tuple[LevelPart, LevelPart], ...]
    token_kv: Array
    """int8 [rows, C of K_0 + C of V_0], as in the profile."""
    freqs: Array
    """uint16 [2 * CLASSES, SYMBOLS], rows sum to 4096."""

    @property
    def reach(self) -> int:
        """Layers before that parts are predicted from."""
        return REACH[self.level]

    @classmethod
    def from_arrays(
        cls,
        layout: KVLayout,
        level: int,
        lossless: Mapping[str, Array],
        levels: Mapping[str, Array],
        section: str = SECTION,
    ) -> LevelModel:
        """Make the model of a level of a profile's sections "lossless" (tokens and angles) and "levels".

        section: for errors, the name of a section that is not "levels" but has the same arrays.

        Raises:
            ProfileError: names the array that is missing or malformed.
        """
        base, taken = SectionArrays("predictive", "lossless", lossless), SectionArrays("predictive", section, levels)
        half = rotated_half(layout, taken.codec)
        widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
        token_kv, _ = token_table(base, sum(widths[0]))
        orders = [(coding_order(k, half), np.arange(v)) for k, v in widths]
        parts = []
        for number in range(len(widths)):
            before = [number - back for back in range(1, REACH[level] + 1) if number >= back]
            inputs = [orders[i][which] for i in before for which in range(2)]
            k = _part(taken, level, number, 0, orders, inputs, bool(half))
            v = _part(taken, level, number, 1, orders, [*inputs, orders[number][0]] if number else [], False)
            parts.append((k, v))
        fine, coarse = rotation_tables(base, half)
        return cls(
            layout=layout,
            level=level,
            parts=tuple(parts),
            token_kv=token_kv,
            freqs=taken.all_frequencies(f"{level}.freqs", 2 * CLASSES, SYMBOLS),
            rope_fine=fine,
            rope_coarse=coarse,
        )


def levels_of(arrays: Mapping[str, Array]) -> tuple[int, ...]:
    """The levels that a section "levels" has, ascending."""
    return tuple(level for level in LEVELS if f"{level}.freqs" in arrays)


def coding_order(width: int, half: int) -> npt.NDArray[np.int64]:
    """Which column of a part is coded when: rotary pairs, `half` columns apart in their head, stand side by side."""
    if not half:
        return np.arange(width)
    return np.arange(width).reshape(-1, 2, half).transpose(0, 2, 1).reshape(-1)


def group_sizes(width: int) -> list[int]:
    """The columns of each group of a part."""
    return [min(GROUP, width - begin) for begin in range(0, width, GROUP)]


def packed_size(width: int) -> int:
    """How many weights from group to group a part has."""
    return sum(GROUP * number * size for number, size in enumerate(group_sizes(width)))


def _part(
    taken: SectionArrays,
    level: int,
    number: int,
    which: int,
    orders: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
    inputs: list[npt.NDArray[np.int64]],
    rotated: bool,
) -> LevelPart:
    order = orders[number][which]
    width, shared, own = len(order), f"{number}.{'kv'[which]}.", f"{level}.{number}.{'kv'[which]}."
    if width > MAX_WIDTH or sum(map(len, inputs)) > MAX_INPUTS:
        raise taken.error(own + "weight", f"expected at most {MAX_WIDTH} columns and {MAX_INPUTS} inputs")
    fix = taken.take(shared + "fix", np.int8, (width,), 30)[order]
    if fix.min() < -14 or (rotated and (fix[::2] != fix[1::2]).any()):
        raise taken.error(shared + "fix", "expected numbers from -14 to 30, the same in both halves of a pair")
    begins, groups = 0, []
    if number:
        packed = taken.take(own + "group", np.int8, (packed_size(width),), 127)
        for g, size in enumerate(group_sizes(width)):
            groups.append(packed[begins : begins + GROUP * g * size].reshape(GROUP * g, size))
            begins += GROUP * g * size
    return LevelPart(
        rotated=rotated,
        fix=fix,
        gain=_factor(taken, shared + "gain", width)[order],
        narrow=_factor(taken, own + "narrow", width)[order],
        shift=_not_negative(taken, own + "shift", np.int8, width, MAX_SHIFT)[order],
        bias=taken.take(own + "bias", np.int32, (width,), MAX_BIAS)[order],
        row=None if number else _factor(taken, shared + "row", width)[order],
        weight=_weight(taken, own + "weight", order, inputs),
        groups=tuple(groups[1:]),
        scale=taken.take(own + "scale", np.int16, (width,), MAX_SCALE)[order],
        adapt=taken.take(own + "adapt", np.int32, (3,), MAX_ADAPT),
    )


def _weight(
    taken: SectionArrays, name: str, order: npt.NDArray[np.int64], inputs: list[npt.NDArray[np.int64]]
) -> Array | None:
    """The weights of a part with its columns, and the columns of its inputs, in coding order."""
    if not inputs:
        return None
    begins = np.cumsum([0, *map(len, inputs)])
    weight = taken.take(name, np.int8, (int(begins[-1]), len(order)), 127)
    rows = np.concatenate([begin + columns for begin, columns in zip(begins, inputs, strict=False)])
    return np.ascontiguousarray(weight.take(rows, 0).take(order, 1))


def _factor(taken: SectionArrays, name: str, width: int) -> Array:
    return _not_negative(taken, name, np.int16, width, MAX_FACTOR)


def _not_negative(taken: SectionArrays, name: str, dtype: type, width: int, limit: int) -> Array:
    array = taken.take(name, dtype, (width,), limit)
    if array.min() < 0:
        raise taken.error(name, f"expected numbers from 0 to {limit}")
    return array
