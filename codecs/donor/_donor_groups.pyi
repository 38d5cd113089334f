"""csrc/bindings/donor_groups.cc."""

# fmt: off
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Longs = npt.NDArray[np.int64]

class Coder:
    def __init__(
        self, *, level: int, shapes: _Longs, parts: list[dict[str, npt.NDArray[Any] | None]],
        token_kv: npt.NDArray[np.int8], freqs: npt.NDArray[np.uint16],
        rope_fine: npt.NDArray[np.int16] | None = None, rope_coarse: npt.NDArray[np.int16] | None = None
    ) -> None: ...
    @property
    def positions(self) -> int: ...

def encode(
    coder: Coder, start: int, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], out: Buffer, level: str | None = None
) -> tuple[int, ...] | None: ...
def decode(
    coder: Coder, start: int, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], payload: Buffer, sizes: Sequence[int], wanted: int, level: str | None = None
) -> str | None: ...

class InOrder:
    @staticmethod
    def until(blocks: Sequence[InOrder], end: int) -> list[str | None]: ...

def in_order(
    coder: Coder, start: int, count: int, rows: _Longs, spans: _Longs, donors: list[_Longs],
    angles: npt.NDArray[np.int16], payload: Buffer, sizes: Sequence[int], wanted: int, level: str | None = None
) -> InOrder: ...
