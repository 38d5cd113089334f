"""The tensors that `get` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.codecs import KVView
from kvstore.codecs.device import wait_for
from kvstore.codecs.groups import GroupedView, Snapshot
from kvstore.config import MIB
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.states import State
from kvstore.errors import ConfigError
from kvstore.tiers.buffers import SLAB_BYTES, BufferPool

# Up to this size the time to make and to describe tensors one by one is what a get takes; larger results are better
# made of tensors that can be freed one by one.
_AT_ONCE_BYTES = 8 * MIB
# From here on tensors that are made one by one lie in recycled memory, in pieces that are freed one by one: the C
# library may give memory back to the system as soon as it is free, and fresh memory is what a get takes longest for.
_RECYCLED_BYTES = 1 * MIB
_ALIGNMENT = 64


@dataclass(frozen=True)
class OutputBuffers:
    """Memory for a prefix, with undefined contents; `allocate` makes it.

    Attributes:
        tensors: per layer (K, V), each `[1, heads, capacity, dim]`; of a layer with a window, only the last tokens.
        view: of the tokens, without what is reserved behind them.
        memory: of all tensors, `[2 * layers, 1, heads, capacity, dim]`; None where each has its own.
    """

    tensors: KVLayers
    view: KVView
    memory: torch.Tensor | None = None

    @property
    def states(self) -> tuple[State, ...]:
        """The states at the end of the tokens; () if the layout has none."""
        return self.view.states

    @property
    def has_reserve(self) -> bool:
        """Whether anything is reserved behind the tokens."""
        return any(int(k.shape[2]) > self.view.tokens for k, _ in self.tensors)

    def layers(self, tokens: int) -> KVLayers:
        """Return the first `tokens` tokens of every tensor, without copying."""
        if all(k.shape[2] <= tokens for k, _ in self.tensors):
            return self.tensors
        if self.memory is not None:
            return _pairs(self.memory.narrow(3, 0, tokens).unbind())  # a slice of each tensor takes four times as long
        return tuple((k[:, :, :tokens], v[:, :, :tokens]) for k, v in self.tensors)


def allocate(
    layout: KVLayout,
    tokens: int,
    reserve: int,
    pool: BufferPool,
    device: torch.device | None = None,
    apart: bool = False,
) -> OutputBuffers:
    """Allocate memory for `tokens` tokens and `reserve` more.

    Args:
        pool: of ordinary memory, for large results on the CPU.
        device: where; None: on the CPU, pinned if there is CUDA.
        apart: give each tensor a storage of its own. A copy of one takes its whole storage along, and so what is not
            decoded yet of the others.

    Example:
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=8)
        >>> out = allocate(layout, tokens=3, reserve=5, pool=BufferPool(keep_bytes=0))
        >>> out.layers(3)[0][0].shape, out.has_reserve
        (torch.Size([1, 2, 3, 8]), True)
    """
    if layout.is_grouped:
        return _allocate_windowed(layout, tokens, reserve)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    pinned = device is None and torch.cuda.is_available()
    first = layout.layers[0]
    capacity = tokens + reserve
    nbytes = capacity * layout.bytes_per_token
    memory: torch.Tensor | None = None
    at_once = layout.is_uniform and device is None and not (pinned or apart)
    if at_once and nbytes <= _AT_ONCE_BYTES:
        shape = (2 * len(layout.layers), 1, first.heads, capacity, first.key_dim)
        memory = torch.empty(shape, dtype=dtype)
        tensors = _pairs(memory.unbind())
        view = KVView.packed(layout, capacity, memory.data_ptr(), memory)
    elif device is None and not pinned and nbytes >= _RECYCLED_BYTES:
        tensors, view = _recycled(layout, capacity, dtype, pool)
    else:
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
    return OutputBuffers(tensors, view.narrow(0, tokens) if reserve else view, memory)


def _pairs(flat: Sequence[torch.Tensor]) -> KVLayers:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _recycled(layout: KVLayout, capacity: int, dtype: torch.dtype, pool: BufferPool) -> tuple[KVLayers, KVView]:
    """Tensors with storages of their own, as many in one buffer as a slab of the pool has room for; and their view."""
    shapes = [(1, x.heads, capacity, dim) for x in layout.layers for dim in (x.key_dim, x.value_dim)]
    sizes = [heads * count * dim * layout.item_bytes for _, heads, count, dim in shapes]
    places = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes]
    flat: list[torch.Tensor] = []
    addresses: list[int] = []
    while len(flat) < len(shapes):
        end, total = len(flat) + 1, places[len(flat)]
        while end < len(shapes) and total + places[end] <= SLAB_BYTES:
            total += places[end]
            end += 1
        buffer, at = pool.take(total), 0
        memory, address = buffer.array(), buffer.address
        for number in range(len(flat), end):
            part = torch.from_numpy(memory[at : at + sizes[number]])
            flat.append(part.view(dtype).view(shapes[number]))
            addresses.append(address + at)
            at += places[number]
    # What is known of them need not be asked of each.
    return _pairs(flat), KVView.of_places(layout, capacity, addresses, flat)


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
    return OutputBuffers(tensors, GroupedView.of_cache(layout, held, tokens, snapshot=snapshot))


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
