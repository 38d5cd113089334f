# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""What the kernels of the predictive codec share: rounding, the axis of bins, the state of rows, inputs of later parts.

The arithmetic is that of ../reference.py, bit for bit. A *row* is a token of one of the blocks that are coded
at once; rows of a block follow each other. What a launch leaves to later ones lies in arrays `[parts, rows]`.
"""

import triton
import triton.language as tl

ESCAPE = tl.constexpr(192)
OFFSET = tl.constexpr(96)
MOST_RAW = tl.constexpr(10)
RANGE = tl.constexpr(23170.0)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: of what is added to it no fraction is left, rounded half to even
MAGIC_BITS = tl.constexpr(0x4B400000)
RATIOS = tl.constexpr(0x262D3640)  # bytes 64, 54, 45, 38: 64 * 2^(-i / 4)

# Columns of places `[parts, blocks, PLACE_COLUMNS]` int64: where a block's tensor lies. Strides count values. Of the
# block's tokens, so many exist in the tensor (a decoder may be asked for fewer than the block has).
ADDRESS, HEAD_STRIDE, TOKEN_STRIDE, EXIST = (tl.constexpr(i) for i in range(4))
PLACE_COLUMNS = tl.constexpr(4)


@triton.jit
def rounded(v, most):
    """fp32 to int32, half to even, after clamping to -most..most; most < 2^22. The clamp also keeps the addition from
    being fused with a multiplication before."""
    v = tl.minimum(tl.maximum(v, -most), most)
    return (v + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def exponent(bits):
    return (bits >> 7) & 255


@triton.jit
def log2_of(v):
    """floor(log2(v)) of int32, 1 <= v < 2^24."""
    return (v.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def bins(scale, offset):
    """(exponent from which on a bin is one bf16 value, quarter octave), int32."""
    s = tl.minimum(tl.maximum(scale.to(tl.int32) + offset, -440), 440)
    return tl.minimum(tl.maximum((s >> 2) + 131, 8), 254), s & 3


@triton.jit
def signed_index(bits, linear):
    """The bin of bf16 bits (int32, 0..65535); those of negative values are negative."""
    e = exponent(bits)
    shift = tl.minimum(tl.maximum(linear - e, 0), 8)  # 128..255 have 8 bits
    index = tl.where(e >= linear, 128 + (bits & 0x7FFF) - (linear << 7), (128 | (bits & 127)) >> shift)
    return tl.where(bits >= 0x8000, -1 - index, index)


@triton.jit
def octaves(mu, linear):
    return tl.minimum(tl.maximum(exponent(mu) - linear, 0), 8)


@triton.jit
def energy(distance, octave, quarter):
    """How large a residual is, 0..255; one far away counts as an escape does or more, so that |distance| is clamped."""
    size = tl.minimum(tl.abs(distance), OFFSET) << octave
    return tl.minimum((size * ((RATIOS >> (8 * quarter)) & 255)) >> 6, 255)


@triton.jit
def raw_count(index):
    """Raw bits of a bin, index >= 0."""
    few = 7 - log2_of(tl.minimum(tl.maximum(index, 1), 128))
    return tl.where(index == 0, MOST_RAW, few)


@triton.jit
def before_in_block(totals, first, row, STEP: tl.constexpr):
    """Sum of int32 totals of the rows `first` up to but without `row`."""
    lane = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.int32)
    at = first
    while at < row:
        total += tl.load(totals + at + lane, mask=at + lane < row, other=0)
        at += STEP
    return tl.sum(total, axis=0)


@triton.jit
def adapt(total, width, part, rows, row, adapts, offsets, fits, there=None):
    """From what a row's energies add up to: its fit, and its offset in the next part. Of several rows those count that
    are `there`.

    adapts: [parts + 1, 3], offsets: [parts + 1, rows], fits: [parts + 2, rows], two rows of zeros first.
    """
    mean = tl.maximum(total.to(tl.int64) * 64 // width, 1).to(tl.int32)
    top = log2_of(mean)
    m = mean << (15 - top)
    quarters = 4 * top + (m >= 38968).to(tl.int32) + (m >= 46341).to(tl.int32) + (m >= 55109).to(tl.int32)
    fit = tl.load(offsets + part * rows + row, mask=there) + quarters - 34
    tl.store(fits + (part + 2) * rows + row, fit, mask=there)
    last = tl.load(fits + (part + 1) * rows + row, mask=there)
    adapts += 3 * (part + 1)
    scaled = tl.load(adapts) * fit + tl.load(adapts + 1) * last + tl.load(adapts + 2) + 128
    tl.store(offsets + (part + 1) * rows + row, tl.minimum(tl.maximum(scaled >> 8, -32), 40), mask=there)


@triton.jit
def row_of_tensor(place, number):
    """Row `number` of a block's tensor: (pointer to its first value, int16; stride of heads). place: see ADDRESS."""
    values = tl.load(place + ADDRESS).to(tl.pointer_type(tl.int16))
    values += number * tl.load(place + TOKEN_STRIDE)
    return values, tl.load(place + HEAD_STRIDE)


@triton.jit
def in_heads(values, column, head_stride, DIM: tl.constexpr):
    """Pointers to columns of a row whose heads, of DIM columns, lie `head_stride` values apart."""
    return values + (column // DIM).to(tl.int64) * head_stride + column % DIM


@triton.jit
def load_bits(pointers, inside):
    """bf16 bits as int32, 0..65535; 0 outside."""
    return tl.load(pointers, mask=inside, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def add_to_sums(plain, weighted, x, column, inside):
    """The sums of a row with the values x (bf16 bits), uint32: of the values, and of the values times 1 + column."""
    x = tl.where(inside, x, 0).to(tl.uint32)
    return plain + x, weighted + x * (column + 1).to(tl.uint32)


@triton.jit
def store_sums(sums, plain, weighted, part, row, parts, rows):
    """sums: [2, parts, rows] int32, set in this part and row."""
    tl.store(sums + part * rows + row, tl.sum(plain, axis=0).to(tl.int32, bitcast=True))
    tl.store(sums + (parts + part) * rows + row, tl.sum(weighted, axis=0).to(tl.int32, bitcast=True))


@triton.jit
def number(bits):
    """fp32 of bf16 bits (int32); what is not finite counts as 0."""
    return tl.where(exponent(bits) == 255, 0, bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def make_inputs(
    x,
    head_stride,
    width,
    in_scale,
    to_fixed,
    cos,
    sin,
    inputs,
    input_stride,
    input_column,
    row,
    DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """What a row of `width` values at x (int16, heads of DIM, head_stride apart) gives to later parts.

    inputs: int8 [rows, input_stride], set from `input_column` on. cos, sin: int32 [rows, DIM / 2]. in_scale: fp32
    [width]. to_fixed: fp32 [width], powers of two.
    """
    if ROTATE:
        cos += row * (DIM // 2)
        sin += row * (DIM // 2)
    inputs += row * input_stride + input_column
    lane = tl.arange(0, TILE)
    at = 0
    if ROTATE:
        HALF: tl.constexpr = DIM // 2
        while at < width // 2:
            pair = at + lane
            inside = pair < width // 2
            head = pair // HALF
            place = x + head.to(tl.int64) * head_stride + pair % HALF
            column = head * DIM + pair % HALF
            scale = tl.load(to_fixed + column, mask=inside, other=0)
            a = rounded(number(load_bits(place, inside)) * scale, RANGE)
            b = rounded(number(load_bits(place + HALF, inside)) * scale, RANGE)
            c = tl.load(cos + pair % HALF, mask=inside, other=0)
            s = tl.load(sin + pair % HALF, mask=inside, other=0)
            low = (a * c + b * s).to(tl.float32) * tl.load(in_scale + column, mask=inside, other=0)
            high = (b * c - a * s).to(tl.float32) * tl.load(in_scale + column + HALF, mask=inside, other=0)
            tl.store(inputs + column, rounded(low, 127.0).to(tl.int8), mask=inside)
            tl.store(inputs + column + HALF, rounded(high, 127.0).to(tl.int8), mask=inside)
            at += TILE
    else:
        while at < width:
            column = at + lane
            inside = column < width
            bits = load_bits(in_heads(x, column, head_stride, DIM), inside)
            v = number(bits) * tl.load(in_scale + column, mask=inside, other=0)
            tl.store(inputs + column, rounded(v, 127.0).to(tl.int8), mask=inside)
            at += TILE
