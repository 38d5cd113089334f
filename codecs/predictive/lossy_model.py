"""What the lossy mode of the predictive codec needs of a calibration profile: the arrays, checked, as one object.

It stands on the lossless model of the same profile, whose table of tokens, tables of angles, and scales of inputs it
shares. How the arrays are used is in lossy.py; FORMAT.md has their names and meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.arrays import Array, SectionArrays
from kvstore.codecs.predictive.linear_model import MAX_INPUTS
from kvstore.codecs.predictive.model import MAX_ADAPT, MAX_BIAS, PredictiveModel
from kvstore.core.layout import KVLayout

LEAST = -24  # quarter octaves of sigma / step of the first class; what is below is 0 and is not coded
CLASSES = 48  # of K, and as many of V: up to sigma = 2**5.75 steps
LARGEST = 127  # of a symbol's magnitude; beyond, and where a class has no frequency for it: an escape
ESCAPE = 255
SYMBOLS = 256  # -127..127 + 127, and the escape
MAX_SCALE = 400  # quarter octaves
MAX_LEVELS = 16
MOST = 1e30  # of scales: products of two are finite
EXPECT = 12  # binary places of `expect`
SHIFTS = 8  # of a row's step, by octaves; the one that leaves it as it is has the number
PLAIN = 2  # so that steps are from 4 times as large to 1/32 of it
GROUPS = 6
"""Kinds of inputs, in their order: the token's K_0 and V_0; K, V of the layer before; K, V of the one before that; and,
for V, its own layer's K. Bit i of a part's `uses` says whether it has the i-th. Layer 0 itself is no input."""


@dataclass(frozen=True)
class LossyPart:
    """K or V of one layer, C values a token."""

    uses: int
    """Which kinds of inputs it is predicted from; 0 for layer 0, which is predicted as in the lossless mode."""
    weight: Array | None
    """int8 [inputs, C]; None for layer 0."""
    out_scale: Array | None
    """float32 [C]: what sum + bias is multiplied by to become the prediction, of K before the rotation."""
    bias: Array | None
    """int32 [C]."""
    basis: Array
    """int8 [C (component), C (value)]: the synthesis transform, with a scale of either side."""
    component: Array
    """float32 [C]."""
    unit: Array
    """float32 [C]: of each value."""
    scale: Array
    """int16 [levels, C]: quarter octaves of the standard deviation of each component at each of the model's levels."""
    focus: Array
    """float32 [C of K + C of V + 1]: for encoding, by how many octaves a row is worth a smaller step, from K (before
    the rotation) and V of its layer and 1."""
    adapt: Array
    """int32 [3]: how the scale of a row follows the parts before, in 1/256 (see `lossy.following`)."""


@dataclass(frozen=True)
class LossyModel:
    """Everything that encoder and decoder of the lossy mode know. Immutable."""

    base: PredictiveModel
    parts: tuple[tuple[LossyPart, LossyPart], ...]
    levels: Array
    """int16 [levels, 2]: quarter octaves of the steps of K and of V that `scale` was measured at, increasing."""
    freqs: Array
    """uint16 [2 * CLASSES, SYMBOLS], rows sum to 4096, symmetric."""
    row_freqs: Array
    """uint16 [SHIFTS, SHIFTS], rows sum to 4096: of a row's shift, by that of the part before."""
    centroids: Array
    """float32 [2 * CLASSES, LARGEST + 1]: what the magnitudes stand for, in steps."""
    expect: Array
    """int32 [2 * CLASSES, 2]: the mean magnitude, and by how much a quarter octave more raises it, in 2**-EXPECT."""
    ladder: Array
    """float32 [n, 5]: step of K, of V, bits a value, KL, KL of the first 64 tokens; by growing steps; n may be 0."""

    @property
    def layout(self) -> KVLayout:
        return self.base.layout

    @classmethod
    def from_arrays(cls, base: PredictiveModel, arrays: Mapping[str, Array]) -> LossyModel:
        """Make the model of a profile's section "lossy".

        Raises:
            ProfileError: names the array that is missing or malformed.
        """
        taken = SectionArrays("predictive", "lossy", arrays)
        levels = taken.take("levels", np.int16, (-1, 2), MAX_SCALE)
        if not 1 <= len(levels) <= MAX_LEVELS or (np.diff(levels.astype(int), axis=0) <= 0).any():
            raise taken.error("levels", f"expected 1 to {MAX_LEVELS} rows that increase")
        uses = taken.take("uses", np.uint8, (len(base.parts), 2))
        parts = []
        for number in range(len(base.parts)):
            pair = [_part(base, taken, number, which, int(uses[number, which]), len(levels)) for which in range(2)]
            parts.append((pair[0], pair[1]))
        freqs = taken.frequencies("freqs", 2 * CLASSES, SYMBOLS)
        signed = freqs[:, :ESCAPE]
        if not freqs[:, [LARGEST, ESCAPE]].all():
            raise taken.error("freqs", "every row must have a zero and an escape")
        if (signed != signed[:, ::-1]).any():
            raise taken.error("freqs", "every row must be the same for both signs")
        row_freqs = taken.all_frequencies("row_freqs", SHIFTS, SHIFTS)
        centroids = taken.take("centroids", np.float32, (2 * CLASSES, LARGEST + 1))
        if not (np.isfinite(centroids).all() and centroids.min() >= 0 and centroids.max() <= 2 * LARGEST):
            raise taken.error("centroids", f"expected numbers from 0 to {2 * LARGEST}")
        expect = taken.take("expect", np.int32, (2 * CLASSES, 2), 1 << 20)
        if expect.min() < 1:
            raise taken.error("expect", "expected numbers above 0")
        ladder = taken.take("ladder", np.float32, (-1, 5))
        if not (np.isfinite(ladder).all() and (ladder > 0).all() and (np.diff(ladder[:, :2], axis=0) > 0).all()):
            raise taken.error("ladder", "expected finite numbers above 0, sorted by growing steps")
        return cls(base, tuple(parts), levels, freqs, row_freqs, centroids, expect, ladder)

    def steps_for(self, *, bits: float | None = None, kl: float | None = None) -> tuple[float, float]:
        """Return the steps of K and of V that reach a quality, measured on held-out text.

        Between the rungs of the ladder logarithms are interpolated.

        Args:
            bits: bits a value.
            kl: the largest KL divergence, nats a token, over all tokens that followed and over the first 64 of them.

        Raises:
            ValueError: not exactly one of both is given, or it lies outside of the ladder.
        """
        if (bits is None) == (kl is None):
            raise ValueError("predictive: expected one of bits and kl, found both or neither")
        if not len(self.ladder):
            raise ValueError("predictive: the profile has no ladder of steps; calibrate again while the model can run")
        # Both columns fall or grow monotonically with the step but for noise, which is levelled.
        wanted, column = (bits, self.ladder[:, 2]) if bits is not None else (kl, self.ladder[:, 3:].max(1))
        rises = bits is None
        values = np.log(np.maximum.accumulate(column) if rises else np.minimum.accumulate(column))
        name, unit = ("kl", "nats") if rises else ("bits", "bits a value")
        if wanted is None or not wanted > 0 or not values.min() - 1e-6 <= np.log(wanted) <= values.max() + 1e-6:
            low, high = np.exp(values.min()), np.exp(values.max())
            raise ValueError(f"predictive: {name}: expected {low:.4g} to {high:.4g} {unit}, found {wanted!r}")
        order = np.argsort(values, kind="stable")
        k, v = (float(np.exp(np.interp(np.log(wanted), values[order], np.log(self.ladder[order, i])))) for i in (0, 1))
        return k, v


def input_groups(base: PredictiveModel, number: int, which: int) -> dict[int, tuple[int, int]]:
    """The kinds of inputs that a part can have: kind -> (layer, 0 for K or 1 for V); of kind 0 the layer is -1."""
    found = {0: (-1, 0)}
    for back in (1, 2):
        if number - back >= 1:
            found[2 * back - 1], found[2 * back] = (number - back, 0), (number - back, 1)
    if which:
        found[5] = (number, 0)
    return found if number else {}


def input_widths(base: PredictiveModel, number: int, which: int) -> dict[int, int]:
    """How many inputs each of these kinds is."""
    return {
        kind: base.token_kv.shape[1] if layer < 0 else base.parts[layer][of].width
        for kind, (layer, of) in input_groups(base, number, which).items()
    }


def _part(base: PredictiveModel, taken: SectionArrays, number: int, which: int, uses: int, levels: int) -> LossyPart:
    prefix, width = f"{number}.{'kv'[which]}.", base.parts[number][which].width
    widths = input_widths(base, number, which)
    if any(uses >> kind & 1 and kind not in widths for kind in range(8)) or bool(uses) != bool(number):
        raise taken.error("uses", f"part {prefix[:-1]} cannot use the inputs {uses:#x}")
    weight = out_scale = bias = None
    if uses:
        inputs = sum(size for kind, size in widths.items() if uses >> kind & 1)
        if inputs > MAX_INPUTS:
            raise taken.error(prefix + "weight", f"expected at most {MAX_INPUTS} inputs, found {inputs}")
        weight = taken.take(prefix + "weight", np.int8, (inputs, width), 127)
        bias = taken.take(prefix + "bias", np.int32, (width,), MAX_BIAS)
        out_scale = taken.positive(prefix + "out_scale", width, MOST)
    return LossyPart(
        uses=uses,
        weight=weight,
        out_scale=out_scale,
        bias=bias,
        basis=taken.take(prefix + "basis", np.int8, (width, width)),
        component=taken.positive(prefix + "component", width, MOST),
        unit=taken.positive(prefix + "unit", width, MOST),
        focus=taken.finite(prefix + "focus", sum(part.width for part in base.parts[number]) + 1),
        scale=taken.take(prefix + "scale", np.int16, (levels, width), MAX_SCALE),
        adapt=taken.take(prefix + "adapt", np.int32, (3,), MAX_ADAPT),
    )
