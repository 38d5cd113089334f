"""The levels of the exact predictor on the CPU: blocks coded by csrc/levels/levels.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvstore.codecs.predictive._levels as _levels
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, wait_for
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError


class LevelMode:
    """Codes blocks of the model's layout in one level, on the CPU. Immutable and thread-safe."""

    def __init__(self, model: LevelModel) -> None:
        self.level = model.level
        self._native = native_model(model)

    def encode(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[KVView, tuple[int, ...] | int | None]:
        """As `ExactMode.encode`."""
        view = block if block.on_cpu else copy_on_cpu(block)
        return view, _levels.encode(self._native, info.tokens, info.start, view.rows, out, limit)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """As `ExactMode.decode`."""
        target = out if out.on_cpu else buffer_on_cpu(out)
        wrong = _levels.decode(self._native, info.tokens, info.start, payload, layer_sizes, target.rows, out.tokens)
        if wrong is not None:
            raise CodecError(wrong)
        if target is not out:
            target.copy_to(out)
            wait_for(tensor.device for tensor in out.tensors())


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
