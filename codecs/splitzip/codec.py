"""Codec 1: 4-bit codes for exponents, planes for the rest, sparse escapes. Lossless, at the speed of memory.

A value's exponent is coded by its distance from the bottom of a window of 16 exponents, which every chunk of 4,096
values of one head has for itself: it ends at the chunk's largest exponent. Signs and mantissas are kept as they are.
Exponents outside of the window are listed behind the planes; a chunk with too many of them keeps all its exponents.
After SplitZip (arXiv, 2026), with windows instead of tables; docs/codecs/splitzip.md has the reasons and figures,
FORMAT.md the bytes. For bf16, fp16, fp32 (its upper half is a bf16), and float8 E5M2; E4M3, of which codes would
save nothing, is stored as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import kvstore.codecs._native as _native
from kvstore.codecs.base import BlockInfo, Codec, CodedBlock, LayersOfBlocks, check_payload
from kvstore.codecs.device import buffer_on_cpu, codes_on_device, copy_on_cpu
from kvstore.codecs.launching import may_have_kernels
from kvstore.codecs.tensor_memory import row_shapes
from kvstore.codecs.view import KVView
from kvstore.core.layout import ITEM_BYTES
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<12xI")  # chunks stored raw; 0 in layers of other modes


class SplitZipCodec(Codec):
    """Fixed codes for exponents: makes bf16 1.33 times smaller, fp32 1.14 times, fp16 1.07 times. Thread-safe.

    Example:
        >>> import torch
        >>> from kvstore import KVLayout
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=64)
        >>> k = v = torch.ones(2, 64, 64).bfloat16()
        >>> info = BlockInfo(layout, np.arange(64, dtype=np.uint32), start=0)
        >>> codec = SplitZipCodec()
        >>> out = memoryview(bytearray(codec.bound(info)))
        >>> sizes = codec.encode(info, KVView.of_layers(layout, [(k, v)]), out)
        >>> sizes[0] < 0.77 * info.layer_bytes()[0]
        True
    """

    id = 1
    name = "splitzip"
    exact = True
    layers_apart = True
    has_kernels = True

    def bound(self, info: BlockInfo) -> int:
        return _native.bounds(info.layout.dtype, *row_shapes(info.layout), info.count)[0]

    def usual(self, info: BlockInfo) -> int:
        return _native.bounds(info.layout.dtype, *row_shapes(info.layout), info.count)[1]

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        if codes_on_device(self, block):
            from kvstore.codecs.splitzip.kernels.blocks import encode_into

            return encode_into(block, out)
        return encode_block(info, block, out)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        if codes_on_device(self, out):
            check_payload(self.name, info, payload, layer_sizes, out)
            from kvstore.codecs.splitzip.kernels.blocks import decode_from

            decode_from(payload, layer_sizes, info.count, out)
            return
        decode_block(info, payload, layer_sizes, out)

    def by_layers(self, blocks: Sequence[CodedBlock], out: KVView) -> LayersOfBlocks:
        return layers_of_blocks(blocks, out)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        return raw_chunks(payload, layer_sizes)

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """Where triton is installed and can compile for the device."""
        if not may_have_kernels(device):
            return False
        try:
            from kvstore.codecs.splitzip.kernels.blocks import works
        except ImportError:
            return False
        return works(device, dtype)


def encode_block(
    info: BlockInfo, block: KVView, out: memoryview, model: _native.EntropyModel | None = None
) -> tuple[int, ...] | None:
    """Encode a block on the CPU; see `Codec.encode`. With a `model`, layers are coded as codec 7 does."""
    heads, row_bytes = row_shapes(info.layout)
    view = block if block.on_cpu else copy_on_cpu(block)
    return _native.encode(info.layout.dtype, heads, row_bytes, info.count, view.rows, out, model)


def decode_block(
    info: BlockInfo,
    payload: memoryview,
    layer_sizes: Sequence[int],
    out: KVView,
    model: _native.EntropyModel | None = None,
) -> None:
    """Decode a block on the CPU; see `Codec.decode`. `model`: as for `encode_block`."""
    check_payload("splitzip" if model is None else "entropy", info, payload, layer_sizes, out)
    target = out if out.on_cpu else buffer_on_cpu(out)
    heads, row_bytes = row_shapes(info.layout)
    dtype, wanted = info.layout.dtype, out.tokens
    wrong = _native.decode(
        dtype, heads, row_bytes, info.count, payload, layer_sizes, target.rows, wanted, model, large=target.large
    )
    if wrong is not None:
        raise CodecError(wrong)
    if target is not out:
        target.copy_to(out)


def layers_of_blocks(
    blocks: Sequence[CodedBlock], out: KVView, model: _native.EntropyModel | None = None
) -> LayersOfBlocks:
    """As `Codec.by_layers`; `model`: as for `encode_block`.

    Each call goes into C++ once, whatever the number of blocks: a thread that runs a model meanwhile would have to wait
    for the interpreter as often.
    """
    heads, row_bytes = row_shapes(out.layout)
    native = _native.LayerBlocks(out.layout.dtype, heads, row_bytes, out.rows, out.tokens, out, model)
    for block in blocks:
        native.add(block.payload, block.layer_sizes, block.info.count, block.at, block.wanted)

    def decode(layers: range, numbers: range) -> list[int]:
        return native.decode(layers.start, layers.stop, numbers.start, numbers.stop)

    return decode


def raw_chunks(payload: memoryview, layer_sizes: Sequence[int]) -> int:
    """Return how many chunks of what `encode_block` wrote are stored raw."""
    ends = accumulate(layer_sizes)
    return sum(_HEADER.unpack_from(payload, end - size)[0] for end, size in zip(ends, layer_sizes, strict=True))


def bound_values(count: int, dtype: str) -> int:
    """Return the most bytes that `encode_values` writes for `count` values of this dtype."""
    return _native.bounds(dtype, *_flat(dtype), count)[0]


def encode_values(
    values: npt.NDArray[np.unsignedinteger[Any]], dtype: str, level: str | None = None, out: Any = None
) -> int:
    """Code values as one head of one layer, into the beginning of `out`.

    Args:
        values: `[n]` contiguous unsigned integers, the bits of values of `dtype`.
        dtype: a name in `layout.ITEM_BYTES`.
        level: "scalar", "avx2", "avx512", "amx" or "neon"; default is the best that the machine has. All write the same
            bytes.
        out: writable memory, which is mutated; `bound_values(n, dtype)` bytes are enough.

    Returns:
        The number of bytes written.

    Raises:
        ValueError: names the argument that does not fit.

    Example:
        >>> values = np.full(4096, 0x3F80, np.uint16)  # 1.0 as bf16
        >>> out = bytearray(bound_values(4096, "bfloat16"))
        >>> size = encode_values(values, "bfloat16", out=out)
        >>> back = np.zeros_like(values)
        >>> decode_values(out[:size], "bfloat16", back)
        >>> np.array_equal(values, back)
        True
    """
    _check(values, dtype)
    rows = _rows(values, dtype)
    sizes = _native.encode(dtype, *_flat(dtype), len(values), rows, out, None, level)
    if sizes is None:
        raise ValueError(f"out: too short; make it bound_values({len(values)}, {dtype!r}) bytes long")
    return sizes[0]


def decode_values(stream: Any, dtype: str, out: npt.NDArray[np.unsignedinteger[Any]], level: str | None = None) -> None:
    """Decode what `encode_values` wrote.

    Args:
        stream: the bytes written.
        dtype, level: as for `encode_values`.
        out: as many integers as were coded; mutated.

    Raises:
        CodecError: `encode_values` did not write the stream. `out` then holds undefined values.
        ValueError: names the argument that does not fit.
    """
    _check(out, dtype)
    if not out.flags.writeable:
        raise ValueError("out: cannot be written to; pass an array that is writable")
    size = memoryview(stream).nbytes
    rows = _rows(out, dtype)
    wrong = _native.decode(dtype, *_flat(dtype), len(out), stream, [size], rows, len(out), None, level)
    if wrong is not None:
        raise CodecError(wrong)


def _flat(dtype: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    # A layer of one head of keys and none of values, a value a token.
    return np.array([1, 0], np.uint32), np.full(2, ITEM_BYTES[dtype], np.uint32)


def _rows(values: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> npt.NDArray[np.int64]:
    return np.array([[values.ctypes.data, 0], [0, 0], [ITEM_BYTES[dtype]] * 2], np.int64)


def _check(values: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(ITEM_BYTES)}, found {dtype!r}")
    if values.ndim != 1 or values.itemsize != ITEM_BYTES[dtype] or not values.flags.c_contiguous:
        found = f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"values: expected a contiguous run of {ITEM_BYTES[dtype]}-byte integers, found {found}")
