"""Codec 16: byte shuffle and zstd, by the blosc2 library. General-purpose, lossless, for any dtype.

One blosc2 chunk a layer (its K and V one after the other), so that layers decode one at a time. The shuffle puts
the exponent bytes of all values together, which is where a KV cache is redundant.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.blosc import blosc2
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError

_OVERHEAD_BYTES = 64  # blosc2 stores incompressible data with a header of 32 bytes


class ZstdCodec(Codec):
    """Byte shuffle by the dtype's size, then zstd at level 1, on the calling thread. Any dtype. Thread-safe.

    Example:
        >>> import torch
        >>> from kvstore import KVLayout
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=64)
        >>> k = v = torch.ones(2, 16, 64).bfloat16()
        >>> info = BlockInfo(layout, np.arange(16, dtype=np.uint32), start=0)
        >>> codec = ZstdCodec()
        >>> out = memoryview(bytearray(codec.bound(info)))
        >>> (size,) = codec.encode(info, KVView.of_layers(layout, [(k, v)]), out)
        >>> size < info.layer_bytes()[0]
        True
    """

    id = 16
    name = "zstd"
    exact = True
    layers_apart = True
    codes_states = True

    def __init__(self) -> None:
        self._scratch = threading.local()

    def bound(self, info: BlockInfo) -> int:
        return info.count * info.layout.bytes_per_token + _OVERHEAD_BYTES * len(info.layout.layers)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        if len(out) < self.bound(info):
            return None
        library = blosc2()
        layer_bytes = info.layer_bytes()
        raw = self._memory(sum(layer_bytes))
        block.pack(raw.data)
        sizes, begin, written = [], 0, 0
        for nbytes in layer_bytes:
            chunk = library.compress2(
                raw[begin : begin + nbytes],
                codec=library.Codec.ZSTD,
                clevel=1,
                filters=[library.Filter.SHUFFLE],
                typesize=info.layout.item_bytes,
                nthreads=1,
            )
            out[written : written + len(chunk)] = chunk
            sizes.append(len(chunk))
            written += len(chunk)
            begin += nbytes
        return tuple(sizes)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(self.name, info, payload, layer_sizes, out)
        library = blosc2()
        layer_bytes = info.layer_bytes()
        raw = self._memory(sum(layer_bytes))
        begin = read = 0
        for number, (size, nbytes) in enumerate(zip(layer_sizes, layer_bytes, strict=True)):
            part = payload[read : read + size]
            if len(part) < 32 or len(part) > nbytes + _OVERHEAD_BYTES:
                raise CodecError(
                    f"zstd: layer {number} has {len(part)} coded bytes, which cannot hold {nbytes} raw ones"
                )
            # The chunk's own sizes are an attacker's to choose; they are compared before anything is decoded.
            claimed, stored, _ = library.get_cbuffer_sizes(bytes(part[:32]))
            if claimed != nbytes or stored != len(part):
                raise CodecError(
                    f"zstd: layer {number}: its chunk speaks of {stored} coded and {claimed} raw bytes, expected "
                    f"{len(part)} and {nbytes}"
                )
            try:
                library.decompress2(part, dst=raw[begin : begin + nbytes], nthreads=1)
            except (RuntimeError, ValueError, TypeError) as error:
                raise CodecError(f"zstd: layer {number} is damaged: {error}") from error
            begin += nbytes
            read += size
        out.unpack(raw.data, info.count)

    def _memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return scratch memory of this thread, kept from block to block: fresh pages cost more than decoding does."""
        memory: npt.NDArray[np.uint8] | None = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < nbytes:
            memory = self._scratch.memory = np.empty(nbytes, dtype=np.uint8)
        return memory[:nbytes]
