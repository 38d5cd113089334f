# fmt: off
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Array = npt.NDArray[Any]
_Longs = npt.NDArray[np.int64]

FALL_BACK: int

class Model:
    def __init__(
        self, *, shapes: _Longs, in_scale: Sequence[_Array], out_scale: Sequence[_Array], scale: Sequence[_Array],
        bias: Sequence[_Array], adapt: Sequence[_Array], fix: Sequence[_Array | None], weight: Sequence[_Array | None],
        token_kv: _Array, freqs: _Array | None = None, rope_fine: _Array | None = None,
        rope_coarse: _Array | None = None
    ) -> None: ...
    @property
    def positions(self) -> int: ...

def encode(
    model: Model, tokens: _Array, start: int, rows: _Longs, out: Buffer, limit: int | None = None,
    level: str | None = None, dtype: str = "bfloat16"
) -> tuple[int, ...] | int | None: ...
def decode(
    model: Model, tokens: _Array, start: int, count: int, payload: Buffer, sizes: Sequence[int], rows: _Longs,
    wanted: int, level: str | None = None, dtype: str = "bfloat16"
) -> str | None: ...

class InOrder:
    @staticmethod
    def until(blocks: Sequence[InOrder], end: int) -> list[str | None]: ...

def in_order(
    model: Model, tokens: _Array, start: int, payload: Buffer, sizes: Sequence[int], rows: _Longs, wanted: int,
    level: str | None = None
) -> InOrder: ...
def residuals(
    model: Model, tokens: _Array, start: int, rows: _Longs, level: str | None = None
) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.int32]]] | None: ...
