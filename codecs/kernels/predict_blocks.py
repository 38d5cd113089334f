"""Blocks of the store under the predictive codec, coded by the device that holds them: as blocks.py does for splitzip.

Every call returns when the device is done with it, and may be made by any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.codecs._predict import FALL_BACK
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.kernels.blocks import _LAUNCH, _beside, _readable, _writable
from kvstore.codecs.kernels.predict_gpu import DeviceModel, decode_blocks, encode_blocks
from kvstore.codecs.predictive_model import PredictiveModel
from kvstore.codecs.view import KVView


def load(model: PredictiveModel, device: torch.device) -> DeviceModel:
    """The model on a device (a GPU with its index)."""
    with _beside(device), _LAUNCH:
        return DeviceModel(model, device)


def encode_into(
    model: DeviceModel, info: BlockInfo, block: KVView, out: memoryview, limit: int
) -> tuple[int, ...] | int | None:
    """Codes a block into memory on the host and returns the bytes of its layers.

    None where `out`, shorter than `limit`, did not do; `_predict.FALL_BACK` where the block cannot be predicted or does
    not come to less than `limit` bytes.
    """
    if not model.can_code(info.count, info.start):
        return FALL_BACK
    with _beside(model.device):
        with _LAUNCH:
            most = min(limit, len(out) + 1)
            payload, (sizes,) = encode_blocks(model, [_readable(block)], [info.tokens], [info.start], [most])
        if sizes is None:
            return FALL_BACK if len(out) >= limit else None
        torch.from_numpy(np.frombuffer(out, np.uint8, payload.numel())).copy_(payload)
        return sizes


def decode_from(
    model: DeviceModel,
    infos: Sequence[BlockInfo],
    payloads: Sequence[memoryview],
    layer_sizes: Sequence[Sequence[int]],
    outs: Sequence[KVView],
) -> list[int]:
    """Decodes the first tokens of blocks from memory on the host into views on the model's device, all at once.

    Payloads may hold anything, but are as long as their layers say. Returns the numbers of blocks that are damaged, of
    whose views the contents are undefined.
    """
    targets = [_writable(out) for out in outs]
    host = torch.empty(sum(map(len, payloads)), dtype=torch.uint8, pin_memory=model.device.type == "cuda")
    begin = 0
    for payload in payloads:
        host.numpy()[begin : begin + len(payload)] = np.frombuffer(payload, np.uint8)
        begin += len(payload)
    with _beside(model.device):
        coded = host.to(model.device, non_blocking=True)
        tokens, starts = [info.tokens for info in infos], [info.start for info in infos]
        with _LAUNCH:
            status = decode_blocks(model, coded, layer_sizes, tokens, starts, targets)
        return torch.nonzero(status).flatten().tolist()  # waits
