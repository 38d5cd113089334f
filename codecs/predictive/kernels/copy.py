# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""Pieces of one buffer to where they belong in another, at any addresses: words of layers to a stream, and back."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    source,  # bytes
    target,  # bytes, written
    pieces,  # [pieces, 3] int64: first byte in source, first byte in target, bytes; the caller vouches for them
    TILE: tl.constexpr,
):
    """Grid (pieces, programs a piece)."""
    piece = pieces + 3 * tl.program_id(0).to(tl.int64)
    source += tl.load(piece)
    target += tl.load(piece + 1)
    count = tl.load(piece + 2)
    lane = tl.arange(0, TILE).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * TILE
    while at < count:
        inside = at + lane < count
        tl.store(target + at + lane, tl.load(source + at + lane, mask=inside, other=0), mask=inside)
        at += tl.num_programs(1) * TILE
