"""rANS on the device: many streams at once, byte for byte those of `RansTables`.

No call waits for the device or moves anything between it and the host but `DeviceTables`, so that coding can be
captured in a CUDA graph. Kernels are compiled once for each prob_bits, never for a length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from kvstore.codecs.launching import on
from kvstore.codecs.rans.coder import RansTables
from kvstore.codecs.rans.kernels.decode import STATE_COLUMNS, decode_kernel
from kvstore.codecs.rans.kernels.encode import BAD_SYMBOL, NO_ROOM, encode_kernel
from kvstore.errors import CodecError

# A warp is 32 lanes; there are no floats to fuse, but triton warns where this is not said.
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
STATUS_BAD_SYMBOL: int = BAD_SYMBOL.value
STATUS_NO_ROOM: int = NO_ROOM.value


class DeviceTables:
    """A `RansTables` on a device. Takes 2 KiB and 8 (11 bits) or 16 KiB (12 bits) a table there."""

    def __init__(self, tables: RansTables, device: torch.device | str) -> None:
        slots, entries = _arrays(tables)
        self.prob_bits = tables.prob_bits
        self.count = tables.count
        # [tables, 2**prob_bits] and [tables, 256, 2] int32, bits as in csrc/rans/rans.h
        self.slots = torch.from_numpy(slots.view(np.int32)).to(device)
        self.entries = torch.from_numpy(entries.view(np.int32)).to(device)


@dataclass(frozen=True, eq=False)
class Encoded:
    """What `encode` made, all on the device, for n streams of p parts each.

    streams: `[n, 2]` int64, first byte in `out` and bytes of each; after: `[n, p]` int64, bytes of a stream that follow
    the words of each part; status: `[n]` int32, 0, or else STATUS_BAD_SYMBOL (a class without a table, a symbol of
    frequency 0) or STATUS_NO_ROOM, and the stream has no bytes.
    """

    streams: torch.Tensor
    after: torch.Tensor
    status: torch.Tensor


def encode(
    tables: DeviceTables,
    symbols: torch.Tensor,
    classes: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor,
    rooms: torch.Tensor,
) -> Encoded:
    """Codes n streams of p parts each, in one launch, without waiting for it.

    symbols, classes: uint8, of one length, contiguous; places: `[n, p, 2]` int64, (first, count) of each part in both,
    which the caller vouches for; count < 2**31 - 64. out: uint8, at an even address, mutated within the rooms only;
    rooms: `[n, 2]` int64, (first byte, bytes) of each stream's room, both even and below 2**31 bytes; 128 + 2 bytes a
    symbol always suffice. A stream ends where its room ends. Rooms must not overlap each other. Raises `CodecError`
    where tensors are not of these kinds.
    """
    count = _check(places, rooms, "rooms")
    _check_bytes(tables, symbols=symbols, classes=classes, out=out)
    if symbols.numel() != classes.numel():
        raise CodecError(f"rans: {symbols.numel()} symbols, but {classes.numel()} classes")
    done = Encoded(
        torch.empty(count, 2, dtype=torch.int64, device=out.device),
        torch.empty(count, places.shape[1], dtype=torch.int64, device=out.device),
        torch.empty(count, dtype=torch.int32, device=out.device),
    )
    if count:
        with on(out.device):
            encode_kernel[(count,)](
                symbols,
                classes,
                places,
                places.shape[1],
                tables.entries,
                tables.count,
                out,
                out.numel(),
                rooms,
                done.streams,
                done.after,
                done.status,
                BITS=tables.prob_bits,
                **OPTIONS,
            )
    return done


class DeviceDecoder:
    """Decodes n streams at once, part by part.

    payload: uint8, contiguous, at an even address; streams: `[n, 2]` int64, (first byte, bytes) of each in it, the
    first even. Both, and the tables, must stay as they are until all parts are decoded. Whatever they hold, nothing
    outside of `payload` is read. Raises `CodecError` where tensors are not of these kinds.
    """

    def __init__(self, tables: DeviceTables, payload: torch.Tensor, streams: torch.Tensor) -> None:
        _check_bytes(tables, payload=payload)
        _check_table(streams, "streams", 2)
        self._tables, self._payload, self._streams = tables, payload, streams
        self._state = torch.zeros(len(streams), STATE_COLUMNS.value, dtype=torch.int32, device=payload.device)

    def parts(self, classes: torch.Tensor, places: torch.Tensor, symbols: torch.Tensor) -> torch.Tensor:
        """The next p parts of each stream, in one launch, without waiting for it.

        classes, symbols: uint8, of one length, contiguous, which do not overlap; places: `[n, p, 2]` int64, (first,
        count) of each part in both, which the caller vouches for. `symbols` is mutated in these places.

        Returns int32 `[n]` on the device: 0 where these were the last parts and the stream is sound; symbols of other
        streams are undefined once all parts are decoded. Damage is noticed as by `RansTables.decode`: mostly.
        """
        count = _check(places, self._streams, "streams")
        _check_bytes(self._tables, classes=classes, symbols=symbols)
        if symbols.numel() != classes.numel():
            raise CodecError(f"rans: {symbols.numel()} symbols, but {classes.numel()} classes")
        status = torch.empty(count, dtype=torch.int32, device=symbols.device)
        if count:
            with on(symbols.device):
                decode_kernel[(count,)](
                    self._payload,
                    self._payload.numel(),
                    self._streams,
                    places,
                    places.shape[1],
                    self._tables.slots,
                    self._tables.count,
                    classes,
                    symbols,
                    self._state,
                    status,
                    BITS=self._tables.prob_bits,
                    **OPTIONS,
                )
        return status


def _arrays(tables: RansTables) -> tuple[np.ndarray[Any, np.dtype[np.uint32]], np.ndarray[Any, np.dtype[np.uint32]]]:
    """Slots and entries, see csrc/rans/rans.h; with each entry the reciprocal of its frequency."""
    freqs = tables.freqs.astype(np.uint32)
    offsets = freqs.cumsum(axis=1, dtype=np.uint32) - freqs
    used = np.maximum(freqs, 1)
    entries = np.stack(
        [(used - 1) | (offsets & 0xFFF) << 12 | (freqs == 0).astype(np.uint32) << 31, 0xFFFFFFFF // used]
    )
    number = np.broadcast_to(np.arange(freqs.shape[1], dtype=np.uint32), freqs.shape).ravel()
    symbol = np.repeat(number, freqs.ravel()).reshape(len(freqs), -1)
    first = np.take_along_axis(offsets, symbol.astype(np.intp), axis=1)
    slot = np.arange(symbol.shape[1], dtype=np.uint32)
    slots = symbol | (np.take_along_axis(freqs, symbol.astype(np.intp), axis=1) - 1) << 8 | (slot - first) << 20
    return np.ascontiguousarray(slots), np.ascontiguousarray(np.moveaxis(entries, 0, -1))


def _check(places: torch.Tensor, streams: torch.Tensor, name: str) -> int:
    """How many streams there are."""
    _check_table(places, "places", 3)
    _check_table(streams, name, 2)
    if len(places) != len(streams):
        raise CodecError(f"rans: places of {len(places)} streams, but {len(streams)} {name}")
    return len(places)


def _check_table(table: torch.Tensor, name: str, dims: int) -> None:
    if table.dtype != torch.int64 or table.dim() != dims or table.shape[-1] != 2 or not table.is_contiguous():
        raise CodecError(f"rans: {name}: expected contiguous int64 [{'streams, parts, 2'[-9 * (dims - 1) :]}]")


def _check_bytes(tables: DeviceTables, **arrays: torch.Tensor) -> None:
    for name, array in arrays.items():
        if array.dtype != torch.uint8 or array.dim() != 1 or not array.is_contiguous():
            raise CodecError(f"rans: {name}: expected contiguous uint8 of one dimension")
        if array.device != tables.slots.device:
            raise CodecError(f"rans: {name} on {array.device}, the tables on {tables.slots.device}")
        if array.device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise CodecError(f"rans: tensors on {array.device} are not coded by kernels; use RansTables")
        if name in ("payload", "out") and array.data_ptr() % 2:
            raise CodecError(f"rans: {name}: expected an even address")
