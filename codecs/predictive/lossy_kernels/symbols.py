# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""From the symbols of a part to components: which are coded, and by which tables, follows from integers alone.

Arrays that kernels take. Of the part: scale int16 [width], quarter octaves above the step and the least class; expect
int32 [2 * CLASSES, 2]. Of the rows that are coded: states int32, sixteenths of quarter octaves; shifts uint8, of their
steps; begins int64 [rows + 1], where a row's symbols begin among those of the part; listed int64 [rows + 1], how many
escapes of the layer come before a row's. A *class* is negative where nothing is coded; `first` is what those of V are
higher by.
"""

import triton
import triton.language as tl

CLASSES = tl.constexpr(48)
PLAIN = tl.constexpr(2)
LARGEST = tl.constexpr(127)
ESCAPE = tl.constexpr(255)
EXPECT = tl.constexpr(12)
PRIOR = tl.constexpr(1 << 12)
FINE = tl.constexpr(16)


@triton.jit
def above_of(states, shifts, row):
    """What a row adds to the scales of its components, in quarter octaves."""
    state, shift = tl.load(states + row), tl.load(shifts + row).to(tl.int32)
    return ((state + 8) >> 4) + 4 * (shift - PLAIN)


@triton.jit
def classes_of(scale, above, column, inside):
    klass = tl.minimum(tl.load(scale + column, mask=inside, other=0).to(tl.int32) + above, CLASSES - 1)
    return tl.where(inside, klass, -1)


@triton.jit(do_not_specialize=["first"])
def count_kernel(
    scale,
    states,
    shifts,
    expect,
    counts,  # [rows] int64, set: how many components are coded
    means,  # [rows] int64, set: what their magnitudes are expected to add up to
    slopes,  # [rows] int64, set: by how much a quarter octave more raises that
    first: "i32",  # noqa: F821
    width,
    TILE: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    above = above_of(states, shifts, row)
    count = tl.zeros((TILE,), tl.int32)
    mean, slope = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    at = 0
    while at < width:
        klass = classes_of(scale, above, at + lane, at + lane < width)
        coded = klass >= 0
        count += coded.to(tl.int32)
        of_class = expect + 2 * (klass + first)
        mean += tl.load(of_class, mask=coded, other=0)
        slope += tl.load(of_class + 1, mask=coded, other=0)
        at += TILE
    tl.store(counts + row, tl.sum(count, axis=0).to(tl.int64))
    tl.store(means + row, tl.sum(mean, axis=0))
    tl.store(slopes + row, tl.sum(slope, axis=0))


@triton.jit(do_not_specialize=["first"])
def classify_kernel(
    scale,
    states,
    shifts,
    begins,
    classes,  # uint8, set: those of the part's symbols
    first: "i32",  # noqa: F821
    width,
    TILE: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    above = above_of(states, shifts, row)
    classes += tl.load(begins + row)
    at = 0
    while at < width:
        klass = classes_of(scale, above, at + lane, at + lane < width)
        coded = klass >= 0
        place = tl.cumsum(coded.to(tl.int32), axis=0)
        tl.store(classes + place - 1, (klass + first).to(tl.uint8), mask=coded)
        classes += tl.max(place, axis=0)
        at += TILE


@triton.jit
def count_escapes_kernel(
    symbols,  # uint8
    begins,
    escapes,  # [rows] int64, set
    TILE: tl.constexpr,
):
    """Grid (rows,): how many symbols of a row are escapes."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    at, end = tl.load(begins + row), tl.load(begins + row + 1)
    found = tl.zeros((TILE,), tl.int32)
    while at < end:
        symbol = tl.load(symbols + at + lane, mask=at + lane < end, other=0).to(tl.int32)
        found += (symbol == ESCAPE).to(tl.int32)
        at += TILE
    tl.store(escapes + row, tl.sum(found, axis=0).to(tl.int64))


@triton.jit
def _log2_sixteenths(v):
    """About 16 log2 of int64 from 1 to 2^40; between powers of two by a straight line."""
    top = (v.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    return 16 * top + ((v << 4) >> top) - 16


@triton.jit
def _followed(state, mean, slope, magnitudes, a, b, c):
    """The state of the next part, int64. a, b, c: `adapt` of that part."""
    expected, slope = mean + PRIOR, (slope + PRIOR // FINE) << 8
    up = (_log2_sixteenths((magnitudes << EXPECT) + PRIOR) - _log2_sixteenths(expected)) * expected * 177
    size = tl.abs(up)
    down = size // slope
    more = (down * slope != size).to(tl.int64)
    found = tl.minimum(tl.maximum(tl.where(up < 0, -down - more, down), -32 * FINE), 32 * FINE)
    error = ((state + FINE // 2) >> 4) * FINE + found - state
    return tl.minimum(tl.maximum((a * state + b * error + c + 128) >> 8, -32 * FINE), 40 * FINE)


@triton.jit(do_not_specialize=["step", "exact", "first", "available"])
def take_kernel(
    scale,
    states,  # mutated: those of the next part
    shifts,
    begins,
    listed,
    means,
    slopes,
    symbols,
    escapes,  # int16: those of the layer
    available: "i32",  # noqa: F821  # how many there are
    values,  # [2 * CLASSES, 256] fp32: what symbols stand for, in steps
    component,  # [width] fp32
    adapt,  # [3] int32, of the next part
    tile,  # [exact + rows, width] fp32, set but in exact rows: components in units of cost
    step: "fp32",  # noqa: F821
    exact: "i32",  # noqa: F821
    first: "i32",  # noqa: F821
    width,
    TILE: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    above = above_of(states, shifts, row)
    octaves = -tl.load(shifts + row).to(tl.int32) + PLAIN
    own = step * ((octaves + 127) << 23).to(tl.float32, bitcast=True)
    symbols += tl.load(begins + row)
    rank = tl.load(listed + row).to(tl.int32)
    tile += (exact + row) * width
    magnitudes = tl.zeros((TILE,), tl.int64)
    at = 0
    while at < width:
        column = at + lane
        inside = column < width
        klass = classes_of(scale, above, column, inside)
        coded = klass >= 0
        place = tl.cumsum(coded.to(tl.int32), axis=0)
        symbol = tl.load(symbols + place - 1, mask=coded, other=LARGEST).to(tl.int32)
        symbols += tl.max(place, axis=0)
        whole = coded & (symbol == ESCAPE)
        number_of = tl.cumsum(whole.to(tl.int32), axis=0)
        among = rank + number_of - 1
        rank += tl.max(number_of, axis=0)
        escaped = tl.load(escapes + among, mask=whole & (among < available), other=0).to(tl.int32)
        number = tl.where(whole, escaped, symbol - LARGEST)
        magnitudes += tl.where(coded, tl.minimum(tl.abs(number), LARGEST), 0)
        value = tl.load(values + ((klass + first) << 8) + symbol, mask=coded, other=0.0)
        y = tl.where(whole, number.to(tl.float32), value) * own * tl.load(component + column, mask=inside, other=0.0)
        tl.store(tile + column, y, mask=inside)
        at += TILE
    state = tl.load(states + row).to(tl.int64)
    of_next = (tl.load(adapt).to(tl.int64), tl.load(adapt + 1).to(tl.int64), tl.load(adapt + 2).to(tl.int64))
    sums = (tl.load(means + row), tl.load(slopes + row), tl.sum(magnitudes, axis=0))
    tl.debug_barrier()  # the state was read by all
    tl.store(states + row, _followed(state, *sums, *of_next).to(tl.int32))
