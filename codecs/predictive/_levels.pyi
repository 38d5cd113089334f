"""csrc/bindings/levels.cc."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FALL_BACK: int

class Model:
    def __init__(
        self,
        *,
        level: int,
        shapes: npt.NDArray[np.int64],
        parts: list[dict[str, npt.NDArray[Any] | None]],
        token_kv: npt.NDArray[np.int8],
        freqs: npt.NDArray[np.uint16],
        rope_fine: npt.NDArray[np.int16] | None = None,
        rope_coarse: npt.NDArray[np.int16] | None = None,
    ) -> None: ...
    @property
    def level(self) -> int: ...
    @property
    def positions(self) -> int: ...

def encode(
    model: Model,
    tokens: npt.NDArray[Any],
    start: int,
    rows: npt.NDArray[np.int64],
    out: bytearray | memoryview,
    limit: int | None = None,
    level: str | None = None,
) -> tuple[int, ...] | int | None: ...
def decode(
    model: Model,
    tokens: npt.NDArray[Any],
    start: int,
    payload: bytes | bytearray | memoryview,
    sizes: Sequence[int],
    rows: npt.NDArray[np.int64],
    wanted: int,
    level: str | None = None,
) -> str | None: ...

class InOrder:
    @staticmethod
    def until(blocks: Sequence[InOrder], end: int) -> list[str | None]: ...

def in_order(
    model: Model,
    tokens: npt.NDArray[Any],
    start: int,
    payload: bytes | bytearray | memoryview,
    sizes: Sequence[int],
    rows: npt.NDArray[np.int64],
    wanted: int,
    level: str | None = None,
) -> InOrder: ...
def multiply(rounds: int, level: str | None = None) -> int:
    """Multiply and add 8-bit numbers as fast as the sums' instructions can; how many were. For benchmarks."""
