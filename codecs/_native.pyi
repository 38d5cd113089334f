from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

def copy_rows(
    target: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32],
    tokens: int,
) -> None: ...
def splitzip_bound(
    dtype: str, heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32], tokens: int
) -> tuple[int, int]: ...
def splitzip_encode(
    dtype: str,
    heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32],
    tokens: int,
    source: npt.NDArray[np.int64],
    out: Buffer,
    level: str | None = None,
) -> tuple[int, ...] | None: ...
def splitzip_decode(
    dtype: str,
    heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32],
    tokens: int,
    payload: Buffer,
    sizes: Sequence[int],
    target: npt.NDArray[np.int64],
    wanted: int,
    level: str | None = None,
) -> str | None: ...
