# mypy: ignore-errors
# Kernels are compiled by triton, from its own language in Python's syntax; triton ships no types.
"""Which values a program works on: a chunk is up to 4096 values of one head of one layer's K or V.

A *table* `[layers, COLUMNS]` int64 describes the tensors, so that one launch codes a block of any number of layers.
Chunks of a layer are numbered head by head, K's heads before V's, as their ends are in the format.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(4096)  # as in the format
GROUP = tl.constexpr(32)
CODES = tl.constexpr(16)

# Columns of the table. Strides count values; the last dimension is contiguous. `LIMIT`: of the tokens, so many exist in
# the tensors (a decoder may be asked for fewer than the block has).
KEY, KEY_HEAD, KEY_TOKEN, KEY_DIM = (tl.constexpr(i) for i in range(4))
VALUE, VALUE_HEAD, VALUE_TOKEN, VALUE_DIM = (tl.constexpr(i) for i in range(4, 8))
HEADS, TOKENS, LIMIT = (tl.constexpr(i) for i in range(8, 11))
PAYLOAD, PAYLOAD_BYTES, FIRST_STATE = (tl.constexpr(i) for i in range(11, 14))
COLUMNS = tl.constexpr(14)


@triton.jit
def whole(x, STEP: tl.constexpr):
    """x, a multiple of STEP, said so that the compiler knows: its own hints are lost when values are rewritten."""
    return x // STEP * STEP


@triton.jit
def raw_bytes(count, REST_BITS: tl.constexpr):
    """What the high bits of `count` exponents take in a chunk that is stored raw: 4 or 1 bits each."""
    if REST_BITS == 8:
        return (count + 1) // 2
    return (count + 7) // 8


@triton.jit
def layer_chunks(row):
    """Chunks of the layer: scalar int32."""
    tokens = tl.load(row + TOKENS)
    keys = tl.cdiv(tokens * tl.load(row + KEY_DIM), CHUNK)
    values = tl.cdiv(tokens * tl.load(row + VALUE_DIM), CHUNK)
    return (tl.load(row + HEADS) * (keys + values)).to(tl.int32)


@triton.jit
def layer_values(row):
    """Values of the layer, every head padded to whole groups: scalar int64, what the planes have room for."""
    tokens = tl.load(row + TOKENS)
    keys = tl.cdiv(tokens * tl.load(row + KEY_DIM), GROUP) * GROUP
    values = tl.cdiv(tokens * tl.load(row + VALUE_DIM), GROUP) * GROUP
    return tl.load(row + HEADS) * (keys + values)


@triton.jit
def known_bytes(values, chunks, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """Bytes of a layer before its escapes: header, planes, ends and bases."""
    return 16 + values // 2 + values * REST_BITS // 8 + values * LOW_BYTES + 5 * chunks


@triton.jit
def planes(payload, row, values, chunks, LOW_BYTES: tl.constexpr, REST_BITS: tl.constexpr):
    """Where a layer's header, plane of signs and mantissas, plane of low bytes, ends and bases begin in the payload."""
    begin = payload + tl.load(row + PAYLOAD)
    begin = tl.multiple_of(begin, 16)
    rest_plane = begin + 16 + values // 2
    low_plane = rest_plane + values * REST_BITS // 8
    ends = low_plane + values * LOW_BYTES
    return begin, rest_plane, low_plane, ends, ends + 4 * chunks


@triton.jit
def locate(row, number, ITEM: tl.constexpr, ALIGNED: tl.constexpr):
    """Where chunk `number` lies: (address of its head, stride of a token, dim, first value in the head, values of the
    chunk, values of the chunk that exist in the tensor, first value in the layer's planes)."""
    heads = tl.load(row + HEADS).to(tl.int32)
    tokens = tl.load(row + TOKENS)
    key_run = tokens * tl.load(row + KEY_DIM)
    value_run = tokens * tl.load(row + VALUE_DIM)
    key_chunks = tl.cdiv(key_run, CHUNK).to(tl.int32)
    value_chunks = tl.cdiv(value_run, CHUNK).to(tl.int32)
    of_value = number >= heads * key_chunks
    inside = tl.where(of_value, number - heads * key_chunks, number)
    a_head = tl.maximum(tl.where(of_value, value_chunks, key_chunks), 1)  # no tokens, no chunks
    head = inside // a_head
    first = (inside - head * a_head).to(tl.int64) * CHUNK
    run = tl.where(of_value, value_run, key_run)
    padded = tl.cdiv(run, GROUP) * GROUP
    place = head * padded + first + tl.where(of_value, heads * (tl.cdiv(key_run, GROUP) * GROUP), 0)

    column = tl.where(of_value, 4, 0)
    dim = tl.load(row + column + KEY_DIM).to(tl.int32)
    head_stride = tl.load(row + column + KEY_HEAD)
    token_stride = tl.load(row + column + KEY_TOKEN)
    count = tl.minimum(run - first, CHUNK).to(tl.int32)
    exist = tl.minimum(tl.maximum(tl.load(row + LIMIT) * dim - first, 0), count).to(tl.int32)
    if ALIGNED:
        count = whole(count, GROUP)
        exist = whole(exist, GROUP)
    address = tl.load(row + column + KEY) + head * head_stride * ITEM
    return address, token_stride, dim, first, count, exist, place


@triton.jit
def pointers(address, token_stride, dim, first, lane, TYPE: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to values `lane` of the chunk.

    DIM: -1 where the tokens of a head follow each other without gaps, the common dim of all tensors where they do not,
    0 where there is no common one. ALIGNED: addresses are multiples of 16 bytes, strides of as many values as 16 bytes
    hold; both together make 16-byte accesses possible.
    """
    base = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        token_stride = whole(token_stride, 16)
    if DIM == -1:
        return base + first + lane
    if DIM > 0 and CHUNK % DIM == 0:
        token = first // DIM  # a chunk begins with a token
        return base + token * token_stride + (lane // DIM).to(tl.int64) * token_stride + lane % DIM
    token = first // dim
    column = (first - token * dim).to(tl.int32)
    if DIM > 0:
        if ALIGNED:
            column = whole(column, 16)
        lane = column + lane
        return base + token * token_stride + (lane // DIM).to(tl.int64) * token_stride + lane % DIM
    lane = column + lane
    return base + token * token_stride + (lane // dim).to(tl.int64) * token_stride + lane % dim
