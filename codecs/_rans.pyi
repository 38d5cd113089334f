import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]

UNKNOWN_CLASS: int
UNUSED_SYMBOL: int
NO_ROOM: int
DAMAGED: int

class Tables:
    def __init__(self, freqs: npt.NDArray[np.uint16], prob_bits: int) -> None: ...

def bound(count: int) -> int: ...
def encode(tables: Tables, symbols: _U8, classes: _U8, out: _U8, level: str | None = None) -> int: ...
def decode(tables: Tables, stream: _U8, classes: _U8, out: _U8, level: str | None = None) -> int: ...
def machine_level() -> str: ...
