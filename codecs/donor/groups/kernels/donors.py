# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""What donors predict of a part, and by how much rows are scaled: what stands before the groups of a block.

Arrays that kernels take: `donors` int16 [rows, width], what donors predict of the part at hand, columns in coding
order; `shifts` int32 [rows], by how many octaves the differences of a row are made larger. Others as in the levels'
../../../predictive/levels/kernels/groups.py.
"""

import triton
import triton.language as tl

from kvstore.codecs.donor.groups.kernels.numbers import distance, finite, quarters_of, value_of
from kvstore.codecs.predictive.kernels.axis import PLACE_COLUMNS, exponent, load_bits, row_of_tensor
from kvstore.codecs.predictive.kernels.dense import upper
from kvstore.codecs.predictive.levels.kernels.encode import row_of_tile, values_at
from kvstore.codecs.predictive.levels.kernels.groups import GROUP, in_head

LEAST_EXPONENT = tl.constexpr(28)  # of a pair that is rotated: smaller numbers count as if they were of this one
SIZE = tl.constexpr(18)  # quarter octaves of what a row's inputs come to at most, in the mean
LEAST_SHIFT, MOST_SHIFT = tl.constexpr(-32), tl.constexpr(31)


@triton.jit
def _fixed(bits, top):
    """A finite key in integers of 14 bits and a sign, the exponent of its pair given."""
    e = exponent(bits)
    magnitude = tl.where(e > 0, 128 | (bits & 127), 0)
    return (tl.where(bits >= 0x8000, -magnitude, magnitude) << 6) >> tl.minimum(top - e, 31)


@triton.jit(do_not_specialize=["part", "blocks"])
def donate_kernel(
    places,  # [parts, blocks, PLACE_COLUMNS] int64: the donors' values
    block_of,  # [rows] int32
    firsts,  # [blocks + 1] int64
    angles,  # [angles, 2, DIM / 2] int16: cosines and sines in 1/16384
    turns,  # [rows] int32: by which of them keys are rotated; -1: none
    donors,  # [rows, width] int16, set
    part: "i32",  # noqa: F821
    blocks: "i32",  # noqa: F821
    width,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    TURN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows,). ROTATE: of a K whose pairs stand side by side in coding order; TURN: of a K, with an even DIM."""
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    block = tl.load(block_of + row)
    place = places + (part.to(tl.int64) * blocks + block) * PLACE_COLUMNS
    source, head_stride = row_of_tensor(place, row - tl.load(firsts + block))
    turn = tl.load(turns + row)
    cos = angles + tl.maximum(turn, 0).to(tl.int64) * 2 * HALF
    donors += row * width
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        head, in_it = in_head(column, DIM, ROTATE)
        bits = finite(load_bits(source + head * head_stride + in_it, inside))
        if TURN:
            across = tl.where(in_it < HALF, in_it + HALF, in_it - HALF)
            other = finite(load_bits(source + head * head_stride + across, inside))
            top = tl.maximum(tl.maximum(exponent(bits), exponent(other)), LEAST_EXPONENT)
            angle = cos + in_it % HALF
            turned = inside & (lane * 0 + turn >= 0)
            c = tl.load(angle, mask=turned, other=0).to(tl.int32)
            s = tl.load(angle + HALF, mask=turned, other=0).to(tl.int32)
            both = _fixed(other, top) * s
            both = _fixed(bits, top) * c + tl.where(in_it < HALF, -both, both)
            found = finite(upper(both.to(tl.float32) * value_of((top - 27) << 7)))
            bits = tl.where(turned, found, bits)
        tl.store(donors + column, bits.to(tl.int16), mask=inside)
        at += TILE


@triton.jit(do_not_specialize=["part", "rows", "blocks"])
def measure_rows_kernel(
    places,  # [parts, blocks, PLACE_COLUMNS] int64: the values
    block_of,
    firsts,
    donors,
    unit: "fp32",  # noqa: F821  # of the part, in steps of its inputs
    sums,  # [rows, GROUP] fp32, mutated
    part: "i32",  # noqa: F821
    rows: "i32",  # noqa: F821
    blocks: "i32",  # noqa: F821
    width,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid (tiles of rows,): how large the differences of V of a layer are, column after column of a group, added up
    over the groups in their order."""
    lane = tl.arange(0, BLOCK_M * GROUP)
    row = (tl.program_id(0) * BLOCK_M + lane // GROUP).to(tl.int64)
    of_group = lane % GROUP
    source, head_stride, _in_block, _count = row_of_tile(places, block_of, firsts, part.to(tl.int64), rows, blocks, row)
    place = sums + row * GROUP + of_group
    total = tl.load(place, mask=row < rows, other=0.0)
    begin = 0
    while begin < width:
        column = begin + of_group
        inside = (row < rows) & (column < width)
        x = values_at(source, head_stride, column, inside, DIM, False)
        mu = load_bits(donors + row * width + column, inside)
        total += distance(x, mu) * unit
        begin += GROUP
    tl.store(place, total, mask=row < rows)


@triton.jit(do_not_specialize=["columns", "rows"])
def choose_shifts_kernel(
    sums,  # [rows, GROUP] fp32
    columns: "i32",  # noqa: F821  # that these parts have
    shifts,  # [rows] int32, set
    rows: "i32",  # noqa: F821
    TILE: tl.constexpr,
):
    """Grid (tiles of rows,): by how much rows are scaled."""
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = row < rows
    total = tl.zeros((TILE,), tl.float32)
    for column in tl.static_range(GROUP):
        total += tl.load(sums + row * GROUP + column, mask=inside, other=0.0)
    size = quarters_of(tl.math.div_rn(total, tl.zeros((TILE,), tl.float32) + columns.to(tl.float32)))
    shift = tl.minimum(tl.maximum((SIZE - size) >> 2, LEAST_SHIFT), MOST_SHIFT)
    tl.store(shifts + row, shift, mask=inside)
