"""The levels of the exact predictor: blocks coded by csrc/levels/levels.h, or by the GPU that holds them.

Kernels code for a device (kernels/blocks.py) once it has shown that it writes the CPU's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import kvstore.codecs.predictive._levels as _levels
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.in_order import InOrder, Native
from kvstore.codecs.predictive.device_mode import DeviceMode
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.view import KVView

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.kernels.blocks import Loaded


class LevelMode(DeviceMode):
    """Codes blocks of the model's layout in one level, on the device that holds them or on the CPU. Thread-safe."""

    def __init__(self, model: LevelModel) -> None:
        super().__init__(model.layout)
        self.level, self._model = model.level, model
        self._native = native_model(model)

    def _encode_on_cpu(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[int, ...] | int | None:
        return _levels.encode(self._native, info.tokens, info.start, block.rows, out, limit)

    def _decode_on_cpu(
        self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView
    ) -> str | None:
        return _levels.decode(self._native, info.tokens, info.start, payload, layer_sizes, out.rows, out.tokens)

    def in_order(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> InOrder:
        block = _levels.in_order(self._native, info.tokens, info.start, payload, layer_sizes, out.rows, out.tokens)
        return Native(block, payload, out)

    def _tried(self, device: torch.device) -> Loaded | None:
        from kvstore.codecs.predictive.levels.kernels.blocks import tried

        return tried(self._model, self._native, device)


def native_model(model: LevelModel) -> _levels.Model:
    """The same model for csrc/levels/levels.h."""
    return _levels.Model(**native_arguments(model))


def native_arguments(model: LevelModel) -> dict[str, Any]:
    """What csrc/bindings/level_model.h makes a model of."""
    names = ("fix", "gain", "narrow", "shift", "bias", "scale", "adapt", "row", "weight")
    parts = []
    for number, pair in enumerate(model.parts):
        for part in pair:
            arrays = {name: getattr(part, name) for name in names}
            packed = [np.zeros(0, np.int8), *(group.reshape(-1) for group in part.groups)]
            arrays["groups"] = np.concatenate(packed) if number else None
            parts.append({name: None if x is None else np.ascontiguousarray(x) for name, x in arrays.items()})
    return {
        "level": model.level,
        "shapes": np.array([[x.heads, x.key_dim, x.value_dim] for x in model.layout.layers], np.int64),
        "parts": parts,
        "token_kv": model.token_kv,
        "freqs": model.freqs,
        "rope_fine": model.rope_fine,
        "rope_coarse": model.rope_coarse,
    }
