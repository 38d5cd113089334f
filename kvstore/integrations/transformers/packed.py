"""What quantised layers keep of their weights besides tensors: packed tuples, scales, dtypes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch

from kvstore.errors import UnsupportedModel


def unpack(name: str, value: Any, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """Return what of a module's state is no tensor, as plain values for JSON; the tensors inside are appended.

    Raises:
        UnsupportedModel: nothing is known of a value of this type.

    Example:
        >>> tensors = []
        >>> unpack("layer.packed", (torch.ones(2), None, torch.qint8), tensors)
        ['layer.packed.0', None, 'torch.qint8']
        >>> tensors[0][0]
        'layer.packed.0'
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append((name, _plain(value.detach())))
        return [name, *_scales(name, value.detach(), tensors)] if value.is_quantized else name
    if isinstance(value, tuple | list):
        return [unpack(f"{name}.{i}", part, tensors) for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        return [[str(key), unpack(f"{name}.{key}", part, tensors)] for key, part in value.items()]
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, bytes | bytearray | BytesIO):
        data = value.getvalue() if isinstance(value, BytesIO) else value
        return hashlib.sha256(data).hexdigest()
    raise UnsupportedModel(
        f"{name}: holds a {type(value).__module__}.{type(value).__qualname__}, of which is not known what it does to "
        "caches; load the model with weights that are tensors"
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.int_repr() if tensor.is_quantized else tensor


def _scales(name: str, tensor: torch.Tensor, tensors: list[tuple[str, torch.Tensor]]) -> list[Any]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [tensor.q_scale(), tensor.q_zero_point()]
    tensors.append((f"{name}.scales", tensor.q_per_channel_scales()))
    tensors.append((f"{name}.zero_points", tensor.q_per_channel_zero_points()))
    return [tensor.q_per_channel_axis()]
