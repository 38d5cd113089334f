"""The exact mode of the predictive codec: blocks coded by csrc/predictive/predictive.h, or by the GPU that holds them.

The words of fp32 and fp16 (codecs/words.py) are coded as bf16 is, by csrc/predictive/wide.h, on the CPU; so are those
of float8, by csrc/predictive/float8/float8.h, but that bins are codes. Kernels code for a device (kernels/blocks.py)
once it has shown that it writes the CPU's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import kvstore.codecs.predictive._predict as _predict
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, wait_for
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.predictive.on_device import Devices
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.kernels.blocks import Loaded


class ExactMode:
    """Codes blocks exactly, on the device that holds them or on the CPU. Thread-safe."""

    def __init__(self, model: PredictiveModel) -> None:
        self.model = model
        self._native = native_model(model)
        self._devices = Devices(model.layout, self._tried)

    def encode(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[KVView, tuple[int, ...] | int | None]:
        """Code a block of the model's layout into `out`, which is mutated.

        Returns:
            The block on the device that coded it, and one of: the bytes of each layer; None if `out`, shorter than
            `limit`, is too small; FALL_BACK if the block takes `limit` bytes or more, or cannot be predicted.
        """
        coder = self._devices.coder_for(block)
        if coder is not None:
            from kvstore.codecs.predictive.kernels.blocks import encode_into

            with self._devices.watched(coder):
                return block, encode_into(coder, info, block, out, limit)
        view = block if block.on_cpu else copy_on_cpu(block)
        dtype = info.layout.dtype
        return view, _predict.encode(self._native, _tokens(info), info.start, view.rows, out, limit, dtype=dtype)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """Decode a block of the model's layout whose sizes were checked; see `Codec.decode`."""
        coder = self._devices.coder_for(out)
        if coder is not None:
            from kvstore.codecs.predictive.kernels.blocks import decode_from

            with self._devices.watched(coder):
                if decode_from(coder, [info], [payload], [layer_sizes], [out]):
                    raise CodecError("predictive: the block is damaged, or the profile is another one")
                return
        target = out if out.on_cpu else buffer_on_cpu(out)
        wrong = _predict.decode(
            *(self._native, _tokens(info), info.start, info.count, payload, layer_sizes, target.rows, out.tokens),
            dtype=info.layout.dtype,
        )
        if wrong is not None:
            raise CodecError(wrong)
        if target is not out:
            target.copy_to(out)
            wait_for(tensor.device for tensor in out.tensors())

    def codes_on(self, device: torch.device) -> bool:
        """Return whether tensors on `device` (a GPU with its index) are coded there; see `Devices.coder`."""
        return self._devices.coder(device) is not None

    def codes_blocks_like(self, block: KVView) -> bool:
        """Return whether kernels code this block on the device that holds it."""
        return self._devices.coder_for(block) is not None

    def _tried(self, device: torch.device) -> Loaded | None:
        from kvstore.codecs.predictive.kernels.blocks import tried

        return tried(self.model, self._native, device)


def native_model(model: PredictiveModel) -> _predict.Model:
    """The same model for csrc/predictive/predictive.h."""
    parts = [part for pair in model.parts for part in pair]
    return _predict.Model(
        shapes=np.array([[x.heads, x.key_dim, x.value_dim] for x in model.layout.layers], np.int64),
        in_scale=[part.in_scale for part in parts],
        out_scale=[part.out_scale for part in parts],
        scale=[part.scale for part in parts],
        bias=[part.bias for part in parts],
        adapt=[part.adapt for part in parts],
        fix=[part.fix for part in parts],
        weight=[part.weight for part in parts],
        token_kv=model.token_kv,
        freqs=model.freqs,
        rope_fine=model.rope_fine,
        rope_coarse=model.rope_coarse,
    )


def _tokens(info: BlockInfo) -> npt.NDArray[np.int64]:
    return info.tokens.astype(np.int64)
