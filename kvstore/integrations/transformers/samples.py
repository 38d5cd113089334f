"""A few elements of every tensor of a model, read fast enough to be asked for before every answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import kvstore.codecs._native as _native

_ELEMENTS = 4  # of a tensor: each is a miss of the cache


class Samples:
    """Where the elements lie that are read of some tensors, evenly spread. Keeps no tensor alive.

    Elements on the CPU are read where they lie, with one call; of other devices torch gathers them, and each is waited
    for once.

    Args:
        tensors: of a model. They must have memory of their own.

    Example:
        >>> tensors = [torch.arange(7, dtype=torch.int16)]
        >>> Samples(tensors).read(tensors)[0].view(torch.int16)
        tensor([0, 2, 4, 6], dtype=torch.int16)
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        rows: list[tuple[int, int, int, int]] = []  # address, bytes from one to the next, how many, bytes of one
        self._others: list[tuple[int, int, int]] = []  # number of the tensor, how many, elements from one to the next
        for number, tensor in enumerate(tensors):
            count = tensor.numel()
            few = min(_ELEMENTS, count) if tensor.is_contiguous() else min(1, count)
            step = max(1, (count - 1) // max(1, few - 1))
            if few and is_plain(tensor):
                size = tensor.element_size()
                rows.append((tensor.data_ptr(), step * size, few, size))
            elif few:
                self._others.append((number, few, step))
        addresses, steps, counts, sizes = np.array(rows, np.int64).reshape(-1, 4).T
        lengths = counts * sizes
        # As rows of keys are described: each element is one of a head of its own.
        self._rows = np.stack([addresses, steps, sizes])
        self._places = np.stack([np.cumsum(lengths) - lengths, sizes, sizes])
        self._counts, self._sizes = counts.astype(np.uint32), sizes.astype(np.uint32)
        self._nbytes = int(lengths.sum())

    @torch.no_grad()
    def read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elements, uint8 on the CPU: of the CPU's tensors, then of the others' for each device and dtype.

        tensors: those that it was made of; nothing of them but their values may have changed since.
        """
        near = np.empty(self._nbytes, np.uint8)
        if self._nbytes:
            places = self._places.copy()
            places[0] += near.ctypes.data
            _native.copy_rows(places, self._rows, self._counts, self._sizes, 1)
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for number, few, step in self._others:
            tensor = tensors[number]
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.as_strided((few,), (step,)))
        return [torch.from_numpy(near), *(torch.cat(parts).view(torch.uint8).cpu() for parts in groups.values())]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor lie in memory of the CPU as its shape and strides say."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cpu:
        return False
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= needed
