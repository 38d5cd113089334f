# fmt: off
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Array = npt.NDArray[Any]
_Longs = npt.NDArray[np.int64]

class Coder:
    def __init__(self, *, freqs: _Array, costs: _Array, limits: _Array, expected: _Longs, bounds: _Longs) -> None: ...

def encode(
    coder: Coder, shapes: _Longs, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], quarters: int, out: Buffer, level: str | None = None
) -> tuple[int, ...] | None: ...
def decode(
    coder: Coder, shapes: _Longs, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], payload: Buffer, sizes: Sequence[int], wanted: int, level: str | None = None
) -> str | None: ...
