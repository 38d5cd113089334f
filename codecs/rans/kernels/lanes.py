# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""What coding and decoding by rANS share: 32 lanes of one warp that deal out the words of a step among them."""

import triton
import triton.language as tl

LANES = tl.constexpr(32)
LOW = tl.constexpr(1 << 15)
HEADER_WORDS = tl.constexpr(64)

# A table `[streams, 2]` int64 says where each stream is in a buffer, a table `[streams, parts, 2]` where the symbols of
# each part are, and their classes in another array: (first, count).
FIRST = tl.constexpr(0)
COUNT = tl.constexpr(1)


@triton.jit
def bits_of(chosen, lane):
    """Scalar uint32: bit i is set if `chosen` of lane i is. One instruction on devices, unlike a scan."""
    return tl.sum(chosen.to(tl.uint32) << lane.to(tl.uint32), axis=0)


@triton.jit
def ones(x):
    """How many bits of a uint32 are set, in the form that the compiler knows."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def below(chosen_bits, lane):
    """How many of the chosen lanes come before each: `[LANES]` int32."""
    before = (tl.full((LANES,), 1, tl.uint32) << lane.to(tl.uint32)) - 1
    return ones(chosen_bits & before)


@triton.jit
def within(begin, size, all_bytes):
    """Whether a stream of `size` bytes can lie at byte `begin` of so many: at an even place, its words countable."""
    return (begin >= 0) & (begin % 2 == 0) & (size >= 0) & (size < 1 << 31) & (size <= all_bytes - begin)
