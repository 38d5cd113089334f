# fmt: off
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def copy_rows(
    target: npt.NDArray[np.int64], source: npt.NDArray[np.int64], heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32], tokens: int, large: bool = False, unlock: bool = False
) -> None: ...

def pack(
    out: Buffer, source: npt.NDArray[np.int64], heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32],
    tokens: int, unlock: bool = False
) -> None: ...
def pack_all(
    outs: Sequence[Buffer], sources: Sequence[npt.NDArray[np.int64]], heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32], tokens: Sequence[int], level: str | None = None
) -> list[bytes | None]: ...
def unpack(
    target: npt.NDArray[np.int64], packed: Buffer, heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32],
    tokens: int, wanted: int, large: bool = False, unlock: bool = False
) -> None: ...
def unpack_all(
    target: npt.NDArray[np.int64], capacity: int, packed: Sequence[Buffer], heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32], tokens: Sequence[int], at: Sequence[int], wanted: Sequence[int],
    large: bool = False
) -> None: ...

class EntropyModel:
    def __init__(self, freqs: npt.NDArray[np.uint16], costs: npt.NDArray[np.uint16]) -> None: ...

class LayerBlocks:
    def __init__(
        self, dtype: str, heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32],
        target: npt.NDArray[np.int64], capacity: int, owner: Any, model: EntropyModel | None = None,
        level: str | None = None
    ) -> None: ...
    def add(self, payload: Buffer, sizes: Sequence[int], tokens: int, at: int, wanted: int) -> None: ...
    def decode(self, first: int, last: int, begin: int, end: int) -> list[int]: ...

def bounds(
    dtype: str, heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32], tokens: int, entropy: bool = False
) -> tuple[int, int]: ...
def encode(
    dtype: str, heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32], tokens: int,
    source: npt.NDArray[np.int64], out: Buffer, model: EntropyModel | None = None, level: str | None = None
) -> tuple[int, ...] | None: ...
def decode(
    dtype: str, heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32], tokens: int, payload: Buffer,
    sizes: Sequence[int], target: npt.NDArray[np.int64], wanted: int, model: EntropyModel | None = None,
    level: str | None = None, large: bool = False
) -> str | None: ...
