import numpy as np
import numpy.typing as npt

def copy_rows(
    target: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32],
    tokens: int,
) -> None: ...
