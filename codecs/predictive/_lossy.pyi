# fmt: off
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Array = npt.NDArray[Any]
_Longs = npt.NDArray[np.int64]

class Model:
    def __init__(self, base: dict[str, Any], own: dict[str, Any]) -> None: ...
    @property
    def positions(self) -> int: ...

def decode(
    model: Model, tokens: _Array, start: int, payload: Buffer, sizes: Sequence[int], rows: _Longs, wanted: int,
    level: str | None = None
) -> str | None: ...
def trace(
    model: Model, tokens: _Array, start: int, payload: Buffer, sizes: Sequence[int], rows: _Longs,
    level: str | None = None
) -> list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int8], npt.NDArray[np.uint8]]] | str: ...

class Encoder:
    def __init__(
        self, model: Model, *, analysis: Sequence[_Array], focus: Sequence[_Array], basis: Sequence[_Array],
        price: _Array, escape: _Array, centroids: _Array
    ) -> None: ...

FALL_BACK: int

def encode(
    encoder: Encoder, tokens: _Array, start: int, rows: _Longs, steps: tuple[float, float], quarters: tuple[int, int],
    out: Buffer, limit: int | None = None, level: str | None = None, every: int = 1
) -> tuple[int, ...] | int | None: ...
