"""Blocks of the store that were coded with loss, decoded by the device that wants them.

Every call returns when the device is done with it, and may be made by any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.launching import LAUNCH
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.predictive.kernels.device import Array, Tensor
from kvstore.codecs.predictive.lossy_kernels.device import DeviceLossyModel
from kvstore.codecs.predictive.lossy_kernels.launch import decode_block
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.splitzip.kernels.blocks import beside, writable
from kvstore.codecs.view import KVView

TRIAL_START = 2  # so that there are exact rows, too
_MOST = 1e4  # of a trial's values: larger ones would be escapes of escapes

Coded = tuple[bytes, tuple[int, ...]]


class LoadedLossy(DeviceLossyModel):
    """A lossy model on a device, for blocks of the store."""

    def send(self, array: Array) -> Tensor:
        # A profile's arrays are read-only, of which torch makes no tensor without a warning.
        return super().send(array if array.flags.writeable else array.copy())


def load(model: LossyModel, device: torch.device) -> LoadedLossy:
    """The model on a device (a GPU with its index)."""
    with beside(device):
        return LoadedLossy(model, device)


def tried(
    model: LossyModel,
    write: Callable[[BlockInfo, KVView], Coded | None],
    read: Callable[[BlockInfo, Coded, KVView], None],
    device: torch.device,
) -> LoadedLossy | None:
    """The model on a device that was seen to decode a block to the bits of the CPU's scalar loops (`read`); None for a
    device that does not. write: codes a block on the CPU."""
    try:
        found = load(model, device)
        return found if _agrees(found, model, write, read) else None
    except Exception:  # whatever the compiler and the driver raise: the CPU reads the same
        return None


def decode_from(
    model: LoadedLossy, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView
) -> bool:
    """Decodes the first tokens of a block from memory on the host into a view on the model's device.

    The payload may hold anything, but is as long as its layers say. Returns whether it is damaged: the contents of the
    view are undefined then. Raises `CodecError` for damage that shows on the host.
    """
    target = writable(out)
    with beside(model.device):
        with LAUNCH:
            wrong = decode_block(model, payload, layer_sizes, info.tokens, info.start, target)
        return bool(wrong)  # waits


# ---- the trial ---------------------------------------------------------------------------------------------------


def _agrees(
    device: LoadedLossy,
    model: LossyModel,
    write: Callable[[BlockInfo, KVView], Coded | None],
    read: Callable[[BlockInfo, Coded, KVView], None],
) -> bool:
    sampled, tensors = predict_blocks.sample(model.base)
    info = BlockInfo(sampled.layout, sampled.tokens, min(TRIAL_START, sampled.start))
    finite = [torch.where(t.float().abs() < _MOST, t, 0) for t in tensors]
    coded = write(info, _view(info, finite))
    if coded is None:
        return False
    right = [torch.zeros_like(tensor) for tensor in tensors]
    read(info, coded, _view(info, right))
    found = [torch.zeros_like(tensor, device=device.device) for tensor in tensors]
    if decode_from(device, info, memoryview(coded[0]), coded[1], _view(info, found)):
        return False
    pairs = zip(right, found, strict=True)
    return all(np.array_equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Array:
    found: Array = tensor.cpu().contiguous().view(torch.int16).numpy()
    return found


def _view(info: BlockInfo, tensors: list[Tensor]) -> KVView:
    return KVView.of_layers(info.layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
