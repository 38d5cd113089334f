"""Recurrent and convolution states of a cache at one position, and their bytes (FORMAT.md, "States").

Pure: tensors in, bytes out, and back. What is read is checked before memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<HHB")  # place, number, flags
_SHAPE = struct.Struct("<BB")  # dtype, dimensions
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e5m2", "float8_e4m3fn")
_ITEMS = (2, 2, 4, 8, 1, 1)
_PREVIOUS, _CONV, _RECURRENT = 1, 2, 4
_MOST_ENTRIES, _MOST_DIMENSIONS = 1 << 16, 8


@dataclass(frozen=True)
class State:
    """One of the states of a layer. The tensors are a copy that nobody writes into.

    Attributes:
        place: number of the layer in the model's cache.
        number: of the state in its layer, from 0.
        has_previous: what transformers' `has_previous_state` says of it.
        conv, recurrent: the tensors, any shape; None where the layer has none.

    Example:
        >>> State(place=0, number=0, has_previous=True).conv is None
        True
    """

    place: int
    number: int
    has_previous: bool
    conv: torch.Tensor | None = None
    recurrent: torch.Tensor | None = None

    def to(self, device: Any) -> State:
        """Return the same on a device."""
        moved = (None if x is None else x.to(device) for x in (self.conv, self.recurrent))
        return State(self.place, self.number, self.has_previous, *moved)


def pack(states: Iterable[State]) -> bytes:
    """Return states as bytes. Their tensors may be on any device.

    Raises:
        ValueError: a tensor has a dtype that is not stored.
    """
    import torch

    heads, data, count = [], [], 0
    for state in states:
        tensors = [x for x in (state.conv, state.recurrent) if x is not None]
        flags = _PREVIOUS * state.has_previous + _CONV * (state.conv is not None)
        heads.append(_ENTRY.pack(state.place, state.number, flags + _RECURRENT * (state.recurrent is not None)))
        for tensor in tensors:
            name = str(tensor.dtype).removeprefix("torch.")
            if name not in _DTYPES:
                raise ValueError(f"states: tensors of dtype {name} are not stored")
            heads.append(_SHAPE.pack(_DTYPES.index(name), tensor.ndim) + struct.pack(f"<{tensor.ndim}I", *tensor.shape))
            data.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        count += 1
    return b"".join([_COUNT.pack(count), *heads, *data])


def unpack(data: memoryview) -> tuple[State, ...]:
    """Read what `pack` wrote.

    Raises:
        ValueError: the bytes are no states.

    Example:
        >>> unpack(memoryview(pack([State(3, 0, True)])))[0].place
        3
    """
    try:
        shapes, begin = _heads(data)
    except struct.error as error:
        raise ValueError(f"states: cut short ({error})") from error
    sizes = [[_ITEMS[kind] * int(np.prod(shape, dtype=object)) for kind, shape in tensors] for *_, tensors in shapes]
    if begin + sum(map(sum, sizes)) != len(data):
        raise ValueError(f"states: the tensors take {sum(map(sum, sizes))} bytes, found {len(data) - begin}")
    states = []
    for place, number, flags, tensors in shapes:
        made = []
        for kind, shape in tensors:
            made.append(_tensor(data[begin:], kind, shape))
            begin += made[-1].nbytes
        conv = made.pop(0) if flags & _CONV else None
        states.append(State(place, number, bool(flags & _PREVIOUS), conv, made.pop() if made else None))
    return tuple(states)


def item_bytes(data: memoryview) -> int:
    """Return the bytes of an item of the dtype that takes the largest share of what `pack` wrote."""
    taken = dict.fromkeys(_ITEMS, 0)
    for *_, tensors in _heads(data)[0]:
        for kind, shape in tensors:
            taken[_ITEMS[kind]] += _ITEMS[kind] * int(np.prod(shape, dtype=object))
    return max(taken, key=lambda size: taken[size])


def _heads(data: memoryview) -> tuple[list[tuple[int, int, int, list[tuple[int, tuple[int, ...]]]]], int]:
    """(place, number, flags, dtype and shape of each tensor) of each state, and where the tensors begin."""
    (count,), begin = _COUNT.unpack_from(data), _COUNT.size
    if count > _MOST_ENTRIES:
        raise ValueError(f"states: expected at most {_MOST_ENTRIES}, found {count}")
    found = []
    for _ in range(count):
        place, number, flags = _ENTRY.unpack_from(data, begin)
        begin += _ENTRY.size
        tensors = []
        for _ in range(bool(flags & _CONV) + bool(flags & _RECURRENT)):
            kind, dimensions = _SHAPE.unpack_from(data, begin)
            if kind >= len(_DTYPES) or dimensions > _MOST_DIMENSIONS:
                raise ValueError("states: a tensor of an unknown dtype, or of too many dimensions")
            shape = struct.unpack_from(f"<{dimensions}I", data, begin + _SHAPE.size)
            begin += _SHAPE.size + 4 * dimensions
            tensors.append((kind, shape))
        found.append((place, number, flags, tensors))
    return found, begin


def _tensor(data: memoryview, kind: int, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, _DTYPES[kind]))
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    array[:] = np.frombuffer(data, np.uint8, array.nbytes)
    return tensor
