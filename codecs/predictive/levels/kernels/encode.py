# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the values of a part to symbols, and to what symbols leave open: two launches.

The first goes over the groups of a tile of rows, for one part after the other, since predictions come from the groups
and parts before. The second needs no prediction: it comes when all sizes are known, and writes raw bits and escapes
where they belong, a program a block, since what is left open of a group lies behind that of all groups before.
"""

import triton
import triton.language as tl

from kvstore.codecs.predictive.kernels.axis import (
    ESCAPE,
    OFFSET,
    PLACE_COLUMNS,
    adapt,
    bins,
    energy,
    load_bits,
    octaves,
    row_of_tensor,
    signed_index,
)
from kvstore.codecs.predictive.kernels.encode import ESCAPES, TARGET_COLUMNS, WORDS, add_bits, open_of
from kvstore.codecs.predictive.levels.kernels.groups import GROUP, give, in_head, predict_tile, predicted


@triton.jit
def values_at(source, head_stride, column, inside, DIM: tl.constexpr, ROTATE: tl.constexpr):
    """bf16 bits of columns of rows that begin at `source`."""
    head, in_it = in_head(column, DIM, ROTATE)
    return load_bits(source + head * head_stride + in_it, inside)


@triton.jit
def by_row(x, BLOCK_M: tl.constexpr):
    """Sums of a flat tile's rows."""
    return tl.sum(tl.reshape(x, (BLOCK_M, GROUP)), axis=1)


@triton.jit
def split_values(x, bits, scale, column, inside, offset):
    """(symbols, table of each without that of V, bits left open, whether it is an escape, size) of values x."""
    linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
    distance = signed_index(x, linear) - signed_index(bits, linear)
    far = (distance < -OFFSET) | (distance >= OFFSET)
    octave = octaves(bits, linear)
    size = tl.where(inside, tl.where(far, 255, energy(distance, octave, quarter)), 0)
    _rest, count, whole = open_of(x, linear, far)
    symbol = tl.where(far, ESCAPE, distance + OFFSET)
    return symbol, 4 * octave + quarter, tl.where(inside, count, 0), (inside & whole).to(tl.int32), size


@triton.jit
def row_of_tile(places, block_of, firsts, part, rows, blocks, row):
    """Of rows: (where their values begin, stride of heads, their number in their block, rows of the block)."""
    exists = row < rows
    block = tl.load(block_of + row, mask=exists, other=0)
    first = tl.load(firsts + block)
    count = (tl.load(firsts + block + 1) - first).to(tl.int32)
    in_block = tl.where(exists, row - first, 0)
    source, head_stride = row_of_tensor(places + (part * blocks + block) * PLACE_COLUMNS, in_block)
    return source, head_stride, in_block.to(tl.int32), count


@triton.jit
def store_totals(raw_bits, escapes, sums, totals, index, parts_rows, there, BLOCK_M: tl.constexpr):
    """Totals of values as those of rows."""
    counts, found, plain, weighted = totals
    tl.store(raw_bits + index, by_row(counts, BLOCK_M), mask=there)
    tl.store(escapes + index, by_row(found, BLOCK_M), mask=there)
    tl.store(sums + index, by_row(plain, BLOCK_M).to(tl.int32, bitcast=True), mask=there)
    tl.store(sums + parts_rows + index, by_row(weighted, BLOCK_M).to(tl.int32, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["parts", "part", "rows", "blocks", "before", "first_class"])
def split_groups_kernel(
    places, block_of, firsts, sums_without, weight, residuals, stride, shift, from_fixed, to_fixed, gain, narrow,
    scale, adapts, offsets, fits, cos, sin, p, symbols, classes, raw_bits, escapes, sums, inputs, input_stride,
    input_column,
    parts: "i32", part: "i32", rows: "i32", blocks: "i32", width, before: "i32", first_class: "i32",  # noqa: F821
    GROUPED: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,). As in groups.py; sums_without is `sums` there. Set are: symbols and classes, group after
    group uint8 [rows, its columns]; raw_bits and escapes int32 [parts, rows] of this part: how many; sums int32
    [2, parts, rows] of this part: of the values, and of the values times their places in the layer."""
    TILE: tl.constexpr = BLOCK_M * GROUP
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    of_tile = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_M + lane // GROUP).to(tl.int64)
    source, head_stride, in_block, count = row_of_tile(places, block_of, firsts, part, rows, blocks, row)
    offset = tl.load(offsets + part * rows + row, mask=row < rows, other=0)
    inputs += row * input_stride + input_column
    counts, sizes, found = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    plain, weighted = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
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
        bits = predicted(own, across, row, column, inside, from_fixed, cos, sin, DIM, ROTATE)
        x = tl.where(inside, values_at(source, head_stride, column, inside, DIM, ROTATE), 0)
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
        x_across = x
        if ROTATE:
            x_across = values_at(source, head_stride, column ^ 1, inside, DIM, ROTATE)
        known = (x, x_across, own, row, column, inside)
        give(*known, to_fixed, gain, narrow, cos, sin, inputs + column, residuals, stride, DIM, ROTATE, GROUPED)
        tl.debug_barrier()
        begin += GROUP
    totals, there = (counts, found, plain, weighted), of_tile < rows
    store_totals(raw_bits, escapes, sums, totals, part * rows + of_tile, parts.to(tl.int64) * rows, there, BLOCK_M)
    adapt(by_row(sizes, BLOCK_M), width, part, rows, of_tile, adapts, offsets, fits, there)


@triton.jit
def _pack(x, rest, count, whole, inside, bits_done, escapes_done, words, payload, TILE: tl.constexpr):
    """Adds raw bits, and writes escapes, of a flat tile: (raw bits, escapes) that are done by now."""
    count = tl.where(inside, count, 0)
    whole = inside & whole
    bit = bits_done + tl.cumsum(count, axis=0) - count
    rank = escapes_done + tl.cumsum(whole.to(tl.int32), axis=0) - 1
    byte = payload + 2 * rank.to(tl.int64)
    tl.store(byte, (x & 255).to(tl.uint8), mask=whole)
    tl.store(byte + 1, (x >> 8).to(tl.uint8), mask=whole)
    add_bits(words, rest, bit, inside, TILE)
    return bits_done + tl.sum(count, axis=0), escapes_done + tl.sum(whole.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["scale_stride", "part", "rows", "blocks"])
def pack_groups_kernel(
    places, firsts, symbols, scale, scale_stride: "i32", offsets, targets, words, payload,  # noqa: F821
    part: "i32", rows: "i32", blocks: "i32", width,  # noqa: F821
    DIM: tl.constexpr, ROTATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks,). As of `split_groups_kernel`; targets, words and payload as of `pack_kernel`; scales of a block
    begin `scale_stride` values behind those of the one before, 0 where all have the same."""
    block = tl.program_id(0).to(tl.int64)
    scale += block * scale_stride
    lane = tl.arange(0, TILE)
    part = part.to(tl.int64)
    target = targets + (part * blocks + block) * TARGET_COLUMNS
    words += tl.load(target + WORDS)
    payload += tl.load(target + ESCAPES)
    there = tl.where(tl.load(target + WORDS) >= 0, width, 0)
    first = tl.load(firsts + block)
    count = (tl.load(firsts + block + 1) - first).to(tl.int32)
    offsets += part * rows + first
    bits_done, escapes_done, begin = count * 0, count * 0, count * 0
    while begin < there:
        columns = tl.minimum(width - begin, GROUP)
        from_symbols = symbols + begin.to(tl.int64) * rows + first * columns
        at = 0
        while at < count * GROUP:
            row = (at + lane) // GROUP
            inside = (row < count) & (lane % GROUP < columns)
            column = begin + lane % GROUP
            of_row = tl.where(inside, row, 0).to(tl.int64)
            source, head_stride = row_of_tensor(places + (part * blocks + block) * PLACE_COLUMNS, of_row)
            x = values_at(source, head_stride, column, inside, DIM, ROTATE)
            offset = tl.load(offsets + row, mask=inside, other=0)
            linear, _quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
            symbol = tl.load(from_symbols + row * columns + lane % GROUP, mask=inside, other=0)
            left_open = open_of(x, linear, symbol.to(tl.int32) == ESCAPE)
            so_far = (bits_done, escapes_done)
            bits_done, escapes_done = _pack(x, *left_open, inside, *so_far, words, payload, TILE)
            at += TILE
        begin += GROUP
