"""The tensors of a put on their way to another process of the same user.

The owner copies them straight out of the memory of the process that puts, where the system lets it (`memory`).
Otherwise that process copies them into anonymous memory that is sealed, so that nobody can change it, and the owner
encodes from there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.core.layout import ITEM_BYTES, KVLayout
from kvstore.core.prepared import PreparedCache
from kvstore.core.states import pack, unpack
from kvstore.shared.memory import Part, read_memory
from kvstore.tiers.buffers import Buffer

_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MOST_PARTS = 512  # of one call of pwritev
_MOST_STATES = 1 << 32


@dataclass(frozen=True)
class Shipment:
    """Tensors as they are to lie in one piece of memory. Immutable; keeps the tensors.

    Attributes:
        told: what the other process has to know.
        places: offset, address and bytes of each run, the offsets rising: for `fetch` in another process while this one
            waits.
        kept: what the addresses lie in.
    """

    told: dict[str, Any]
    places: list[list[int]]
    kept: list[Any]

    @classmethod
    def of(cls, cache: PreparedCache, first: int) -> Shipment:
        """Lay out the tensors of a cache from token `first` on; 0 if layers have windows. Copies what is on a device.

        Raises:
            UnsupportedCache: a state has a dtype that is not stored.
        """
        tensors, places, kept, end = list[Any](), list[list[int]](), list[Any](), 0
        for tensor in (x for pair in cache.layers for x in pair):
            rows = _rows_behind_each_other(tensor[:, first:] if first else tensor)
            heads, count, dim = rows.shape
            nbytes, step = count * dim * rows.element_size(), rows.stride(0) * rows.element_size()
            tensors.append([str(rows.dtype).removeprefix("torch."), [heads, count, dim], end])
            runs = ((0, heads * nbytes),) if step == nbytes else tuple((head, nbytes) for head in range(heads))
            address = rows.data_ptr()
            places += [[end + head * nbytes, address + head * step, size] for head, size in runs if size]
            kept.append(rows)
            end = -(-(end + heads * nbytes) // _ALIGNMENT) * _ALIGNMENT
        states = np.frombuffer(pack(cache.states), np.uint8) if cache.states else np.zeros(0, np.uint8)
        if len(states):
            places.append([end, int(states.ctypes.data), len(states)])
        told = {"tensors": tensors, "states": [end, len(states)], "size": end + len(states)}
        return cls(told, places, [*kept, states])

    def sealed(self) -> int:
        """Return the descriptor of sealed memory that holds it, which the caller has to close.

        Raises:
            OSError: there is no memory for it.
        """
        fd = os.memfd_create("kvstore-put", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self.told["size"])
            _write(fd, [(offset, _bytes_at(address, nbytes)) for offset, address, nbytes in self.places])
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _rows_behind_each_other(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, the tokens of each head one behind the other; a copy only where they are not."""
    rows = tensor.cpu()
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _write(fd: int, parts: list[tuple[int, memoryview]]) -> None:
    """Writes parts, each at its place; neighbours with one call."""
    i = 0
    while i < len(parts):
        offset, run = parts[i][0], [parts[i][1]]
        end = offset + len(run[0])
        while i + len(run) < len(parts) and parts[i + len(run)][0] == end and len(run) < _MOST_PARTS:
            run.append(parts[i + len(run)][1])
            end += len(run[-1])
        written = os.pwritev(fd, run, offset)
        while written < end - offset:  # memory runs out with an error; this is for signals
            written += os.pwrite(fd, b"".join(run)[written:], offset + written)
        i += len(run)


Received = tuple[list[tuple[torch.Tensor, torch.Tensor]], Any]


def unship(fd: int, told: dict[str, Any]) -> Received:
    """Return the layers and the states in sealed memory; they keep it. The descriptor stays open.

    Raises:
        ValueError: what was told does not fit the memory, or the memory can still be changed.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("shipment: the memory is not sealed")
    if _size(told) != os.fstat(fd).st_size:
        raise ValueError("shipment: the memory has another size")
    places, states = _places(told)
    if not _size(told):
        return [], ()
    memory = mmap.mmap(fd, _size(told), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return _pairs(torch.frombuffer(memory, dtype=torch.uint8), places, states)


def fetch(pid: int, told: dict[str, Any], layout: KVLayout, tokens: int, take: Callable[[int], Buffer]) -> Received:
    """Copy the layers and the states out of the memory of another process, which waits meanwhile.

    Args:
        told: with `Shipment.places` under "places".
        layout, tokens: of the cache: no more memory is taken than it needs.
        take: gives the memory to copy into.

    Raises:
        ValueError: what was told does not fit together, or the layout.
        OSError: the memory cannot be read.
    """
    places, states = _places(told)
    rows, size = told.get("places"), _size(told)
    most = tokens * layout.bytes_per_token + _ALIGNMENT * len(places) + states[1]
    if not isinstance(rows, list) or size > most:
        raise ValueError("shipment: more than the cache of these tokens takes")
    parts, end = list[Part](), 0
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not all(map(_is_size, row)) or not end <= row[0] <= size:
            raise ValueError("shipment: a place is malformed")
        parts.append(Part(*row))
        end = row[0] + row[2]
    wanted = sum(_nbytes(dtype, shape) for dtype, shape, _ in places) + states[1]
    if end > size or sum(part.nbytes for part in parts) != wanted:
        raise ValueError("shipment: the places do not cover the tensors")
    if not size:
        return [], ()
    buffer = take(size)
    read_memory(pid, parts, buffer.address)
    return _pairs(torch.from_numpy(np.asarray(_Held(buffer))), places, states)


class _Held:
    """The bytes of a buffer as an array that keeps the buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "data": (buffer.address, False),
            "shape": (len(buffer.view),),
            "typestr": "|u1",
            "version": 3,
        }


_Place = tuple[torch.dtype, tuple[int, int, int], int]


def _pairs(memory: torch.Tensor, places: list[_Place], states: tuple[int, int]) -> Received:
    tensors = [memory[at : at + _nbytes(dtype, shape)].view(dtype).view(shape) for dtype, shape, at in places]
    begin, count = states
    found = unpack(memoryview(memory[begin : begin + count].numpy().data)) if count else ()
    return list(zip(tensors[::2], tensors[1::2], strict=True)), found


def _places(told: dict[str, Any]) -> tuple[list[_Place], tuple[int, int]]:
    """The tensors and the states, which lie within the memory."""
    rows, size = told.get("tensors"), _size(told)
    if not isinstance(rows, list) or len(rows) % 2:
        raise ValueError("shipment: expected K and V of each layer")
    begin, count = told.get("states") or (0, 0)
    if not (_is_size(begin) and _is_size(count) and begin + count <= size and count <= _MOST_STATES):
        raise ValueError("shipment: the states lie outside of the memory")
    return [_place(row, size) for row in rows], (begin, count)


def _place(row: Any, size: int) -> _Place:
    try:
        name, shape, offset = row
        heads, tokens, dim = shape
    except (TypeError, ValueError) as error:
        raise ValueError("shipment: a tensor is malformed") from error
    if name not in ITEM_BYTES or not all(map(_is_size, (heads, tokens, dim, offset))) or offset % _ALIGNMENT:
        raise ValueError("shipment: a tensor is malformed")
    dtype: torch.dtype = getattr(torch, name)
    if offset + _nbytes(dtype, (heads, tokens, dim)) > size:
        raise ValueError("shipment: a tensor lies outside of the memory")
    return dtype, (heads, tokens, dim), offset


def _nbytes(dtype: torch.dtype, shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2] * dtype.itemsize


def _size(told: dict[str, Any]) -> int:
    size = told.get("size")
    if not _is_size(size):
        raise ValueError("shipment: expected its size")
    return int(size)  # type: ignore[arg-type]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48
