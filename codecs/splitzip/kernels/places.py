"""Where the tensors of a block are, as the kernels are told it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from kvstore.codecs.splitzip.reference import DTYPES
from kvstore.codecs.tensor_memory import TensorMemory, row_shapes
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Places:
    """The tensors of one or more blocks, K and V of each layer in turn, all on one device.

    addresses, heads, tokens, dims, head_strides, token_strides: int64 [2 * layers]; strides count values, the last
    dimension is contiguous.
    """

    addresses: Array
    heads: Array
    tokens: Array
    dims: Array
    head_strides: Array
    token_strides: Array
    dtype: str
    device: torch.device

    @classmethod
    def of_layers(cls, layers: Layers) -> Places:
        """Of (K, V) of `[heads, tokens, dim]` a layer. Raises `CodecError` where they are not all of one kind that is
        coded here."""
        tokens = _check(layers)
        tensors = [tensor for pair in layers for tensor in pair]
        found = TensorMemory(tensors).places
        assert found is not None
        heads, _, dims = np.array([tensor.shape for tensor in tensors], np.int64).T
        return cls._of(found, heads, dims, tokens, name_of(tensors[0].dtype), tensors[0].device)

    @classmethod
    def of_view(cls, view: KVView) -> Places | None:
        """Of a view on one device, without asking any tensor; None where the last dimension of one has gaps."""
        found = view.places
        if found is None:
            return None
        (device,), dtype = view.devices, view.layout.dtype
        _check_kind(dtype, device)
        heads, row_bytes = (x.astype(np.int64) for x in row_shapes(view.layout))
        return cls._of(found, heads, row_bytes // view.layout.item_bytes, view.tokens, dtype, device)

    @classmethod
    def _of(cls, found: Array, heads: Array, dims: Array, tokens: int, dtype: str, device: torch.device) -> Places:
        item = DTYPES[dtype][0]
        # The stride of a single token means nothing.
        token_strides = found[2] // item if tokens > 1 else dims
        all_tokens = np.full(len(heads), tokens, np.int64)
        return cls(found[0], heads, all_tokens, dims, found[1] // item, token_strides, dtype, device)

    @classmethod
    def of_blocks(cls, blocks: Sequence[Places]) -> Places:
        """Of several blocks, of one dtype and on one device, one after the other."""
        if len(blocks) == 1:
            return blocks[0]
        return cls(
            np.concatenate([block.addresses for block in blocks]),
            np.concatenate([block.heads for block in blocks]),
            np.concatenate([block.tokens for block in blocks]),
            np.concatenate([block.dims for block in blocks]),
            np.concatenate([block.head_strides for block in blocks]),
            np.concatenate([block.token_strides for block in blocks]),
            blocks[0].dtype,
            blocks[0].device,
        )

    @property
    def layers(self) -> int:
        """How many layers there are, of all blocks together."""
        return len(self.heads) // 2


def name_of(dtype: torch.dtype) -> str:
    """As layouts call it."""
    return str(dtype).removeprefix("torch.")


def _check(layers: Layers) -> int:
    """The tokens of every tensor. Raises `CodecError` where the tensors are not of one kind."""
    if not layers:
        raise CodecError("splitzip: no layers")
    first = layers[0][0]
    _check_kind(name_of(first.dtype), first.device)
    for keys, values in layers:
        if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
            raise CodecError(f"splitzip: expected [heads, tokens, dim], found {keys.shape} and {values.shape}")
        for tensor in (keys, values):
            if (tensor.dtype, tensor.device, tensor.shape[1]) != (first.dtype, first.device, first.shape[1]):
                raise CodecError("splitzip: the layers of a block differ in dtype, device or tokens")
            if tensor.stride(2) != 1 and tensor.shape[2] > 1:
                raise CodecError("splitzip: the last dimension must be contiguous")
    return first.shape[1]


def _check_kind(dtype: str, device: torch.device) -> None:
    if dtype not in DTYPES:
        raise CodecError(f"splitzip: tensors of torch.{dtype} are not coded on a device; code them on the CPU")
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise CodecError(f"splitzip: tensors on {device} are not coded by kernels; code them on the CPU")
