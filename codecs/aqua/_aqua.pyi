"""csrc/bindings/aqua.cc."""

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

class Higgs:
    def __init__(self, bits: int, signs: _Floats, points: _Floats) -> None: ...
    def encode_rows(self, values: _Floats, out: _Bytes, level: str | None = None) -> bool: ...
    def decode_rows(self, data: _Bytes, out: _Floats, level: str | None = None) -> str | None: ...
    def encode(
        self,
        cache: npt.NDArray[np.uint16],
        heads: int,
        sinks: int,
        cos: _Floats | None,
        sin: _Floats | None,
        guess: _Floats | None,
        predictor: Predictor | None,
        inputs: list[_Floats],
        out: _Bytes,
        found: _Floats,
        level: str | None = None,
    ) -> bool: ...
    def decode(
        self,
        cache: npt.NDArray[np.uint16],
        heads: int,
        sinks: int,
        cos: _Floats | None,
        sin: _Floats | None,
        guess: _Floats | None,
        predictor: Predictor | None,
        inputs: list[_Floats],
        data: _Bytes,
        found: _Floats,
        level: str | None = None,
    ) -> str | None: ...

class Predictor:
    def __init__(self, weights: _Floats, outputs: int) -> None: ...
    def predict(self, inputs: list[_Floats], out: _Floats, level: str | None = None) -> None: ...
