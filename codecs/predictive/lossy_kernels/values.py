# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From components to values, in fp32: as csrc/lossy/scalar-inl.h, in its order, each operation rounded by itself.

Other CPUs fuse multiplications and additions, and differ in the last place (FORMAT.md, "With loss").
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import make_inputs


@triton.jit(do_not_specialize=["rows", "blocks"])
def sums_kernel(
    inputs,  # [rows up to a multiple of BLOCK_M, input_stride] int8
    input_stride,
    order,  # [blocks] int32: which BLOCK_K inputs of a row are those of each block of weights
    blocks: "i32",  # noqa: F821
    weight,  # [width, blocks * BLOCK_K] int8
    sums,  # [rows, width] int32, set
    rows: "i32",  # noqa: F821
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns)."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    k = tl.arange(0, BLOCK_K)
    from_q = inputs + row[:, None] * input_stride + k[None, :]
    from_w = weight + column.to(tl.int64)[None, :] * (blocks * BLOCK_K) + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for i in range(blocks):
        q = tl.load(from_q + tl.load(order + i) * BLOCK_K)
        w = tl.load(from_w + i * BLOCK_K, mask=inside[None, :], other=0)
        total = tl.dot(q, w, total, out_dtype=tl.int32)
    there = (row < rows)[:, None] & inside[None, :]
    tl.store(sums + row[:, None] * width + column[None, :], total, mask=there)


@triton.jit(do_not_specialize=["rows"])
def values_kernel(
    tile,  # [rows, width] fp32: components
    basis,  # [width (component), width (value)] int8
    sums,  # [rows, width] int32
    bias,  # [width] fp32
    out,  # [width] fp32
    unit,  # [width] fp32
    x,  # [rows, width] fp32, set: values before the rotation
    rows: "i32",  # noqa: F821
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns): one component after the other, for the order of sums is the format's."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists, inside = row < rows, column < width
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    from_y, from_b = tile + row * width, basis + column
    k = 0
    while k < width:
        y = tl.load(from_y + k, mask=exists, other=0.0)
        b = tl.load(from_b, mask=inside, other=0).to(tl.float32)
        total += y[:, None] * b[None, :]
        from_b += width
        k += 1
    there = exists[:, None] & inside[None, :]
    place = row[:, None] * width + column[None, :]
    mu = tl.load(sums + place, mask=there, other=0).to(tl.float32)
    mu = mu + tl.load(bias + column, mask=inside, other=0.0)[None, :]
    mu = mu * tl.load(out + column, mask=inside, other=0.0)[None, :]
    tl.store(x + place, mu + total * tl.load(unit + column, mask=inside, other=0.0)[None, :], mask=there)


@triton.jit
def _rounded(v):
    """bf16 bits of fp32, int32, to the nearest, ties to even."""
    u = v.to(tl.uint32, bitcast=True)
    even = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, even).to(tl.int32)


@triton.jit(do_not_specialize=["exact", "wanted"])
def finish_kernel(
    x,  # [rows, width] fp32
    kept,  # [exact, width] int16: exact rows
    exact: "i32",  # noqa: F821
    cos,  # [rows, DIM / 2] int32
    sin,
    values,  # [rows, width] int16, set: bf16 bits
    target,  # bf16 [heads, wanted, DIM], written
    head_stride,
    token_stride,
    wanted: "i32",  # noqa: F821
    in_scale,
    to_fixed,
    inputs,  # [rows, input_stride] int8: columns from `input_column` on are set
    input_stride,
    input_column,
    width,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows,): rotates, rounds, and gives inputs to later parts."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    x += row * width
    values += row * width
    kept += row * width
    is_kept = lane * 0 + row < exact
    is_wanted = lane * 0 + row < wanted
    target = target.to(tl.pointer_type(tl.int16)) + row * token_stride
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        v = tl.load(x + column, mask=inside, other=0.0)
        if ROTATE:
            HALF: tl.constexpr = DIM // 2
            in_it = column % DIM
            low = in_it < HALF
            angle = row * HALF + in_it % HALF
            c = tl.load(cos + angle, mask=inside, other=0).to(tl.float32) * (1.0 / 16384)
            s = tl.load(sin + angle, mask=inside, other=0).to(tl.float32) * (1.0 / 16384)
            across = tl.load(x + tl.where(low, column + HALF, column - HALF), mask=inside, other=0.0) * s
            v = v * c
            v = tl.where(low, v - across, v + across)
        bits = _rounded(v)
        bits = tl.where(is_kept, tl.load(kept + column, mask=inside & is_kept, other=0).to(tl.int32), bits)
        tl.store(values + column, bits.to(tl.int16), mask=inside)
        to = target + (column // DIM).to(tl.int64) * head_stride + column % DIM
        tl.store(to, bits.to(tl.int16), mask=inside & is_wanted)
        at += TILE
    tl.debug_barrier()  # values of other threads are read
    of_inputs = (in_scale, to_fixed, cos, sin, inputs, input_stride, input_column, row)
    make_inputs(values, DIM, width, *of_inputs, DIM, ROTATE, TILE)
