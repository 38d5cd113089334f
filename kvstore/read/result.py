"""The tensors that `get` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from kvstore.codecs import KVView
from kvstore.codecs.device import wait_for
from kvstore.codecs.groups import GroupedView, Snapshot
from kvstore.codecs.tensor_memory import row_shapes
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.states import State
from kvstore.errors import ConfigError
from kvstore.read._tensors import capsules
from kvstore.tiers.buffers import SLAB_BYTES, BufferPool

_ALIGNMENT = 64
# DLPack's codes of numbers, and their bits. Others are made as bytes.
_DLPACK = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32)}
_BYTES = (1, 8)


class _Memory:
    """Memory of a pool for all tensors of a result on the CPU, in pieces that are freed when no tensor lies in them any
    more: the C library may give memory back to the system as soon as it is free, and fresh memory is what a get takes
    longest for. Immutable.

    Attributes:
        capacity: tokens that it has room for.
    """

    def __init__(self, layout: KVLayout, capacity: int, pool: BufferPool) -> None:
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._layout, self.capacity = layout, capacity
        pieces, places = _plan(layout, capacity)
        buffers = [pool.take(nbytes) for _, _, nbytes in pieces]
        starts = [np.int64(buffer.address) for buffer in buffers]
        self._addresses = places + np.repeat(starts, [end - first for first, end, _ in pieces])
        self._pieces = [(first, end, buffer) for (first, end, _), buffer in zip(pieces, buffers, strict=True)]

    def view(self) -> KVView:
        """Return a view of all of it."""
        return KVView.of_places(self._layout, self.capacity, self._addresses, self._pieces)

    def layers(self, tokens: int) -> KVLayers:
        """Return tensors of the first `tokens` tokens, each with a storage of its own."""
        heads, row_bytes = row_shapes(self._layout)
        code = _DLPACK.get(self._dtype)
        widths = row_bytes if code is None else row_bytes // np.uint32(self._layout.item_bytes)
        flat: list[torch.Tensor] = []
        for first, end, buffer in self._pieces:
            these = slice(first, end)
            shapes = heads[these], widths[these], self.capacity, tokens
            # Not by torch's views, which let go of Python's lock at every tensor: other threads take it then.
            made = capsules(buffer, self._addresses[these], *shapes, *(code or _BYTES))
            flat += map(from_dlpack, made)
        return _pairs(flat if code is not None else [tensor.view(self._dtype) for tensor in flat])


@lru_cache(maxsize=64)
def _plan(layout: KVLayout, capacity: int) -> tuple[list[tuple[int, int, int]], npt.NDArray[np.int64]]:
    """Pieces of memory for all tensors, and where in its piece each begins. A piece: first and behind the last tensor,
    and bytes, of which a slab of the pool has room for so many."""
    heads, row_bytes = row_shapes(layout)
    sizes = heads.astype(np.int64) * row_bytes * capacity
    padded = (-(-sizes // _ALIGNMENT) * _ALIGNMENT).tolist()
    pieces: list[tuple[int, int, int]] = []
    places: list[int] = []
    while len(places) < len(padded):
        first, end = len(places), len(places) + 1
        total = padded[first]
        while end < len(padded) and total + padded[end] <= SLAB_BYTES:
            total += padded[end]
            end += 1
        places += accumulate(padded[first : end - 1], initial=0)
        pieces.append((first, end, total))
    return pieces, np.array(places, np.int64)


@dataclass(frozen=True)
class OutputBuffers:
    """Memory for a prefix, with undefined contents; `allocate` makes it.

    Attributes:
        view: of the tokens, without what is reserved behind them.
        memory: of all tensors; None where each has its own.
        own: the tensors where each has its own memory.
    """

    view: KVView
    memory: _Memory | None = None
    own: KVLayers = ()

    @property
    def tensors(self) -> KVLayers:
        """Per layer (K, V), each `[1, heads, capacity, dim]`; of a layer with a window, only the last tokens."""
        return self.own if self.memory is None else self.memory.layers(self.memory.capacity)

    @property
    def states(self) -> tuple[State, ...]:
        """The states at the end of the tokens; () if the layout has none."""
        return self.view.states

    @property
    def has_reserve(self) -> bool:
        """Whether anything is reserved behind the tokens."""
        if self.memory is not None:
            return self.memory.capacity > self.view.tokens
        return any(int(k.shape[2]) > self.view.tokens for k, _ in self.own)

    def layers(self, tokens: int) -> KVLayers:
        """Return the first `tokens` tokens of every tensor, without copying."""
        if self.memory is not None:
            return self.memory.layers(min(tokens, self.memory.capacity))
        if all(k.shape[2] <= tokens for k, _ in self.own):
            return self.own
        return tuple((k[:, :, :tokens], v[:, :, :tokens]) for k, v in self.own)


def allocate(
    layout: KVLayout, tokens: int, reserve: int, pool: BufferPool, device: torch.device | None = None
) -> OutputBuffers:
    """Allocate memory for `tokens` tokens and `reserve` more.

    Args:
        pool: of ordinary memory, for results on the CPU.
        device: where; None: on the CPU, pinned if there is CUDA.

    Example:
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=8)
        >>> out = allocate(layout, tokens=3, reserve=5, pool=BufferPool(keep_bytes=0))
        >>> out.layers(3)[0][0].shape, out.has_reserve
        (torch.Size([1, 2, 3, 8]), True)
    """
    if layout.is_grouped:
        return _allocate_windowed(layout, tokens, reserve)
    capacity, pinned = tokens + reserve, device is None and torch.cuda.is_available()
    if device is None and not pinned:
        memory = _Memory(layout, capacity, pool)
        view = memory.view()
        return OutputBuffers(view.narrow(0, tokens) if reserve else view, memory)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    tensors = tuple(
        (
            torch.empty((1, x.heads, capacity, x.key_dim), dtype=dtype, device=device, pin_memory=pinned),
            torch.empty((1, x.heads, capacity, x.value_dim), dtype=dtype, device=device, pin_memory=pinned),
        )
        for x in layout.layers
    )
    view = KVView.of_layers(layout, [(k[0], v[0]) for k, v in tensors], checked=True)
    if device is not None:
        # What runs on this stream may still use memory that torch hands out again, and decoding is on another stream.
        wait_for([device])
    return OutputBuffers(view.narrow(0, tokens) if reserve else view, own=tensors)


def _pairs(flat: Sequence[torch.Tensor]) -> KVLayers:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _allocate_windowed(layout: KVLayout, tokens: int, reserve: int) -> OutputBuffers:
    """On the CPU; nothing is reserved behind layers with windows."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    pairs = []
    for x in layout.layers:
        capacity = tokens - x.first_kept(tokens) if x.window else tokens + reserve
        shapes = ((1, x.heads, capacity, dim) for dim in (x.key_dim, x.value_dim))
        pairs.append(tuple(torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available()) for shape in shapes))
    tensors: KVLayers = tuple((k, v) for k, v in pairs)
    held = tuple((k[0, :, :tokens], v[0, :, :tokens]) for k, v in tensors)
    snapshot = Snapshot() if layout.states else None
    return OutputBuffers(GroupedView.of_cache(layout, held, tokens, snapshot=snapshot), own=tensors)


def to_device(layers: KVLayers, device: Any) -> KVLayers:
    """Return the same tensors on `device`; None: as they are. Starts all copies before it waits for the first."""
    if is_on_cpu(device):
        return layers
    moved = tuple((k.to(device, non_blocking=True), v.to(device, non_blocking=True)) for k, v in layers)
    wait_for([torch.device(device)])
    return moved


def is_on_cpu(device: Any) -> bool:
    """Return whether `device` is the CPU, as None is.

    Raises:
        ValueError: `device` is not a torch device.

    Example:
        >>> is_on_cpu(None), is_on_cpu("cuda:0")
        (True, False)
    """
    return device is None or _device(device).type == "cpu"


def check_device(device: Any) -> None:
    """Check that tensors can be made on `device`.

    Raises:
        ConfigError: this machine has no such device, or torch was built without it.
        ValueError: `device` is not a torch device.
    """
    if is_on_cpu(device) or device in _usable:
        return
    try:
        if _device(device).type == "meta":
            raise RuntimeError("its tensors have no contents")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device: {str(device)!r} cannot be used here: {reason}; name another one, or omit it for the CPU"
        ) from error
    _usable.add(device)


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device: {device!r} is not a torch device; use "cpu" or "cuda:0": {error}') from error


_usable: set[Any] = set()  # devices that were tried: a try costs a call of the driver
