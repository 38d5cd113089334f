"""What stands for a value of another dtype where a codec works with bf16: its *word*, and what that leaves out.

A word has a sign, 8 bits of exponent and 7 of mantissa, as a bf16. That of an fp32 is its upper half; that of an fp16
has its exponent field plus 112 and the 7 highest bits of its mantissa. That of a float8, in the predictive codec, is
the number itself; of what is no number, that which would follow.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

KEPT_BITS = {"bfloat16": 0, "float32": 16, "float16": 3, "float8_e5m2": 0, "float8_e4m3fn": 0}
"""Bits of a value that its word leaves out, by dtype."""


class Float8(NamedTuple):
    """Bits of the mantissa, and the exponent of the least normal number, as a bf16's."""

    mantissa: int
    least: int


FLOAT8 = {"float8_e5m2": Float8(2, 113), "float8_e4m3fn": Float8(3, 121)}


@lru_cache(maxsize=2)
def float8_words(dtype: str) -> torch.Tensor:
    """Return the words of all codes of a float8, int64 `[256]`, not to be written to.

    Example:
        >>> [hex(word) for word in float8_words("float8_e4m3fn")[[0x38, 0xB8]].tolist()]  # 1, -1
        ['0x3f80', '0xbf80']
    """
    import torch

    form, codes = FLOAT8[dtype], torch.arange(128)
    small = codes.float() * 2.0 ** (form.least - 127 - form.mantissa)
    normal = (codes << (7 - form.mantissa)) - 128 + (form.least << 7)
    words = torch.where(codes < 1 << form.mantissa, small.view(torch.int32).long() >> 16, normal)
    return torch.cat([words, words | 0x8000])


def words_of(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Return the words of values, of the same shape, as a view of bf16 values.

    Args:
        tensor: contiguous, on the CPU; bfloat16, float32, float16 or a float8.
    """
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name in FLOAT8:
        found: npt.NDArray[np.uint16] = float8_words(name).numpy()[tensor.view(torch.uint8).numpy()].astype(np.uint16)
        return found
    if tensor.dtype == torch.float32:
        upper: npt.NDArray[np.uint16] = (tensor.numpy().view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return upper
    bits: npt.NDArray[np.uint16] = tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.bfloat16:
        return bits
    exponent = (bits >> np.uint16(10) & np.uint16(0x1F)) + np.uint16(112)
    words: npt.NDArray[np.uint16] = bits & np.uint16(0x8000) | exponent << np.uint16(7)
    words |= (bits & np.uint16(0x3FF)) >> np.uint16(3)
    return words
