"""The predictors of AQUA-KV (codec 5): how keys and values of a layer follow from those before.

Keys are predicted from the decoded keys of the previous layer, before their rotary embedding; values from the decoded
keys of their own layer and the values of the previous one.

What a prediction starts from is rounded to bf16, so that its products with fp16 weights are exact, in single precision,
too. Predictions are sums in single precision in the order of the inputs (`Prediction`), which csrc/aqua makes fast.
Older records have sums in double precision (`predict`), which are exact in whatever order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codecs.aqua._aqua import Predictor
from kvstore.codecs.aqua.higgs import Floats
from kvstore.core.layout import KVLayout
from kvstore.core.rope import frequencies
from kvstore.errors import ProfileError

Weights = npt.NDArray[np.float16]
Wide = npt.NDArray[np.float64]
_NAMES = ("key", "value")
MOST_WEIGHTS = 1 << 32  # of all predictors: none that can be fitted is larger


@dataclass(frozen=True, eq=False)
class AquaPredictors:
    """Linear predictors of every layer from the second on. Immutable; nobody may write into the arrays.

    K is predicted from K of the previous layer; V from K of its own layer and V of the previous one; all heads, keys
    before their rotary embedding.

    Attributes:
        layout: of the caches.
        weights: of K and of V of each layer, float16 `[inputs + 1, outputs]`; the last row is added.

    Raises:
        ProfileError: the weights do not fit the layout or are not finite, or the layout's rotary embedding is unknown.

    Example:
        >>> layout = KVLayout.uniform(num_layers=2, heads=1, head_dim=2)
        >>> predictors = AquaPredictors(layout, ((np.zeros((3, 2), np.float16), np.zeros((5, 2), np.float16)),))
        >>> AquaPredictors.from_arrays(layout, predictors.to_arrays()).fingerprint == predictors.fingerprint
        True
    """

    layout: KVLayout
    weights: tuple[tuple[Weights, Weights], ...]

    def __post_init__(self) -> None:
        for layer in self.layout.layers:
            try:
                frequencies(self.layout.rope, layer.key_dim)
            except ValueError as error:
                raise ProfileError(f"aqua: keys cannot be predicted: {error}") from error
        shapes = weight_shapes(self.layout)
        if len(self.weights) != len(shapes):
            raise ProfileError(f"aqua: expected predictors of {len(shapes)} layers, found {len(self.weights)}")
        for number, pairs in enumerate(zip(self.weights, shapes, strict=True), 1):
            for name, array, shape in zip(_NAMES, *pairs, strict=True):
                if not isinstance(array, np.ndarray) or array.dtype != np.float16 or array.shape != shape:
                    found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
                    raise ProfileError(f"aqua: {name}.{number}: expected float16 {shape}, found {found}")
                if not np.isfinite(array).all():
                    raise ProfileError(f"aqua: {name}.{number}: weights must be finite")

    @cached_property
    def wide(self) -> tuple[tuple[Wide, Wide], ...]:
        """The weights as float64."""
        return tuple((key.astype(np.float64), value.astype(np.float64)) for key, value in self.weights)

    @cached_property
    def single(self) -> tuple[tuple[Predictor, Predictor], ...]:
        """The weights as a `Prediction` takes them."""
        return tuple((single_of(key), single_of(value)) for key, value in self.weights)

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that tell these weights from others; never 0."""
        found = 0
        for array in (array for pair in self.weights for array in pair):
            found = zlib.crc32(array.astype("<f2").tobytes(), found)
        return found or 1

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the weights by name, as a profile keeps them."""
        pairs = enumerate(self.weights, 1)
        return {f"{name}.{number}": array for number, pair in pairs for name, array in zip(_NAMES, pair, strict=True)}

    @classmethod
    def from_arrays(cls, layout: KVLayout, arrays: Mapping[str, npt.NDArray[Any]]) -> AquaPredictors:
        """Do the inverse of `to_arrays`. Raises `ProfileError` for a missing or unknown name, and as the class does."""
        expected = [[f"{name}.{number}" for name in _NAMES] for number in range(1, len(layout.layers))]
        wanted = {name for names in expected for name in names}
        if wanted != set(arrays):
            odd = min(wanted ^ set(arrays))
            raise ProfileError(f"aqua: the array {odd!r} is {'missing' if odd in wanted else 'unknown'}")
        return cls(layout, tuple((arrays[key], arrays[value]) for key, value in expected))


def weight_shapes(layout: KVLayout) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Of every layer from the second on: the shapes of the weights of K and of V. Raises `ProfileError` where they
    would be absurd."""
    widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
    shapes = [((before[0] + 1, own[0]), (own[0] + before[1] + 1, own[1])) for before, own in pairwise(widths)]
    if sum(math.prod(shape) for pair in shapes for shape in pair) > MOST_WEIGHTS:
        raise ProfileError("aqua: the layers of this layout are too wide to be predicted")
    return shapes


def predict(weights: Wide, inputs: Sequence[Floats]) -> Floats:
    """inputs: bf16 numbers, `[tokens, n]` each. Returns float32 `[tokens, outputs]`."""
    with np.errstate(invalid="ignore", over="ignore"):
        found: Floats = (np.concatenate(inputs, axis=1).astype(np.float64) @ weights[:-1] + weights[-1]).astype("f4")
    return found


def single_of(weights: Weights) -> Predictor:
    """weights: `[inputs + 1, outputs]`."""
    return Predictor(weights.astype(np.float32).reshape(-1), weights.shape[1])


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of rows: sums in single precision of products with what they are predicted from.

    Attributes:
        predictor: the weights.
        inputs: bf16 numbers, `[tokens, n]` each, tokens > 0.
        outputs: numbers in a row.
    """

    predictor: Predictor
    inputs: Sequence[Floats]
    outputs: int

    def rows(self) -> Floats:
        """Return float32 `[tokens, outputs]`: what is added, then the products with each input, one after the other.
        Inputs with a magnitude below 2**-80 count as 0; a row with one of 2**101 or more, or that is no number, has
        none: NaN."""
        found = np.empty((len(self.inputs[0]), self.outputs), np.float32)
        self.predictor.predict([np.ascontiguousarray(part).reshape(-1) for part in self.inputs], found.reshape(-1))
        return found


Guess = Prediction | Floats | None
"""What is expected of rows: to be predicted; or the rows, float32 `[tokens, outputs]`; or nothing."""


def rounded(values: Floats) -> Floats:
    """To the nearest bf16 numbers."""
    import torch

    found: Floats = torch.from_numpy(values).bfloat16().float().numpy()
    return found
