# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""Predictions of one part of many blocks: a product of 8-bit matrices, scaled and rotated, and the classes they give.

A program works on BLOCK_M rows and on BLOCK_N pairs of columns: of a head, if K is rotated, with both halves at hand;
of two neighbouring groups of BLOCK_N columns otherwise.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import RANGE, bins, octaves, rounded


@triton.jit
def upper(v):
    """The upper 16 bits of fp32, int32 0..65535."""
    return (v.to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def _store(v, column, inside, exists, row, width, offset, scale, mu, classes, first_class):
    """Predictions of BLOCK_M rows and BLOCK_N columns, and their classes."""
    bits = upper(v)
    linear, quarter = bins(tl.load(scale + column, mask=inside, other=0)[None, :], offset[:, None])
    both = exists[:, None] & inside[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(mu + place, bits.to(tl.int16), mask=both)
    tl.store(classes + place, (first_class + 4 * octaves(bits, linear) + quarter).to(tl.uint8), mask=both)


@triton.jit
def columns_of(width, ROTATE: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns a and b of a program's pairs and whether they exist; and the number of a pair in its head, if ROTATE."""
    lane = tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    if ROTATE:
        HALF: tl.constexpr = DIM // 2
        TILES: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
        pair = tile % TILES * BLOCK_N + lane
        column_a = tile // TILES * DIM + pair
        return column_a, column_a + HALF, pair < HALF, pair < HALF, pair
    column_a = tile * 2 * BLOCK_N + lane
    column_b = column_a + BLOCK_N
    return column_a, column_b, column_a < width, column_b < width, lane


@triton.jit
def table_rows(table, table_stride, vocabulary, token, column_a, column_b, inside_a, inside_b):
    """Columns a and b of the tokens' rows in the table of layer 0, int32; unknown tokens have 0."""
    known = (token >= 0) & (token < vocabulary)
    place = table + tl.where(known, token, 0)[:, None] * table_stride
    a = tl.load(place + column_a[None, :], mask=known[:, None] & inside_a[None, :], other=0)
    b = tl.load(place + column_b[None, :], mask=known[:, None] & inside_b[None, :], other=0)
    return a.to(tl.int32), b.to(tl.int32)


@triton.jit
def products(
    from_q,  # first inputs of the rows
    weight,
    blocks,
    shift0,
    until0,
    shift1,
    until1,
    shift2,
    column_a,
    column_b,
    inside_a,
    inside_b,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The rows' inputs times columns a and b of the weights; see `dense_kernel`."""
    k = tl.arange(0, BLOCK_K)
    from_q += k[None, :]
    stride = blocks * BLOCK_K
    from_a = weight + column_a.to(tl.int64)[None, :] * stride + k[:, None]
    from_b = weight + column_b.to(tl.int64)[None, :] * stride + k[:, None]
    total_a = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    total_b = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for i in range(blocks):
        shift = tl.where(i < until0, shift0, tl.where(i < until1, shift1, shift2))
        q = tl.load(from_q + (i + shift) * BLOCK_K)
        a = tl.load(from_a + i * BLOCK_K, mask=inside_a[None, :], other=0)
        b = tl.load(from_b + i * BLOCK_K, mask=inside_b[None, :], other=0)
        total_a = tl.dot(q, a, total_a, out_dtype=tl.int32)
        total_b = tl.dot(q, b, total_b, out_dtype=tl.int32)
    return total_a, total_b


@triton.jit
def _rotated(v_a, v_b, column_a, inside_a, row, pair, exists, from_fixed, cos, sin, HALF: tl.constexpr):
    """Columns a and b after the rotary embedding of their rows."""
    both = exists[:, None] & inside_a[None, :]
    angle = row.to(tl.int64)[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=both, other=0)
    s = tl.load(sin + angle, mask=both, other=0)
    p_a = rounded(v_a, RANGE)
    p_b = rounded(v_b, RANGE)
    power = tl.load(from_fixed + column_a, mask=inside_a, other=0)[None, :]  # the same of both halves
    return (p_a * c - p_b * s).to(tl.float32) * power, (p_b * c + p_a * s).to(tl.float32) * power


@triton.jit(do_not_specialize=["rows", "part", "shift0", "shift1", "shift2", "until0", "until1", "blocks"])
def dense_kernel(
    inputs,  # [rows up to a multiple of BLOCK_M, input_stride] int8
    input_stride,  # a multiple of BLOCK_K
    weight,  # [width, blocks * BLOCK_K] int8, or of layer 0 [vocabulary, table_stride]: see FIRST
    table_stride,
    vocabulary,
    tokens,  # [rows] int64, of layer 0 only
    blocks: "i32",  # noqa: F821
    # Block i of BLOCK_K inputs is block i + shift of a row of `inputs`; the shift changes from two i on.
    shift0: "i32",  # noqa: F821
    until0: "i32",  # noqa: F821
    shift1: "i32",  # noqa: F821
    until1: "i32",  # noqa: F821
    shift2: "i32",  # noqa: F821
    bias,  # [width] int32
    out_scale,  # [width] fp32
    from_fixed,  # [width] fp32, powers of two; K that is rotated only
    cos,  # [rows, DIM / 2] int32
    sin,
    scale,  # [width] int16
    offsets,  # [parts + 1, rows] int32
    part: "i32",  # noqa: F821
    mu,  # [rows, width] int16, set: upper 16 bits of the predictions
    classes,  # [rows, width] uint8, set
    rows: "i32",  # noqa: F821
    width,
    first_class,
    FIRST: tl.constexpr,  # layer 0: columns of a table in place of products
    ROTATE: tl.constexpr,
    DIM: tl.constexpr,  # of a head; counts if ROTATE
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tiles of rows, tiles of pairs)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_a, column_b, inside_a, inside_b, pair = columns_of(width, ROTATE, DIM, BLOCK_N)
    columns = (column_a, column_b, inside_a, inside_b)
    exists = row < rows
    if FIRST:
        token = tl.load(tokens + row, mask=exists, other=-1)
        total_a, total_b = table_rows(weight, table_stride, vocabulary, token, *columns)
        total_a, total_b = 256 * total_a, 256 * total_b  # in the scale of products
    else:
        shifts = (shift0, until0, shift1, until1, shift2)
        from_q = inputs + row.to(tl.int64)[:, None] * input_stride
        total_a, total_b = products(from_q, weight, blocks, *shifts, *columns, BLOCK_M, BLOCK_N, BLOCK_K)
    total_a += tl.load(bias + column_a, mask=inside_a, other=0)[None, :]
    total_b += tl.load(bias + column_b, mask=inside_b, other=0)[None, :]
    v_a = total_a.to(tl.float32) * tl.load(out_scale + column_a, mask=inside_a, other=0)[None, :]
    v_b = total_b.to(tl.float32) * tl.load(out_scale + column_b, mask=inside_b, other=0)[None, :]
    if ROTATE:
        v_a, v_b = _rotated(v_a, v_b, column_a, inside_a, row, pair, exists, from_fixed, cos, sin, DIM // 2)
    offset = tl.load(offsets + part.to(tl.int64) * rows + row, mask=exists, other=0)
    _store(v_a, column_a, inside_a, exists, row, width, offset, scale, mu, classes, first_class)
    _store(v_b, column_b, inside_b, exists, row, width, offset, scale, mu, classes, first_class)
