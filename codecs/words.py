"""What stands for a value of another dtype where a codec works with bf16: its *word*, and what that leaves out.

A word has a sign, 8 bits of exponent and 7 of mantissa, as a bf16. That of an fp32 is its upper half; that of an fp16
has its exponent field plus 112 and the 7 highest bits of its mantissa.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

KEPT_BITS = {"bfloat16": 0, "float32": 16, "float16": 3}
"""Bits of a value that its word leaves out, by dtype."""


def words_of(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Return the words of values, of the same shape, as a view of bf16 values.

    Args:
        tensor: contiguous, on the CPU; bfloat16, float32 or float16.
    """
    import torch

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
