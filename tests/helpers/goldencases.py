"""The caches behind the golden files: integer formulas, so that they are the same on every machine and for ever."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstore import KVLayout, LayerLayout
from kvstore.codecs import BlockInfo

_MIXED = (LayerLayout(1, 8, 24), LayerLayout(5, 3, 7), LayerLayout(2, 1, 16))
_SPECIAL = {  # NaNs with payloads, infinities, subnormals, both zeros
    "bfloat16": [0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x0000, 0x8000],
    "float16": [0x7E01, 0xFFFF, 0x7C01, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x0000, 0x8000],
    "float32": [0x7FC12345, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0, 0x80000000],
    "float8_e5m2": [0x7F, 0xFF, 0x7D, 0x7C, 0xFC, 0x01, 0x83, 0x00, 0x80],
    "float8_e4m3fn": [0x7F, 0xFF, 0x7E, 0xFE, 0x08, 0x01, 0x87, 0x00, 0x80],
}
_MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23, "float8_e5m2": 2, "float8_e4m3fn": 3}
_MIDDLE = {"bfloat16": 127, "float16": 15, "float32": 127, "float8_e5m2": 15, "float8_e4m3fn": 7}


@dataclass(frozen=True)
class Case:
    """One block. fill: "wave" (near each other, as caches are), "upcast" (the same, of bf16 that is held as fp32),
    "noise" (all bits), "zeros" or "special"."""

    layout: KVLayout
    count: int
    fill: str
    start: int = 0

    def info(self) -> BlockInfo:
        tokens = (np.arange(self.count, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(15)
        return BlockInfo(self.layout, tokens, self.start)

    def kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (self._tensor(x.heads, x.key_dim, 2 * number), self._tensor(x.heads, x.value_dim, 2 * number + 1))
            for number, x in enumerate(self.layout.layers)
        ]

    def raw(self) -> bytes:
        """The block as codec 0 has it: the tensors one after the other."""
        return b"".join(t.view(torch.uint8).numpy().tobytes() for pair in self.kv() for t in pair)

    def _tensor(self, heads: int, dim: int, which: int) -> torch.Tensor:
        width = 8 * self.layout.item_bytes
        h, t, d = np.ogrid[:heads, : self.count, :dim]
        index = ((which * 64 + h) * 4096 + t) * 4096 + d
        noise = _mixed(index.astype(np.uint64)) >> np.uint64(64 - width)
        if self.fill == "noise":
            bits = noise
        elif self.fill == "special":
            values = np.array(_SPECIAL[self.layout.dtype], np.uint64)
            bits = values[(h + t + d) % len(values)]
        elif self.fill == "zeros":
            bits = np.zeros_like(noise)
        else:
            # Sign and mantissa as noise, the exponent around that of 1.0 and a function of the channel.
            mantissa = _MANTISSA[self.layout.dtype]
            exponent = _MIDDLE[self.layout.dtype] - (d % 5) - (t % 2)
            sign = ((h + d) % 2) << (width - 1)
            low = noise & np.uint64((1 << mantissa) - 1)
            bits = (sign + (exponent << mantissa)).astype(np.uint64) + low
            if self.fill == "upcast":
                bits &= np.uint64(0xFFFF0000)
        integers = np.ascontiguousarray(bits.astype(f"uint{width}")).view(f"int{width}")
        return torch.from_numpy(integers).view(getattr(torch, self.layout.dtype))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: no two inputs alike, and nothing in the output to compress."""
    numbers = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# Only ever added to.
CASES = {
    "bfloat16-wave": Case(KVLayout.uniform(3, 2, 16, "bfloat16"), 16, "wave"),
    "float16-wave": Case(KVLayout.uniform(3, 2, 16, "float16"), 16, "wave", start=64),
    "float32-wave": Case(KVLayout.uniform(3, 2, 16, "float32"), 16, "wave", start=1 << 20),
    "bfloat16-noise": Case(KVLayout.uniform(1, 2, 32, "bfloat16"), 32, "noise"),
    "float32-noise": Case(KVLayout.uniform(1, 1, 32, "float32"), 33, "noise"),
    "bfloat16-zeros": Case(KVLayout.uniform(2, 2, 32, "bfloat16"), 16, "zeros"),
    "bfloat16-special": Case(KVLayout.uniform(2, 1, 9, "bfloat16"), 7, "special"),
    "float16-special": Case(KVLayout.uniform(2, 1, 9, "float16"), 7, "special"),
    "float32-special": Case(KVLayout.uniform(2, 1, 9, "float32"), 7, "special"),
    "bfloat16-mixed": Case(KVLayout(_MIXED, "bfloat16"), 37, "wave"),
    "bfloat16-one-token": Case(KVLayout.uniform(4, 3, 16, "bfloat16"), 1, "wave"),
    "float32-one-value": Case(KVLayout.uniform(1, 1, 1, "float32"), 1, "noise"),
    "float32-heads": Case(KVLayout.uniform(2, 2, 32, "float32"), 9, "wave"),
    "float32-upcast": Case(KVLayout.uniform(2, 2, 16, "float32"), 17, "upcast"),
    "float16-heads": Case(KVLayout.uniform(2, 2, 32, "float16"), 15, "wave"),
    "float8_e5m2-wave": Case(KVLayout.uniform(2, 2, 32, "float8_e5m2"), 21, "wave"),
    "float8_e5m2-special": Case(KVLayout.uniform(2, 1, 9, "float8_e5m2"), 7, "special"),
    "float8_e4m3fn-wave": Case(KVLayout.uniform(2, 2, 32, "float8_e4m3fn"), 21, "wave"),
    "float8_e4m3fn-special": Case(KVLayout.uniform(2, 1, 9, "float8_e4m3fn"), 7, "special"),
    "float8_e4m3fn-noise": Case(KVLayout.uniform(1, 1, 32, "float8_e4m3fn"), 33, "noise"),
}
