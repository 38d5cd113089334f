"""Codec 6: temporal state compression (TSC, Solstice EIM, technical report of March 2026). The tokens of a block are
frames of a film: every kappa-th is kept whole, the others are differences from it in 4 bits. Lossy; a published
baseline that others are compared with.

Any dtype, keys as the cache holds them, no profile. A layer: a header (1, corrections in 256 values, kappa in 2 bytes,
then as float32 the largest error of a value), then its frames (frames.py, pages.py). A layer that has a value that is
not finite, or that coding would not make smaller, is raw: a header of zeros, K, V.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.aqua.tensors import fill, layers_of, packed, raw_bytes, split_layers, widths
from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.tsc.frames import Frames, floats_of
from kvstore.codecs.tsc.pages import Bytes
from kvstore.codecs.view import KVView
from kvstore.core.layout import LayerLayout
from kvstore.errors import CodecError, ConfigError

if TYPE_CHECKING:
    import torch

KAPPA, TOP = 64, 8  # as published
MOST_KAPPA, MOST_TOP = (1 << 16) - 1, 64
RAW, CODED = range(2)
_HEADER = struct.Struct("<BBHf")
_NO_ERROR = 2.0**-149  # the least float32 above 0, for 0 would say that the error is not known


class TscCodec(Codec):
    """Lossy: keyframes whole, all other tokens in 4 bits a value and a little more. Thread-safe.

    It decodes what was coded with any kappa and top.

    Args:
        kappa: tokens from keyframe to keyframe, 2 to 65,535; a block has at least one.
        top: of 256 values, how many of the largest differences are kept as values, 0 to 64.

    Raises:
        ConfigError: names the argument that is not one of these.

    Example:
        >>> import torch
        >>> from kvstore import KVLayout
        >>> info = BlockInfo(KVLayout.uniform(1, heads=2, head_dim=64), np.arange(64, dtype=np.uint32), start=64)
        >>> k, v = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        >>> codec = TscCodec(kappa=64, top=8)
        >>> out = memoryview(bytearray(codec.bound(info)))
        >>> (size,) = codec.encode(info, KVView.of_layers(info.layout, [(k, v)]), out)
        >>> round(info.layer_bytes()[0] / size, 2)
        3.17
        >>> back = torch.zeros_like(k), torch.zeros_like(v)
        >>> codec.decode(info, out[:size], [size], KVView.of_layers(info.layout, [back]))
        >>> most = codec.error_bound(out[:size], [size])
        >>> most < 0.5 and bool(((back[0] - k).abs() <= most).all())
        True
    """

    id = 6
    name = "tsc"
    exact = False

    def __init__(self, kappa: int = KAPPA, top: int = TOP) -> None:
        if not 2 <= kappa <= MOST_KAPPA:
            raise ConfigError(f"tsc: kappa: expected 2 to {MOST_KAPPA} tokens, found {kappa!r}")
        if not 0 <= top <= MOST_TOP:
            raise ConfigError(f"tsc: top: expected 0 to {MOST_TOP} corrections in 256 values, found {top!r}")
        self._kappa, self._top = kappa, top

    def bound(self, info: BlockInfo) -> int:
        return sum(_HEADER.size + size for size in info.layer_bytes())

    def usual(self, info: BlockInfo) -> int:
        shapes = info.layout.layers
        frames = (self._frames(info, shape, self._kappa, self._top).nbytes for shape in shapes)
        return sum(_HEADER.size + min(pair) for pair in zip(frames, info.layer_bytes(), strict=True))

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        raw = np.empty(block.nbytes, np.uint8)
        block.copy_to(packed(info.layout, info.count, raw))
        sizes, at = [], 0
        for layer in layers_of(info.layout, info.count, raw):
            frames = self._frames(info, layer.shape, self._kappa, self._top)
            coded = self._encode_layer(frames, layer.tensor(0), layer.tensor(1))
            if at + len(coded) > len(out):
                return None
            out[at : at + len(coded)] = coded
            at += len(coded)
            sizes.append(len(coded))
        return tuple(sizes)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        return sum(payload[at] == RAW for at in _starts(layer_sizes))

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float:
        return max((_HEADER.unpack_from(payload, at)[3] for at in _starts(layer_sizes)), default=0.0) or _NO_ERROR

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(self.name, info, payload, layer_sizes, out)
        layers = split_layers(payload, layer_sizes)
        found = [self._opened(info, number, data) for number, data in enumerate(layers)]  # before memory is taken
        raw = np.empty(out.tokens * info.layout.bytes_per_token, np.uint8)
        for (frames, data), layer in zip(found, layers_of(info.layout, out.tokens, raw), strict=True):
            k, v = layer.tensor(0), layer.tensor(1)
            if frames is None:
                _fill_raw(info.count, data, k, v)
                continue
            first = Frames(out.tokens, frames.kappa, frames.widths, frames.item, frames.top)
            for tensor, rows in zip((k, v), first.decode(data[: first.nbytes], k.dtype), strict=True):
                tensor.copy_(rows.view(rows.shape[0], tensor.shape[0], tensor.shape[2]).transpose(0, 1))
        packed(info.layout, out.tokens, raw).copy_to(out)

    # -- a layer -------------------------------------------------------------------------------------------------------

    def _frames(self, info: BlockInfo, shape: LayerLayout, kappa: int, top: int) -> Frames:
        return Frames(info.count, min(kappa, info.count), widths(shape), info.layout.item_bytes, top)

    def _encode_layer(self, frames: Frames, k: torch.Tensor, v: torch.Tensor) -> bytes:
        parts = _rows(k), _rows(v)
        if frames.nbytes < k.nbytes + v.nbytes and all(part.float().isfinite().all() for part in parts):
            data = frames.encode(parts)
            if data is not None:
                error = _largest_error(parts, frames.decode(data, k.dtype))
                if np.isfinite(error):
                    return _HEADER.pack(CODED, frames.top, frames.kappa, error) + data.tobytes()
        return _HEADER.pack(RAW, 0, 0, 0.0) + raw_bytes(k) + raw_bytes(v)

    def _opened(self, info: BlockInfo, number: int, data: Bytes) -> tuple[Frames | None, Bytes]:
        """What a layer is made of, None if it is raw, and its bytes behind the header. Raises `CodecError`."""
        if len(data) < _HEADER.size:
            raise CodecError(f"tsc: layer {number} has {len(data)} bytes, too few for its header")
        mode, top, kappa, error = _HEADER.unpack_from(data.data)
        if (mode, top, kappa, error) == (RAW, 0, 0, 0.0):
            frames, expected = None, info.layer_bytes()[number]
        elif mode == CODED and top <= MOST_TOP and 0 < kappa <= info.count and 0 <= error < np.inf:
            frames = self._frames(info, info.layout.layers[number], kappa, top)
            expected = frames.nbytes
        else:
            raise CodecError(f"tsc: layer {number} has the unknown header {(mode, top, kappa, error)}")
        if len(data) != _HEADER.size + expected:
            raise CodecError(f"tsc: layer {number} has {len(data)} bytes, expected {_HEADER.size + expected}")
        return frames, data[_HEADER.size :]


def _starts(layer_sizes: Sequence[int]) -> list[int]:
    """Where the layers that have bytes begin."""
    ends = np.cumsum([0, *layer_sizes]).tolist()
    return [at for at, size in zip(ends, layer_sizes, strict=False) if size]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[heads, tokens, dim]` -> `[tokens, heads * dim]`."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1)


def _fill_raw(count: int, data: Bytes, k: torch.Tensor, v: torch.Tensor) -> None:
    """The first tokens of raw K and V of `count` tokens."""
    import torch

    at = 0
    for tensor in (k, v):
        heads, _, dim = tensor.shape
        whole = torch.empty((heads, count, dim), dtype=tensor.dtype)
        fill(whole, data[at : at + whole.nbytes])
        tensor.copy_(whole[:, : tensor.shape[1]])
        at += whole.nbytes


def _largest_error(given: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> float:
    """The largest difference of two values, as float32, rounded up."""
    most = max(
        float(np.abs(floats_of(a).astype(np.float64) - floats_of(b)).max()) for a, b in zip(given, found, strict=True)
    )
    with np.errstate(over="ignore"):
        near = np.float32(most)
    return float(near if float(near) >= most else np.nextafter(near, np.float32(np.inf)))
