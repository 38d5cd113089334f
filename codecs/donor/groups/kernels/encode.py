# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the values of a part to symbols: four launches, since the scales of a group come from the predictions of all
rows of a block. What symbols leave open is written as the levels write it (`pack_groups_kernel`).

Beside the arrays of donors.py: mu int16 [rows, width], predictions of the part; totals fp32 [blocks, width], of each
column how far values are from them; scales int16 [blocks, scale_stride], of which a part has its columns; corrections
int8 [blocks, groups of all parts]; applied int32 [parts, rows], offsets of rows less what their shifts take.
"""

import triton
import triton.language as tl

from kvstore.codecs.donor.groups.kernels.numbers import added, difference, distance, quarters_of, weight
from kvstore.codecs.predictive.kernels.axis import PLACE_COLUMNS, TOKEN_STRIDE, adapt, load_bits, row_of_tensor
from kvstore.codecs.predictive.levels.kernels.encode import (
    by_row,
    row_of_tile,
    split_values,
    store_totals,
    values_at,
)
from kvstore.codecs.predictive.levels.kernels.groups import GROUP, give, predict_tile, predicted

LIFT = tl.constexpr(-1)  # quarter octaves from the mean of absolute values to the scale


@triton.jit(do_not_specialize=["part", "rows", "blocks"])
def foretell_kernel(
    places, block_of, firsts, sums_without, weight, residuals, stride, shift, from_fixed, to_fixed, gain, narrow,
    cos, sin, p, donors, shifts, mu, inputs, input_stride, input_column,
    part: "i32", rows: "i32", blocks: "i32", width,  # noqa: F821
    GROUPED: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,): predictions of a part, and what its differences give to others. Sets mu, inputs and
    residuals; arrays as of `split_groups_kernel`."""
    lane = tl.arange(0, BLOCK_M * GROUP)
    part = part.to(tl.int64)
    of_tile = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_M + lane // GROUP).to(tl.int64)
    source, head_stride, _in_block, _count = row_of_tile(places, block_of, firsts, part, rows, blocks, row)
    larger = tl.load(shifts + row, mask=row < rows, other=0)
    inputs += row * input_stride + input_column
    begin = part.to(tl.int32) * 0
    while begin < width:
        of_group = (shift, p, of_tile, of_tile < rows, begin, width)
        predict_tile(sums_without, residuals, weight, stride, *of_group, GROUPED, BLOCK_M, BLOCK_K)
        tl.debug_barrier()  # values of other threads are read
        columns = tl.minimum(width - begin, GROUP)
        inside = (row < rows) & (lane % GROUP < columns)
        column = begin + lane % GROUP
        own = tl.load(p + row * GROUP + lane % GROUP, mask=inside, other=0).to(tl.int32)
        across = tl.load(p + row * GROUP + (lane % GROUP ^ 1), mask=inside, other=0).to(tl.int32)
        delta = predicted(own, across, row, column, inside, from_fixed, cos, sin, DIM, ROTATE)
        place = row * width + column
        base = load_bits(donors + place, inside)
        tl.store(mu + place, added(base, delta, larger).to(tl.int16), mask=inside)
        x = difference(values_at(source, head_stride, column, inside, DIM, ROTATE), base, larger)
        x_across = x
        if ROTATE:
            base = load_bits(donors + (place ^ 1), inside)
            x_across = difference(values_at(source, head_stride, column ^ 1, inside, DIM, ROTATE), base, larger)
        known = (x, x_across, own, row, column, inside)
        give(*known, to_fixed, gain, narrow, cos, sin, inputs + column, residuals, stride, DIM, ROTATE, GROUPED)
        tl.debug_barrier()
        begin += GROUP


@triton.jit(do_not_specialize=["part", "rows", "blocks"])
def measure_columns_kernel(
    places,
    firsts,
    mu,
    shifts,
    offsets,  # [parts + 1, rows] int32
    totals,  # [blocks, width] fp32, set
    part: "i32",  # noqa: F821
    rows: "i32",  # noqa: F821
    blocks: "i32",  # noqa: F821
    width,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (blocks, tiles of columns): how far the values of a column are from their predictions, row after row."""
    block, part = tl.program_id(0).to(tl.int64), part.to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    place = places + (part * blocks + block) * PLACE_COLUMNS
    row, end = tl.load(firsts + block), tl.load(firsts + block + 1)
    source, head_stride = row_of_tensor(place, row * 0)
    token_stride = tl.load(place + TOKEN_STRIDE)
    total = tl.zeros((TILE,), tl.float32)
    while row < end:
        x = values_at(source, head_stride, column, inside, DIM, ROTATE)
        offset = tl.load(offsets + part * rows + row) - 4 * tl.load(shifts + row)
        total += distance(x, load_bits(mu + row * width + column, inside)) * weight(offset)
        source += token_stride
        row += 1
    tl.store(totals + block * width + column, total, mask=inside)


@triton.jit(do_not_specialize=["groups", "first_group", "scale_stride"])
def correct_kernel(
    totals,
    firsts,
    scale,  # [width] int16: of the model
    corrections,  # set from `first_group` on
    groups: "i32",  # noqa: F821  # of all parts
    first_group: "i32",  # noqa: F821
    scales,  # of the part; set
    scale_stride: "i32",  # noqa: F821
    width,
    TILE: tl.constexpr,
):
    """Grid (blocks,): by how much the scales of each group are corrected, and what they come to."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    count = (tl.load(firsts + block + 1) - tl.load(firsts + block)).to(tl.int32)
    totals += block * width
    scales += block * scale_stride
    corrections += block * groups + first_group
    begin = 0
    while begin < width:
        first = begin + lane * GROUP
        size = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(GROUP):
            inside = first + i < width
            quarters = tl.load(scale + first + i, mask=inside, other=0).to(tl.int32)
            size += tl.load(totals + first + i, mask=inside, other=0.0) * weight(quarters)
        columns = tl.minimum(tl.maximum(width - first, 1), GROUP)
        size = tl.math.div_rn(size, (count * columns).to(tl.float32))
        more = tl.minimum(tl.maximum(quarters_of(size) + LIFT, -128), 127)
        tl.store(corrections + first // GROUP, more.to(tl.int8), mask=first < width)
        for i in tl.static_range(GROUP):
            inside = first + i < width
            quarters = tl.load(scale + first + i, mask=inside, other=0).to(tl.int32)
            tl.store(scales + first + i, (quarters + more).to(tl.int16), mask=inside)
        begin += TILE * GROUP


@triton.jit(do_not_specialize=["parts", "part", "rows", "blocks", "before", "first_class", "scale_stride"])
def split_differences_kernel(
    places, block_of, firsts, mu, shifts, scales, scale_stride: "i32", adapts, offsets, applied, fits,  # noqa: F821
    symbols, classes, raw_bits, escapes, sums,
    parts: "i32", part: "i32", rows: "i32", blocks: "i32", width, before: "i32", first_class: "i32",  # noqa: F821
    DIM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,): symbols and totals of a part, as `split_groups_kernel` sets them; and `applied`."""
    TILE: tl.constexpr = BLOCK_M * GROUP
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    of_tile = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_M + lane // GROUP).to(tl.int64)
    exists = row < rows
    source, head_stride, in_block, count = row_of_tile(places, block_of, firsts, part, rows, blocks, row)
    scale = scales + tl.load(block_of + row, mask=exists, other=0).to(tl.int64) * scale_stride
    larger = tl.load(shifts + row, mask=exists, other=0)
    offset = tl.load(offsets + part * rows + row, mask=exists, other=0) - 4 * larger
    tl.store(applied + part * rows + row, offset, mask=exists & (lane % GROUP == 0))
    counts, sizes, found = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    plain, weighted = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
    begin = part.to(tl.int32) * 0
    while begin < width:
        columns = tl.minimum(width - begin, GROUP)
        inside = exists & (lane % GROUP < columns)
        column = begin + lane % GROUP
        bits = load_bits(mu + row * width + column, inside)
        x = values_at(source, head_stride, column, inside, DIM, ROTATE)
        symbol, table, count_open, whole, size = split_values(x, bits, scale, column, inside, offset)
        place = begin.to(tl.int64) * rows + row * columns + lane % GROUP
        tl.store(symbols + place, symbol.to(tl.uint8), mask=inside)
        tl.store(classes + place, (first_class + table).to(tl.uint8), mask=inside)
        counts += count_open
        found += whole
        sizes += size
        plain += x.to(tl.uint32)
        place = count * (before + begin) + in_block * columns + lane % GROUP + 1
        weighted += x.to(tl.uint32) * place.to(tl.uint32)
        begin += GROUP
    totals, there = (counts, found, plain, weighted), of_tile < rows
    store_totals(raw_bits, escapes, sums, totals, part * rows + of_tile, parts.to(tl.int64) * rows, there, BLOCK_M)
    adapt(by_row(sizes, BLOCK_M), width, part, rows, of_tile, adapts, offsets, fits, there)
