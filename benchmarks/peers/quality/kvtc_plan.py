"""KVTC's quantiser and how it shares out bits: groups of principal components, each with the type that costs least.

A group is 16, 64, 256 or 1,024 neighbouring components of one token. Its values are 2- or 4-bit integers between the
group's least and greatest (a shift and a scale, 16 bits each), fp8 (e4m3) with a scale of 16 bits, or 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
UNIT = 16  # components: groups begin at multiples of it
SIZES = (16, 64, 256, 1024)
INT2, INT4, FP8, FLOAT = "int2", "int4", "fp8", "float"
BITS = {INT2: 2, INT4: 4, FP8: 8, FLOAT: 16}  # of a value
SIDE = {INT2: 32, INT4: 32, FP8: 16, FLOAT: 0}  # of a group
FP8_MAX = 448.0


@dataclass(frozen=True)
class Group:
    start: int
    size: int
    kind: str

    @property
    def bits(self) -> int:
        """Of one token, before the entropy coder."""
        return self.size * BITS[self.kind] + SIDE[self.kind]


@dataclass(frozen=True)
class Quantised:
    """Of one group. values: uint8 `[tokens, size]`, or uint16 for floats; side: float16 `[tokens, 0 to 2]`."""

    values: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    side: npt.NDArray[np.float16]


def quantise(x: Floats, kind: str) -> Quantised:
    """x: `[tokens, size]`."""
    if kind == FLOAT:
        return Quantised(x.astype(np.float16).view(np.uint16), np.empty((len(x), 0), np.float16))
    if kind == FP8:
        scale = (np.abs(x).max(1, keepdims=True) / FP8_MAX).astype(np.float16)
        scaled = torch.from_numpy(x / np.maximum(scale.astype(np.float32), 1e-7)).clamp(-FP8_MAX, FP8_MAX)
        return Quantised(scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scale)
    top = 2 ** BITS[kind] - 1
    low = x.min(1, keepdims=True).astype(np.float16)
    scale = ((x.max(1, keepdims=True) - low) / top).astype(np.float16)
    found = np.rint((x - low) / np.maximum(scale.astype(np.float32), 1e-7)).clip(0, top)
    return Quantised(found.astype(np.uint8), np.concatenate([low, scale], 1))


def restore(of: Quantised, kind: str) -> Floats:
    """What `quantise` keeps."""
    side = of.side.astype(np.float32)
    if kind == FLOAT:
        return np.ascontiguousarray(of.values).view(np.float16).astype(np.float32)
    if kind == FP8:
        values = torch.from_numpy(of.values.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
        return values * np.maximum(side, 1e-7)
    return of.values.astype(np.float32) * np.maximum(side[:, 1:], 1e-7) + side[:, :1]


Errors = Mapping[tuple[int, int, str], float]
"""Sums of squared errors by (start, size, kind)."""


def errors_of(sample: Floats) -> Errors:
    """Of every group that there can be. sample: components of some tokens, `[tokens, rank]`, rank a multiple of 16."""
    found = {}
    rank = sample.shape[1]
    for size in SIZES:
        for start in range(0, rank - size + 1, UNIT):
            x = np.ascontiguousarray(sample[:, start : start + size])
            for kind in BITS:
                if kind in (INT2, INT4) or size == UNIT:  # larger groups of floats are groups of 16, side by side
                    found[start, size, kind] = float(np.square(restore(quantise(x, kind), kind) - x).sum())
    return found


def plan(errors: Errors, energy: Sequence[float] | npt.NDArray[np.float64], budget: int) -> list[Group]:
    """The groups with the least error that take at most `budget` bits a token; components after the last are dropped.

    errors: of all groups. energy: sums of squares of each component, its error where it is dropped.
    """
    step = UNIT  # every cost is a multiple of it
    units, cells = len(energy) // UNIT, budget // step
    dropped = np.concatenate([np.cumsum(np.asarray(energy, np.float64)[::-1])[::-1], [0.0]])[::UNIT]
    by_end: dict[int, list[tuple[Group, float]]] = {}
    for (start, size, kind), error in errors.items():
        by_end.setdefault((start + size) // UNIT, []).append((Group(start, size, kind), error))
    best = np.full((units + 1, cells + 1), np.inf)  # the error of the components before, by units and cost
    best[0, 0] = 0.0
    chosen: list[list[Group | None]] = [[None] * (cells + 1) for _ in range(units + 1)]
    for end in range(1, units + 1):
        for group, error in by_end.get(end, ()):
            cost = group.bits // step
            if cost > cells:
                continue
            reached = best[group.start // UNIT, : cells + 1 - cost] + error
            for at in np.nonzero(reached < best[end, cost:])[0]:
                best[end, cost + at] = reached[at]
                chosen[end][cost + at] = group
    end, at = np.unravel_index(np.argmin(best + dropped[: units + 1, None]), best.shape)
    found: list[Group] = []
    while end:
        group = chosen[int(end)][int(at)]
        assert group is not None
        found.append(group)
        end, at = group.start // UNIT, int(at) - group.bits // step
    return found[::-1]
