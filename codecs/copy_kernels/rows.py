# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""Rows of many tensors to where they belong in others, at any addresses on one device."""

import triton
import triton.language as tl

# Columns of the table. Addresses in bytes, strides and rows in units of `UNIT`.
SOURCE, SOURCE_HEAD, SOURCE_TOKEN = (tl.constexpr(i) for i in range(3))
TARGET, TARGET_HEAD, TARGET_TOKEN = (tl.constexpr(i) for i in range(3, 6))
HEADS, TOKENS, ROW = (tl.constexpr(i) for i in range(6, 9))
COLUMNS = tl.constexpr(9)


@triton.jit
def copy_rows_kernel(
    table,  # [tensors, COLUMNS] int64; the caller vouches for it
    UNIT: tl.constexpr,  # what is loaded and stored at once: an unsigned integer of 1, 2, 4 or 8 bytes
    TILE: tl.constexpr,
):
    """Grid (tensors, programs a tensor). A tensor has less than 2**31 units."""
    line = table + COLUMNS * tl.program_id(0).to(tl.int64)
    source = tl.load(line + SOURCE).to(tl.pointer_type(UNIT))
    target = tl.load(line + TARGET).to(tl.pointer_type(UNIT))
    source_head, source_token = tl.load(line + SOURCE_HEAD), tl.load(line + SOURCE_TOKEN)
    target_head, target_token = tl.load(line + TARGET_HEAD), tl.load(line + TARGET_TOKEN)
    heads, tokens, row = tl.load(line + HEADS), tl.load(line + TOKENS), tl.load(line + ROW)
    row, head_units = row.to(tl.int32), (tokens * row).to(tl.int32)
    count = (heads * tokens * row).to(tl.int32)
    step = tl.num_programs(1) * TILE
    for first in range(tl.program_id(1) * TILE, count, step):
        unit = first + tl.arange(0, TILE)
        head, inside = unit // head_units, unit % head_units
        token, column = inside // row, inside % row
        at = head.to(tl.int64) * source_head + token.to(tl.int64) * source_token + column
        to = head.to(tl.int64) * target_head + token.to(tl.int64) * target_token + column
        tl.store(target + to, tl.load(source + at, mask=unit < count), mask=unit < count)
