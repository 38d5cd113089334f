"""How the contract of codecs is tried: blocks, coding them, and what must be true of the result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codecrows import Coder, Row
from kvcases import INTEGERS, mixed_layout, same_kv

from kvstore import KVLayout, LayerLayout
from kvstore.codecs import BlockInfo, KVView
from kvstore.errors import CodecError

SHAPES = {
    "typical": lambda dtype: (KVLayout.uniform(4, 3, 64, dtype), 64),
    "odd": lambda dtype: (KVLayout((LayerLayout(5, 123, 123),), dtype), 123),
    "one-token": lambda dtype: (KVLayout.uniform(2, 3, 16, dtype), 1),
    "one-value": lambda dtype: (KVLayout.uniform(1, 1, 1, dtype), 1),
    "mixed-layers": lambda dtype: (mixed_layout(dtype), 37),
    "many-layers": lambda dtype: (KVLayout.uniform(40, 1, 4, dtype), 5),
}
SPECIAL = {  # NaNs with payloads (quiet and signalling, both signs), infinities, subnormals, both zeros
    "bfloat16": [0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x0000, 0x8000],
    "float16": [0x7E00, 0x7E01, 0xFFFF, 0x7C01, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x0000, 0x8000],
    "float32": [0x7FC00000, 0x7FC12345, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0, 0x80000000],
    "float8_e5m2": [0x7F, 0x7E, 0xFF, 0x7D, 0x7C, 0xFC, 0x01, 0x83, 0x00, 0x80],
    "float8_e4m3fn": [0x7F, 0xFF, 0x01, 0x87, 0x00, 0x80],
}


def block_info(layout: KVLayout, count: int) -> BlockInfo:
    return BlockInfo(layout, np.arange(count, dtype=np.uint32), 0)


def shaped(row: Row, dtype: str, shape: str) -> tuple[KVLayout, int]:
    """The layout and the number of tokens of one of `SHAPES`."""
    layout, count = SHAPES[shape](dtype)
    return row.layout(layout), count


def small(row: Row, dtype: str = "bfloat16") -> KVLayout:
    return row.layout(KVLayout.uniform(2, 2, 16, dtype))


def encode(codec: Coder, info: BlockInfo, kv) -> tuple[bytes, tuple[int, ...]]:
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(info.layout, kv), memory)
    assert sizes is not None
    assert sum(sizes) <= codec.bound(info)
    assert len(sizes) == len(info.layout.layers)
    return bytes(memory[: sum(sizes)]), sizes


def empty(layout: KVLayout, count: int, fill: int = 0):
    item = INTEGERS[layout.dtype]
    if item is torch.uint8:
        fill &= 0xFF
    dtype = getattr(torch, layout.dtype)
    return [
        tuple(torch.full((x.heads, count, dim), fill, dtype=item).view(dtype) for dim in (x.key_dim, x.value_dim))
        for x in layout.layers
    ]


def decode(codec: Coder, info: BlockInfo, payload: bytes, sizes, count: int | None = None):
    out = empty(info.layout, info.count if count is None else count)
    codec.decode(info, memoryview(payload), sizes, KVView.of_layers(info.layout, out))
    return out


def round_trip(codec: Coder, info: BlockInfo, kv) -> bytes:
    """The payload of a block, which comes back bit for bit."""
    payload, sizes = encode(codec, info, kv)
    assert same_kv(decode(codec, info, payload, sizes), kv)
    return payload


def comes_back(row: Row, info: BlockInfo, kv, given=None) -> bool:
    """Whether a block is decoded to what it was, as nearly as the row says. given: what is coded, where not `kv`."""
    codec = row.coder(info.layout)
    payload, sizes = encode(codec, info, kv if given is None else given)
    bound = codec.error_bound(memoryview(payload), sizes)
    return row.faithful(decode(codec, info, payload, sizes), kv, bound)


def another_size_is_refused(row: Row, fill: str) -> None:
    layout = small(row)
    codec = row.coder(layout)
    payload, sizes = encode(codec, block_info(layout, 16), row.block(fill, layout, 16))
    for count in (15, 17):
        with pytest.raises(CodecError):
            decode(codec, block_info(layout, count), payload, sizes)


def outside_is_untouched(codec: Coder, info: BlockInfo, payload: bytes | bytearray, sizes: tuple[int, ...]) -> bool:
    """Decodes into the middle of a larger cache; whether that was refused is what it returns: False."""
    layout, count = info.layout, info.count
    whole, accepted = empty(layout, count + 2, fill=0x1234), True
    try:
        slices = [tuple(t[:, 1 : 1 + count] for t in pair) for pair in whole]
        codec.decode(info, memoryview(payload), sizes, KVView.of_layers(layout, slices))
    except CodecError:
        accepted = False
    edges = [tuple(torch.cat([t[:, :1], t[:, 1 + count :]], dim=1) for t in pair) for pair in whole]
    assert same_kv(edges, empty(layout, 2, fill=0x1234))
    return accepted


def special_of(dtype: str) -> torch.Tensor:
    special = np.array(SPECIAL[dtype], dtype=f"uint{8 * INTEGERS[dtype].itemsize}")
    return torch.from_numpy(special).view(getattr(torch, dtype))


def kv_of_smooth(layout: KVLayout, count: int):
    def ramp(heads: int, dim: int) -> torch.Tensor:
        numbers = torch.arange(heads * count * dim).remainder(7)
        return numbers.reshape(heads, count, dim).to(getattr(torch, layout.dtype))

    return [(ramp(x.heads, x.key_dim), ramp(x.heads, x.value_dim)) for x in layout.layers]


def spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values with a gap after each one along `dim`."""
    wide = torch.zeros([2 * n if d == dim else n for d, n in enumerate(tensor.shape)], dtype=tensor.dtype)
    index = [slice(None)] * 3
    index[dim] = slice(None, None, 2)
    wide[tuple(index)] = tensor
    return wide[tuple(index)]
