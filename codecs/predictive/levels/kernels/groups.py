# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""What coding and decoding of groups share: sums of products, predictions and residuals in fixed point.

The arithmetic is that of ../reference.py, bit for bit. Columns of a part stand in coding order. A *tile* is the 16
columns of a group in some rows; flat, its values come in the order of the stream, row after row, and what lies beyond
the columns of a last, narrower group does not count. What goes from one value of a tile to another goes through
memory, of which one program alone uses its rows.

Arrays that kernels take. Of the part, [width] each: shift int8, gain, narrow and scale int16, from_fixed and to_fixed
fp32, powers of two; weight int8 [width, stride], if GROUPED. Of the rows: sums int32 [rows, width] without groups;
residuals int8 [rows, stride], if GROUPED; p, mu and values int16 [rows, GROUP] of the group at hand; cos and sin int32
[rows, DIM / 2]; offsets int32 [parts + 1, rows] and fits [parts + 2, rows], of which this part sets the next and its
own; inputs int8 [rows, input_stride], of which it sets the columns from input_column on. Of all: adapts int32
[parts + 1, 3]; firsts int64 [blocks + 1], the first row of each block; places int64 [parts, blocks, PLACE_COLUMNS].
`before` is the width of the part before in the same layer, 0 of K. GROUPED is what is not in layer 0.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import RANGE, number, rounded
from kvstore.codecs.predictive.kernels.dense import columns_of, products, table_rows, upper

GROUP = tl.constexpr(16)
MOST = tl.constexpr(32767.0)


@triton.jit
def clamped(x, most):
    """int32 to numbers from -most - 1 to most."""
    return tl.minimum(tl.maximum(x, -most - 1), most)


@triton.jit
def narrowed(x, factor):
    """8 bits of numbers of 16 bits: times factor / 2^15, rounded half up."""
    return clamped((x * factor + (1 << 14)) >> 15, 127)


@triton.jit
def group_products(
    residuals, weight, stride, row, there, column, inside, reach, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """What the groups before, in `reach` columns, add to the sums of a group, int32 [BLOCK_M, GROUP].

    residuals: int8 [rows, stride]; weight: int8 [width, stride], 0 for what does not come before.
    """
    k = tl.arange(0, BLOCK_K)
    from_residuals = residuals + row[:, None] * stride + k[None, :]
    from_weight = weight + column.to(tl.int64)[None, :] * stride + k[:, None]
    total = tl.zeros((BLOCK_M, GROUP), tl.int32)
    for at in range(0, reach, BLOCK_K):
        r = tl.load(from_residuals + at, mask=there[:, None], other=0)
        w = tl.load(from_weight + at, mask=inside[None, :], other=0)
        total = tl.dot(r, w, total, out_dtype=tl.int32)
    return total


@triton.jit
def turned_place(row, column, HALF: tl.constexpr):
    """Where the angle of a column is in `[rows, HALF]`."""
    return row * HALF + (column >> 1) % HALF


@triton.jit
def predicted(p, across, row, column, inside, from_fixed, cos, sin, DIM: tl.constexpr, ROTATE: tl.constexpr):
    """The upper 16 bits of predictions, int32. p: in fixed point; across: of the other column of the pair."""
    if ROTATE:
        angle = turned_place(row, column, DIM // 2)
        turned = across * tl.load(sin + angle, mask=inside, other=0)
        p = p * tl.load(cos + angle, mask=inside, other=0) + tl.where(column % 2 == 0, -turned, turned)
    return upper(p.to(tl.float32) * tl.load(from_fixed + column, mask=inside, other=0))


@triton.jit
def fixed(x, across, row, column, inside, to_fixed, cos, sin, DIM: tl.constexpr, ROTATE: tl.constexpr):
    """Values in fixed point, int32 of 16 bits. x: bf16 bits, int32; across: of the other column of the pair."""
    scale = tl.load(to_fixed + column, mask=inside, other=0)
    if ROTATE:
        angle = turned_place(row, column, DIM // 2)
        turned = rounded(number(across) * scale, RANGE) * tl.load(sin + angle, mask=inside, other=0)
        u = rounded(number(x) * scale, RANGE) * tl.load(cos + angle, mask=inside, other=0)
        u += tl.where(column % 2 == 0, turned, -turned)
        u = (u + (1 << 13)) >> 14
        return ((u + 0x8000) & 0xFFFF) - 0x8000
    return rounded(number(x) * scale, MOST)


@triton.jit
def in_head(column, DIM: tl.constexpr, ROTATE: tl.constexpr):
    """(head, column of the head as cached) of columns of a part."""
    if ROTATE:
        pair = column >> 1
        return pair // (DIM // 2), pair % (DIM // 2) + column % 2 * (DIM // 2)
    return column // DIM, column % DIM


@triton.jit
def give(
    x,
    across,
    p,
    row,
    column,
    inside,
    to_fixed,
    gain,
    narrow,
    cos,
    sin,
    inputs,
    residuals,
    stride,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """What known values give to others: inputs of later parts, and if GROUPED residuals for later groups.

    inputs: pointer to each value's; residuals: int8 [rows, stride]; p: predictions in fixed point; else as `fixed`.
    """
    u = fixed(x, across, row, column, inside, to_fixed, cos, sin, DIM, ROTATE)
    factor = tl.load(gain + column, mask=inside, other=0).to(tl.int32)
    tl.store(inputs, narrowed(u, factor).to(tl.int8), mask=inside)
    if GROUPED:
        factor = tl.load(narrow + column, mask=inside, other=0).to(tl.int32)
        r = narrowed(clamped(u - p, 32767), factor)
        tl.store(residuals + row * stride + column, r.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["rows", "shift0", "shift1", "shift2", "until0", "until1", "blocks"])
def sums_kernel(
    inputs,  # [rows up to a multiple of BLOCK_M, input_stride] int8
    input_stride,  # a multiple of BLOCK_K
    weight,  # [width, blocks * BLOCK_K] int8, or of layer 0 [vocabulary, table_stride]: see FIRST
    table_stride,
    vocabulary,
    tokens,  # [rows] int64, of layer 0 only
    factor,  # [width] int16, of layer 0 only: what the token's numbers are multiplied by
    blocks: "i32",  # noqa: F821
    shift0: "i32",  # noqa: F821  # as of `dense_kernel`
    until0: "i32",  # noqa: F821
    shift1: "i32",  # noqa: F821
    until1: "i32",  # noqa: F821
    shift2: "i32",  # noqa: F821
    bias,  # [width] int32
    sums,  # [rows, width] int32, set
    rows: "i32",  # noqa: F821
    width,
    FIRST: tl.constexpr,  # layer 0: columns of a table in place of products
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tiles of rows, tiles of pairs of columns): the sums of a part without its groups."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_a, column_b, inside_a, inside_b, _pair = columns_of(width, False, 0, BLOCK_N)
    columns = (column_a, column_b, inside_a, inside_b)
    exists = row < rows
    if FIRST:
        token = tl.load(tokens + row, mask=exists, other=-1)
        total_a, total_b = table_rows(weight, table_stride, vocabulary, token, *columns)
        total_a *= tl.load(factor + column_a, mask=inside_a, other=0).to(tl.int32)[None, :]
        total_b *= tl.load(factor + column_b, mask=inside_b, other=0).to(tl.int32)[None, :]
    else:
        shifts = (shift0, until0, shift1, until1, shift2)
        from_q = inputs + row.to(tl.int64)[:, None] * input_stride
        total_a, total_b = products(from_q, weight, blocks, *shifts, *columns, BLOCK_M, BLOCK_N, BLOCK_K)
    total_a += tl.load(bias + column_a, mask=inside_a, other=0)[None, :]
    total_b += tl.load(bias + column_b, mask=inside_b, other=0)[None, :]
    place = row.to(tl.int64)[:, None] * width
    tl.store(sums + place + column_a[None, :], total_a, mask=exists[:, None] & inside_a[None, :])
    tl.store(sums + place + column_b[None, :], total_b, mask=exists[:, None] & inside_b[None, :])


@triton.jit
def predict_tile(
    sums,
    residuals,
    weight,
    stride,
    shift,
    p,
    row,
    there,
    begin,
    width,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Predictions of a group in fixed point, of rows `row` (int64 [BLOCK_M]) that are `there`: to p [rows, GROUP].

    begin: the group's first column.
    """
    lane = tl.arange(0, GROUP)
    column = begin + lane
    inside = column < width
    total = tl.load(sums + row[:, None] * width + column[None, :], mask=there[:, None] & inside[None, :], other=0)
    if GROUPED:
        total += group_products(residuals, weight, stride, row, there, column, inside, begin, BLOCK_M, BLOCK_K)
    total >>= tl.load(shift + column, mask=inside, other=0).to(tl.int32)[None, :]
    tl.store(p + row[:, None] * GROUP + lane[None, :], clamped(total, 32767).to(tl.int16), mask=there[:, None])
