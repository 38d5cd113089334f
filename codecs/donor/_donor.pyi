# fmt: off
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Array = npt.NDArray[Any]
_Longs = npt.NDArray[np.int64]

class Coder:
    def __init__(
        self, *, shapes: _Longs, freqs: _Array, in_scale: Sequence[_Array] | None = None,
        out_scale: Sequence[_Array] | None = None, fix: Sequence[_Array | None] | None = None,
        weight: Sequence[_Array | None] | None = None, rope_fine: _Array | None = None,
        rope_coarse: _Array | None = None
    ) -> None: ...
    @property
    def positions(self) -> int: ...

def encode(
    coder: Coder, start: int, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], propagated: bool, out: Buffer, level: str | None = None
) -> tuple[int, ...] | None: ...
def decode(
    coder: Coder, start: int, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], propagated: bool, payload: Buffer, sizes: Sequence[int], wanted: int,
    level: str | None = None
) -> str | None: ...

class InOrder:
    @staticmethod
    def until(blocks: Sequence[InOrder], end: int) -> list[str | None]: ...

def in_order(
    coder: Coder, start: int, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], propagated: bool, payload: Buffer, sizes: Sequence[int], wanted: int,
    level: str | None = None
) -> InOrder: ...
