"""Codec 0: the bytes as they are, each tensor `[heads, tokens, dim]` one after the other. Oracle of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError


class RawCodec(Codec):
    """Copies; runs at memory speed."""

    id = 0
    name = "raw"
    exact = True

    def bound(self, info: BlockInfo) -> int:
        return info.count * info.layout.bytes_per_token

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        if len(out) < self.bound(info):
            return None
        block.copy_to(_packed(info, out))
        return tuple(info.layer_bytes())

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(info, payload, layer_sizes, out)
        if list(layer_sizes) != info.layer_bytes():
            raise CodecError(f"raw: a raw block of {info.count} tokens cannot have layers of {list(layer_sizes)} bytes")
        _packed(info, payload).narrow(0, out.tokens).copy_to(out)


def _packed(info: BlockInfo, memory: memoryview) -> KVView:
    array = np.frombuffer(memory, dtype=np.uint8)
    return KVView.packed(info.layout, info.count, array.ctypes.data, array)
