import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]

def read(file: _U8) -> tuple[int, _U8, _U32, list[bytes]] | str: ...
def xxh3_64(data: _U8) -> int: ...
