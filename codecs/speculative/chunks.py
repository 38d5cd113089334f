"""One chunk of a cache, coded against its prediction: bf16 as the donor codec does, fp8 by the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.speculative import mixture
from kvstore.codecs.speculative.mixture import F32, U8, Scales
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

SEEN_BYTES = 2 * mixture.CODES  # of `Scales`, behind a byte for each channel

Layers = Sequence["tuple[torch.Tensor, torch.Tensor]"]


class RowCoder:
    """bf16: in the values' own bins, by rANS, with scales that stand in the payload. Immutable."""

    scales = b""

    def __init__(self, model: DonorModel | None) -> None:
        """model: carries what differs on from layer to layer."""
        self._codec = DonorCodec(EntropyCodec(), model)

    def encode(self, info: BlockInfo, chunk: KVView, prediction: Layers) -> tuple[bytes, tuple[int, ...]] | None:
        """(the payload, the bytes of each layer)."""
        room, span = memoryview(bytearray(self._codec.bound(info))), Span(0, info.count, 0, 0, 0)
        donor = DonorRows.of(span, KVView.of_layers(info.layout, prediction))
        sizes = self._codec.encode(info, chunk, [donor], room)
        return None if sizes is None else (bytes(room[: sum(sizes)]), sizes)

    def decode(
        self, info: BlockInfo, payload: memoryview, sizes: Sequence[int], prediction: Layers, out: KVView
    ) -> None:
        self._codec.decode(info, payload, sizes, [KVView.of_layers(info.layout, prediction)], out)


class MixtureCoder:
    """e4m3: each code by what of a mixture around its prediction is rounded to it. Immutable."""

    def __init__(self, layout: KVLayout, scales: Scales) -> None:
        self._layout, self._scales = layout, scales
        self.scales = scales.pack()

    def encode(self, info: BlockInfo, chunk: KVView, prediction: Layers) -> tuple[bytes, tuple[int, ...]]:
        tensors = chunk.tensors()
        codes = codes_in(list(zip(tensors[::2], tensors[1::2], strict=True)))
        payload = mixture.encode(codes, numbers_in(prediction), self._scales)
        return payload, (len(payload), *[0] * (len(self._layout.layers) - 1))

    def decode(
        self, info: BlockInfo, payload: memoryview, sizes: Sequence[int], prediction: Layers, out: KVView
    ) -> None:
        import torch

        if sizes[0] != len(payload):
            raise CodecError("speculative: the first layer of a chunk has all of its bytes")
        codes = mixture.decode(bytes(payload), numbers_in(prediction), self._scales)
        at = 0
        for tensor in out.tensors():
            heads, tokens, dim = tensor.shape
            part = codes[:, at : at + heads * dim].reshape(tokens, heads, dim)
            tensor.view(torch.uint8).copy_(torch.from_numpy(part).transpose(0, 1))
            at += heads * dim


def channels_of(layout: KVLayout) -> int:
    """Values that the layers hold of a token."""
    return sum(x.heads * (x.key_dim + x.value_dim) for x in layout.layers)


def measured(cache: Layers, predictions: Sequence[Layers]) -> Scales:
    """The scales of a cache around all of its predictions."""
    import torch

    codes = codes_in(cache)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    return Scales.of(codes, np.concatenate([numbers_in(each) for each in predictions]), values)


def codes_in(layers: Layers) -> U8:
    """uint8 `[tokens, channels]` of layers of fp8."""
    import torch

    return torch.cat([_rows(x.view(torch.uint8)) for pair in layers for x in pair], 1).numpy()


def numbers_in(layers: Layers) -> F32:
    """float32 `[tokens, channels]`; 0 for what is not finite."""
    import torch

    found = torch.cat([_rows(x) for pair in layers for x in pair], 1).float()
    return torch.where(found.isfinite(), found, 0.0).numpy()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).flatten(1)
