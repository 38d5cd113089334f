# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the stream to the values of a part, against donors: one launch, a program a block, as the levels' `join_kernel`.

Nothing that a payload says leads out of it, as there.
"""

import triton
import triton.language as tl

from kvstore.codecs.donor.groups.kernels.numbers import added, difference
from kvstore.codecs.predictive.kernels.axis import PLACE_COLUMNS, bins, load_bits, octaves
from kvstore.codecs.predictive.levels.kernels.decode import (
    adapt_rows,
    predict_rows,
    read_group,
    section_of,
    store_found,
    tile_of,
)
from kvstore.codecs.predictive.levels.kernels.groups import GROUP, give, predicted
from kvstore.codecs.rans.kernels.decode import ANY, decode_part, leave, resume
from kvstore.codecs.rans.kernels.lanes import LANES


@triton.jit
def _apply_shifts(offsets, shifts, applied, count, TILE: tl.constexpr):
    """Offsets of a block's rows less what their shifts take, to `applied`."""
    lane = tl.arange(0, TILE)
    at = 0
    while at < count:
        inside = at + lane < count
        offset = tl.load(offsets + at + lane, mask=inside, other=0)
        shift = tl.load(shifts + at + lane, mask=inside, other=0)
        tl.store(applied + at + lane, offset - 4 * shift, mask=inside)
        at += TILE


@triton.jit
def _classify(
    p, mu, classes, known, against, begin, width, first_class,
    TILE: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Predicted differences of a group in fixed point to the bits of predictions, and classes."""
    first, count, scale, offsets, from_fixed, cos, sin = known
    donors, shifts = against
    lane = tl.arange(0, TILE)
    at = 0
    while at < count * GROUP:
        row, column, place, inside = tile_of(at, lane, count, begin, width)
        own = tl.load(p + at + lane, mask=inside, other=0).to(tl.int32)
        across = tl.load(p + (at + lane ^ 1), mask=inside, other=0).to(tl.int32)
        delta = predicted(own, across, first + row, column, inside, from_fixed, cos, sin, DIM, ROTATE)
        base = load_bits(donors + row.to(tl.int64) * width + column, inside)
        bits = added(base, delta, tl.load(shifts + row, mask=inside, other=0))
        offset = tl.load(offsets + row, mask=inside, other=0)
        linear, quarter = bins(tl.load(scale + column, mask=inside, other=0), offset)
        tl.store(mu + at + lane, bits.to(tl.int16), mask=inside)
        klass = first_class + 4 * octaves(bits, linear) + quarter
        tl.store(classes + place, klass.to(tl.uint8), mask=inside)
        at += TILE


@triton.jit
def _give(
    p, values, known, against, begin, width, receivers, stride,
    TILE: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """What the differences of a group give to others."""
    first, count, _scale, _offsets, _from_fixed, cos, sin = known
    donors, shifts = against
    to_fixed, gain, narrow, inputs, input_stride, residuals = receivers
    lane = tl.arange(0, TILE)
    at = 0
    while at < count * GROUP:
        row, column, _place, inside = tile_of(at, lane, count, begin, width)
        shift = tl.load(shifts + row, mask=inside, other=0)
        place = donors + row.to(tl.int64) * width
        own = difference(load_bits(values + at + lane, inside), load_bits(place + column, inside), shift)
        across = own
        if ROTATE:
            base = load_bits(place + (column ^ 1), inside)
            across = difference(load_bits(values + (at + lane ^ 1), inside), base, shift)
        fixed_p = tl.load(p + at + lane, mask=inside, other=0).to(tl.int32)
        here = (own, across, fixed_p, first + row, column, inside)
        to = inputs + (first + row) * input_stride + column
        give(*here, to_fixed, gain, narrow, cos, sin, to, residuals, stride, DIM, ROTATE, GROUPED)
        at += TILE


@triton.jit(
    do_not_specialize=[
        "stream_bytes", "tables", "scale_stride", "parts", "part", "rows", "blocks", "before", "first_class",
    ]
)  # fmt: skip
def join_differences_kernel(
    stream, stream_bytes: "i64", streams, slots, tables: "i32", state, status,  # noqa: F821
    payload, sections, firsts, places, found, sizes, classes, symbols,
    sums, weight, residuals, stride, shift, from_fixed, to_fixed, gain, narrow, adapts, offsets, fits,
    cos, sin, p, mu, values, inputs, input_stride, input_column,
    donors, shifts, applied, scales, scale_stride: "i32",  # noqa: F821
    parts: "i32", part: "i32", rows: "i32", blocks: "i32", width, before: "i32", first_class: "i32",  # noqa: F821
    GROUPED: tl.constexpr, DIM: tl.constexpr, ROTATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks,). As `join_kernel` of the levels; donors .. scale_stride as in encode.py, `applied` int32 [rows]
    that is set."""
    block, part = tl.program_id(0).to(tl.int64), part.to(tl.int64)
    rans_lane = tl.arange(0, LANES)
    first = tl.load(firsts + block)
    count = (tl.load(firsts + block + 1) - first).to(tl.int32)
    section = section_of(payload, sections, part * blocks + block)
    place = places + (part * blocks + block) * PLACE_COLUMNS
    known = (first, count, scales + block * scale_stride, applied + first, from_fixed, cos, sin)
    against = (donors + first * width, shifts + first)
    receivers = (to_fixed, gain, narrow, inputs + input_column, input_stride, residuals)
    here = first * GROUP
    x, taken, total, words, flags, good = resume(stream, stream_bytes, streams, state, block, rans_lane)
    bits_done, escapes_done, begin = count * 0, count * 0, count * 0
    wrong = tl.zeros((TILE,), tl.int32)
    plain, weighted = tl.zeros((TILE,), tl.uint32), tl.zeros((TILE,), tl.uint32)
    _apply_shifts(offsets + part * rows + first, shifts + first, applied + first, count, TILE)
    while begin < width:
        of_group = (first, count, begin, width)
        predict_rows(sums, residuals, weight, stride, shift, p, *of_group, GROUPED, BLOCK_M, BLOCK_K)
        tl.debug_barrier()  # here as below, values of other threads are read
        coded = count * tl.minimum(width - begin, GROUP)
        of_group = (known, against, begin, width)
        _classify(p + here, mu + here, classes + here, *of_group, first_class, TILE, DIM, ROTATE)
        tl.debug_barrier()
        of_part = (classes + here, symbols + here, coded, slots, tables)
        x, taken, well = decode_part(x, taken, total, words, *of_part, rans_lane, BITS)
        good &= well & (total > 0)
        tl.debug_barrier()
        of_block = (symbols + here, mu + here, values + here, sizes + first, known, section, place)
        so_far = (bits_done, escapes_done, wrong, plain, weighted)
        so_far = read_group(*of_block, first, begin, width, before, *so_far, TILE, DIM, ROTATE)
        bits_done, escapes_done, wrong, plain, weighted = so_far
        tl.debug_barrier()
        _give(p + here, values + here, *of_group, receivers, stride, TILE, DIM, ROTATE, GROUPED)
        tl.debug_barrier()
        begin += GROUP
    leave(x, taken, total, flags | tl.where(count > 0, ANY, 0), good, state, status, block, rans_lane)
    adapt_rows(sizes + first, first, count, width, part, rows, adapts, offsets, fits, BLOCK_M)
    so_far = (bits_done, escapes_done, wrong, plain, weighted)
    store_found(found + part * blocks + block, parts.to(tl.int64) * blocks, *so_far)
