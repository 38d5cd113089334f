"""Blocks of the store, coded in a level by the device that holds them: models for ../../kernels/blocks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import kvstore.codecs.predictive._levels as _levels
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.predictive.kernels.blocks import FetchedRows, Loaded
from kvstore.codecs.predictive.kernels.device import Array, Layers, Tensor
from kvstore.codecs.predictive.kernels.layers import Coded
from kvstore.codecs.predictive.levels.kernels.device import DeviceLevelModel, LevelRows
from kvstore.codecs.predictive.levels.kernels.launch import decode_blocks, encode_parts
from kvstore.codecs.predictive.levels.model import LevelModel, LevelPart
from kvstore.codecs.splitzip.kernels.blocks import beside
from kvstore.codecs.view import KVView


def load(model: LevelModel, device: torch.device) -> Loaded:
    """The model on a device (a GPU with its index)."""
    with beside(device):
        return _LoadedLevel(model, device)


def tried(model: LevelModel, native: _levels.Model, device: torch.device) -> Loaded | None:
    """As `predict_blocks.tried`."""

    def write(info: BlockInfo, view: KVView, room: memoryview) -> tuple[int, ...] | int | None:
        return _levels.encode(native, info.tokens, info.start, view.rows, room)

    return predict_blocks.tried_on(lambda: load(model, device), sample(model), write)


def sample(model: LevelModel) -> tuple[BlockInfo, list[Tensor]]:
    """As `predict_blocks.sample`."""
    return predict_blocks.sample_of(model, [_spread(part) for pair in model.parts for part in pair])


def _spread(part: LevelPart) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Standard deviations of the values, float64 [C], as 8-bit inputs that reach five of them say."""
    # What the gain leaves of 16 bits, at least a 256th.
    most: np.ndarray[tuple[int], np.dtype[np.float64]] = 25 * np.minimum(2.0**15 / np.maximum(part.gain, 1), 256)
    spread: np.ndarray[tuple[int], np.dtype[np.float64]] = most / np.exp2(part.fix.astype(np.float64))
    return spread


class _FetchedLevels(FetchedRows, LevelRows):
    pass


class _LoadedLevel(Loaded, DeviceLevelModel):
    def begin(self, tokens: Sequence[Array], starts: Sequence[int], blocks: Sequence[Layers]) -> FetchedRows:
        return _FetchedLevels(self, tokens, starts, blocks)

    def encode_parts(self, run: LevelRows, limits: Array) -> Coded:
        return encode_parts(run, limits)

    def decode_blocks(self, *arguments: Any) -> Tensor:
        return decode_blocks(self, *arguments)
