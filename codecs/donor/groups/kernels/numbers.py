# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""What coding and decoding against donors share: single operations of fp32, each rounded by itself.

The arithmetic is that of ../reference.py, bit for bit. Values are bf16 bits, int32 0..65535.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import exponent
from kvstore.codecs.predictive.kernels.dense import upper


@triton.jit
def value_of(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def finite(bits):
    """The same bits, 0 for infinities and NaN."""
    return tl.where(exponent(bits) == 255, 0, bits)


@triton.jit
def power(shift):
    """2^shift as fp32, of int32 -126..127."""
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def added(bits, delta, shift):
    """Bits of what donors say (finite) and of what the model adds, which is larger by 2^shift."""
    return upper(value_of(bits) + value_of(finite(delta)) * power(-shift))


@triton.jit
def difference(x, bits, shift):
    """Bits of what a value differs in from what donors say, larger by 2^shift."""
    return upper((value_of(x) - value_of(bits)) * power(shift))


@triton.jit
def weight(quarters):
    """2^(-quarters / 4) as fp32, of int32."""
    i = quarters & 3  # bits of 2^(-i / 4)
    low = tl.where(i == 0, 0x3F800000, 0x3F5744FD)
    root = tl.where(i < 2, low, tl.where(i == 2, 0x3F3504F3, 0x3F1837F0))
    return (root - ((quarters >> 2) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def distance(x, bits):
    """|value - prediction| as fp32, 0 if that is not finite."""
    found = tl.abs(value_of(x) - value_of(bits))
    return tl.where((found.to(tl.int32, bitcast=True) >> 23) == 255, 0.0, found)


@triton.jit
def quarters_of(size):
    """floor(4 log2) of fp32 from 0 on; 0 gives some less than -500."""
    bits = size.to(tl.int32, bitcast=True)
    m = ((bits >> 8) & 0x7FFF) | 0x8000
    above = (m >= 38968).to(tl.int32) + (m >= 46341).to(tl.int32) + (m >= 55109).to(tl.int32)
    return 4 * ((bits >> 23) - 127) + above
