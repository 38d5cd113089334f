"""The exact mode of the predictive codec: blocks coded by csrc/predictive/predictive.h, or by the GPU that holds them.

The words of fp32 and fp16 (codecs/words.py) are coded as bf16 is, by csrc/predictive/wide.h, on the CPU; so are those
of float8, by csrc/predictive/float8/float8.h, but that bins are codes. Kernels code for a device (kernels/blocks.py)
once it has shown that it writes the CPU's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import kvstore.codecs.predictive._predict as _predict
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.in_order import InOrder, Native
from kvstore.codecs.predictive.device_mode import DeviceMode
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.view import KVView

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.kernels.blocks import Loaded


class ExactMode(DeviceMode):
    """Codes blocks exactly, on the device that holds them or on the CPU. Thread-safe."""

    def __init__(self, model: PredictiveModel) -> None:
        super().__init__(model.layout)
        self.model = model
        self._lock = Lock()  # guards _made
        self._made: _predict.Model | None = None

    @property
    def _native(self) -> _predict.Model:
        """Made when it is first needed: a codec whose records are all of levels needs none."""
        with self._lock:
            if self._made is None:
                self._made = native_model(self.model)
            return self._made

    def _encode_on_cpu(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[int, ...] | int | None:
        dtype = info.layout.dtype
        return _predict.encode(self._native, _tokens(info), info.start, block.rows, out, limit, dtype=dtype)

    def _decode_on_cpu(
        self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView
    ) -> str | None:
        return _predict.decode(
            *(self._native, _tokens(info), info.start, info.count, payload, layer_sizes, out.rows, out.tokens),
            dtype=info.layout.dtype,
        )

    def in_order(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> InOrder | None:
        if info.layout.dtype != "bfloat16":
            return None
        block = _predict.in_order(self._native, _tokens(info), info.start, payload, layer_sizes, out.rows, out.tokens)
        return Native(block, payload, out)

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
