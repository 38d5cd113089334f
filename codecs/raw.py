"""Codec 0: the bytes as they are, each tensor `[heads, tokens, dim]` one after the other. Oracle of the others."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError


class RawCodec(Codec):
    """Copies, at the speed of memory. Any dtype. Stateless and thread-safe.

    Example:
        >>> import numpy as np, torch
        >>> from kvstore import KVLayout
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=16)
        >>> k, v = torch.randn(2, 2, 3, 16).bfloat16()
        >>> info = BlockInfo(layout, np.array([1, 2, 3], np.uint32), start=0)
        >>> codec = RawCodec()
        >>> payload = memoryview(bytearray(codec.bound(info)))
        >>> sizes = codec.encode(info, KVView.of_layers(layout, [(k, v)]), payload)
        >>> sizes
        (384,)
        >>> back = torch.zeros_like(k), torch.zeros_like(v)
        >>> codec.decode(info, payload, sizes, KVView.of_layers(layout, [back]))
        >>> torch.equal(back[0], k) and torch.equal(back[1], v)
        True
    """

    id = 0
    name = "raw"
    exact = True
    layers_apart = True
    copies = True

    def bound(self, info: BlockInfo) -> int:
        return info.count * info.layout.bytes_per_token

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        if len(out) < self.bound(info):
            return None
        block.pack(out, unlock=True)
        return tuple(info.layer_bytes())

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(self.name, info, payload, layer_sizes, out)
        if list(layer_sizes) != (expected := info.layer_bytes()):
            raise CodecError(f"raw: {info.count} tokens take layers of {expected} bytes, found {list(layer_sizes)}")
        out.unpack(payload, info.count)
