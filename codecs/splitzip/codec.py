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
from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.device import buffer_on_cpu, codes_on_device, copy_on_cpu, may_have_kernels
from kvstore.codecs.view import KVView, row_shapes
from kvstore.core.layout import ITEM_BYTES
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<12xI")  # chunks stored raw; 0 in layers of other modes


class SplitZipCodec(Codec):
    """Fixed codes: about 1.33 for bf16, 1.14 for fp32, 1.07 for fp16. Stateless and thread-safe."""

    id = 1
    name = "splitzip"
    exact = True
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
            _check_block(info, payload, layer_sizes, out)
            from kvstore.codecs.splitzip.kernels.blocks import decode_from

            decode_from(payload, layer_sizes, info.count, out)
            return
        decode_block(info, payload, layer_sizes, out)

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
    """See `Codec.encode`; by the CPU. model: code with entropy (codec 7) what that makes smaller."""
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
    """See `Codec.decode`; by the CPU."""
    _check_block(info, payload, layer_sizes, out)
    target = out if out.on_cpu else buffer_on_cpu(out)
    heads, row_bytes = row_shapes(info.layout)
    dtype, wanted = info.layout.dtype, out.tokens
    wrong = _native.decode(dtype, heads, row_bytes, info.count, payload, layer_sizes, target.rows, wanted, model)
    if wrong is not None:
        raise CodecError(wrong)
    if target is not out:
        target.copy_to(out)


def _check_block(info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
    check_payload(info, payload, layer_sizes, out)
    if min(layer_sizes) < 0:
        raise CodecError(f"layers of {list(layer_sizes)} bytes")
    if not out.writable:
        raise ValueError("decode: the last dimension of every tensor of the target must be contiguous")


def raw_chunks(payload: memoryview, layer_sizes: Sequence[int]) -> int:
    """How many chunks of layers that `encode_block` wrote are stored raw."""
    ends = accumulate(layer_sizes)
    return sum(_HEADER.unpack_from(payload, end - size)[0] for end, size in zip(ends, layer_sizes, strict=True))


def bound_values(count: int, dtype: str) -> int:
    """The most bytes that `encode_values` writes for `count` values of this dtype."""
    return _native.bounds(dtype, *_flat(dtype), count)[0]


def encode_values(
    values: npt.NDArray[np.unsignedinteger[Any]], dtype: str, level: str | None = None, out: Any = None
) -> int:
    """Codes a run of values as one head of one layer; returns the bytes written to the front of `out`.

    values: `[n]` contiguous, the bits of values of `dtype` (see `layout.ITEM_BYTES`). level: which twin ("scalar",
    "avx2", "avx512"), the machine's best by default. out: at least `bound_values(n, dtype)` writable bytes.
    """
    _check(values, dtype)
    rows = _rows(values, dtype)
    sizes = _native.encode(dtype, *_flat(dtype), len(values), rows, out, None, level)
    if sizes is None:
        raise ValueError(f"out: too short; bound_values({len(values)}, {dtype!r}) bytes are enough")
    return sizes[0]


def decode_values(stream: Any, dtype: str, out: npt.NDArray[np.unsignedinteger[Any]], level: str | None = None) -> None:
    """The inverse of `encode_values`: fills `out`, whose length is that of what was coded. Raises `CodecError`."""
    _check(out, dtype)
    if not out.flags.writeable:
        raise ValueError("out: cannot be written to")
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
        raise ValueError(
            f"values: expected a contiguous run of {ITEM_BYTES[dtype]}-byte integers, found {values.dtype}"
        )
