# fmt: off
from typing import Any

import numpy as np
import numpy.typing as npt

def capsules(
    owner: object, addresses: npt.NDArray[np.int64], heads: npt.NDArray[np.uint32], dims: npt.NDArray[np.uint32],
    capacity: int, rows: int, code: int, bits: int
) -> list[Any]: ...
