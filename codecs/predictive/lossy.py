"""The lossy mode of the predictive codec: blocks encoded by lossy_reference.py, decoded by csrc/lossy/lossy.h.

bf16 on the CPU; blocks elsewhere are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

import kvstore.codecs.predictive._lossy as _lossy
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_reference import Block, Pairs, encode_blocks, header
from kvstore.codecs.predictive.lossy_rows import Engine
from kvstore.codecs.view import KVView
from kvstore.core.layout import SINKS
from kvstore.errors import CodecError

USUAL = 1.5  # times what held-out text took


class LossyMode:
    """Thread-safe: nothing changes but the model in the forms for encoding and decoding, made once each."""

    def __init__(self, model: LossyModel) -> None:
        self.model = model

    @cached_property
    def engine(self) -> Engine:
        """For encoding."""
        return Engine(self.model)

    @cached_property
    def _native(self) -> _lossy.Model:
        return native_model(self.model)

    def usual(self, info: BlockInfo, steps: Steps) -> int | None:
        """About how many bytes a block takes; None where the profile does not say."""
        ladder = self.model.ladder
        if not len(ladder):
            return None
        bits = float(np.interp(steps.k, ladder[:, 0], ladder[:, 2])) * USUAL
        item = 8 * info.layout.item_bytes
        exact = max(0, min(info.count, SINKS - info.start))
        values = info.layout.bytes_per_token // info.layout.item_bytes
        expected = ((info.count - exact) * bits + exact * item) * values / 8
        return int(expected) + (1 << 12)

    def can_encode(self, info: BlockInfo) -> bool:
        """Whether the model knows the positions of such a block, of its layout."""
        return info.count > 0 and 0 <= info.start <= self.model.base.positions - info.count

    def encode(self, info: BlockInfo, block: KVView, steps: Steps) -> list[bytes] | None:
        """The coded layers of a block for which `can_encode`; None for one with numbers that are not finite."""
        layers = _read(block)
        if not all(bool((((x >> 7) & 0xFF) != 0xFF).all()) for pair in layers for x in pair):
            return None
        tokens = torch.from_numpy(info.tokens.astype(np.int64))
        return encode_blocks(self.engine, steps, [Block(tokens, info.start, layers)])[0]

    def largest_error(self, payload: memoryview) -> float:
        """Of a value of a block, as the encoder found it."""
        return header(payload)[2][2]

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """See `Codec.decode`; of the model's layout, its sizes checked."""
        target = out if out.on_cpu else buffer_on_cpu(out)
        tokens = info.tokens.astype(np.int64)
        wrong = _lossy.decode(self._native, tokens, info.start, payload, layer_sizes, target.rows, out.tokens)
        if wrong is not None:
            raise CodecError(wrong)
        if target is not out:
            target.copy_to(out)


def native_model(model: LossyModel) -> _lossy.Model:
    """The same model for csrc/lossy/lossy.h, whose decoder gives what `decode_blocks` does but for rounding of sums."""
    base, own = ([part for pair in parts for part in pair] for parts in (model.base.parts, model.parts))
    shared: dict[str, Any] = {
        name: [getattr(part, name) for part in base]
        for name in ("in_scale", "out_scale", "scale", "bias", "adapt", "fix")
    }
    shared |= {name: getattr(model.base, name) for name in ("token_kv", "rope_fine", "rope_coarse")}
    shared["shapes"] = np.array([[x.heads, x.key_dim, x.value_dim] for x in model.layout.layers], np.int64)
    arrays: dict[str, Any] = {
        name: [getattr(part, name) for part in own]
        for name in ("weight", "out_scale", "bias", "basis", "component", "unit", "scale", "adapt")
    }
    arrays |= {name: getattr(model, name) for name in ("levels", "freqs", "row_freqs", "centroids", "expect")}
    arrays["uses"] = np.array([[part.uses for part in pair] for pair in model.parts], np.uint8)
    return _lossy.Model(shared, arrays)


def _read(view: KVView) -> Pairs:
    """bf16 bits, int64 [n, C]."""
    rows = _room(view)
    view.copy_to(KVView.of_layers(view.layout, rows))
    flat = [x.transpose(0, 1).flatten(1).view(torch.int16).long() & 0xFFFF for pair in rows for x in pair]
    return list(zip(flat[::2], flat[1::2], strict=True))


def _room(view: KVView) -> Pairs:
    return [
        tuple(torch.empty(x.heads, view.tokens, dim, dtype=torch.bfloat16) for dim in (x.key_dim, x.value_dim))  # type: ignore[misc]
        for x in view.layout.layers
    ]
