"""The layers of a payload, on the device: cut up where they are decoded, put together where they are coded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.kernels.copy import copy_kernel
from kvstore.codecs.predictive.kernels.device import OPTIONS, Array, DeviceLinearModel, Rows, Tensor
from kvstore.codecs.rans.kernels.launch import Encoded

COPIERS = 16  # programs that copy one piece


class Sections:
    """Where the pieces of layers are, and the words of each block's layers as one stream.

    begins, sizes: int64 [blocks, layers] of layers in payload, none shorter than a header. Pieces that do not lie in
    their layer are taken for empty, and `wrong`, bool [blocks], says so.
    """

    def __init__(self, model: DeviceLinearModel, payload: Tensor, begins: Array, sizes: Array) -> None:
        blocks, layers = sizes.shape
        rooms = (sizes.sum(1) + 1) // 2 * 2
        begin, size, room, shifts = map(model.send, (begins, sizes, np.cumsum(rooms) - rooms, np.arange(0, 32, 8)))
        header = model.header_bytes
        at = begin[..., None] + torch.arange(header, device=payload.device)
        fields = (payload[at].long().view(blocks, layers, header // 4, 4) << shifts).sum(-1)
        *mode, raw_k, raw_v, escapes_k, escapes_v, a, b = fields.unbind(-1)
        words = size - header - raw_k - raw_v - 2 * (escapes_k + escapes_v)
        broken = words < 0
        if mode:
            broken |= mode[0] != model.mode
        self.wrong = broken.any(1)
        raw_k, raw_v, escapes_k, escapes_v, words = (
            x.masked_fill(broken, 0) for x in (raw_k, raw_v, escapes_k, escapes_v, words)
        )
        self.sums = torch.stack([a, b]).transpose(1, 2)  # [2, layers, blocks]
        raw = begin + header
        escapes = raw + raw_k + raw_v
        of_k = torch.stack([raw, raw_k, escapes, escapes_k], -1)
        of_v = torch.stack([raw + raw_k, raw_v, escapes + 2 * escapes_k, escapes_v], -1)
        # [parts, blocks, SECTION_COLUMNS]
        self.table = torch.stack([of_k, of_v], 2).permute(1, 2, 0, 3).reshape(2 * layers, blocks, 4).contiguous()
        target = room[:, None] + words.cumsum(1) - words
        pieces = torch.stack([escapes + 2 * (escapes_k + escapes_v), target, words], -1).view(-1, 3)
        self.stream = torch.empty(int(rooms.sum()), dtype=torch.uint8, device=payload.device)
        self.streams = torch.stack([room, words.sum(1)], -1)
        _copy(payload, self.stream, pieces)


@dataclass(frozen=True, eq=False)
class Coded:
    """What blocks were coded to: symbols of all parts, which are of each part, rANS streams and where they are."""

    symbols: Tensor
    parts: list[slice]
    words: Tensor
    streams: Encoded


def assemble(run: Rows, coded: Coded, limits: Array) -> tuple[Tensor, list[tuple[int, ...] | None]]:
    """The payloads one after the other, and the bytes of the layers of each block; None, and none of the payload, of
    those that do not stay below their limit (int64 [blocks]). Waits for the device."""
    model = run.model
    sums_of_rows = run.totals(run.raw_bits), run.totals(run.escapes), run.layer_sums()
    known = fetch_arrays(*sums_of_rows, *_of_streams(coded.streams))
    raw_bits, escapes, sums, first, after, status = known
    raw = (raw_bits + 7) // 8  # [parts, blocks]
    ends = (first[:, 1:] - after)[:, run.last_of_layers]  # of the words of each layer in their stream
    words = np.diff(ends, axis=1, prepend=0)
    fields = [raw[::2], raw[1::2], escapes[::2], escapes[1::2]]
    mode = [] if model.mode is None else [np.full_like(raw[::2], model.mode)]
    header, size = np.stack([*mode, *fields, *sums], -1), model.header_bytes
    sizes = size + (np.stack(fields, -1) * (1, 1, 2, 2)).sum(-1).T + words  # [blocks, layers]
    before, count_before = run.before
    sizes[:, 0] += count_before
    kept = (status == 0) & (sizes.sum(1) < limits)

    sizes_kept = np.where(kept[:, None], sizes, 0)
    begins = (np.cumsum(sizes_kept) - sizes_kept.reshape(-1)).reshape(sizes.shape)
    heads = begins.copy()  # where layers' headers begin
    heads[:, 0] += count_before
    place = heads.T + size  # [layers, blocks]
    raw_at = np.stack([place, place + raw[::2]], 1).reshape(raw.shape)
    place = place + raw[::2] + raw[1::2]
    escapes_at = np.stack([place, place + 2 * escapes[::2]], 1).reshape(raw.shape)
    words_at = (place + 2 * (escapes[::2] + escapes[1::2])).T
    packed = np.where(kept, (raw_bits + 31) // 32, 0)
    packed_at = (np.cumsum(packed) - packed.reshape(-1)).reshape(raw.shape)

    payload = torch.empty(int(sizes_kept.sum()), dtype=torch.uint8, device=model.device)
    bits = torch.zeros(int(packed.sum()) + 1, dtype=torch.int32, device=model.device)
    targets = model.send(np.where(kept[:, None], np.stack([packed_at, escapes_at], -1), -1))
    for part, mine in zip(model.parts, coded.parts, strict=True):
        run.pack(part, coded.symbols[mine], targets, bits, payload)
    headers = model.send(header.transpose(1, 0, 2).astype("<u4").view(np.uint8).reshape(-1))
    numbers = size * np.arange(sizes.size).reshape(sizes.shape)
    for source, begin, target, count in (
        (bits.view(torch.uint8), 4 * packed_at, raw_at, np.where(kept, raw, 0)),
        (headers, numbers, heads, np.where(kept[:, None], np.full_like(sizes, size), 0)),
        (before, np.cumsum(count_before) - count_before, begins[:, 0], np.where(kept, count_before, 0)),
        (coded.words, first[:, :1] + ends - words, words_at, np.where(kept[:, None], words, 0)),
    ):
        _copy(source, payload, model.send(np.stack([begin, target, count], -1).reshape(-1, 3)))
    found = [tuple(of) if keep else None for of, keep in zip(sizes.tolist(), kept.tolist(), strict=True)]
    return payload, found


def _of_streams(streams: Encoded) -> tuple[Tensor, Tensor, Tensor]:
    return streams.streams, streams.after, streams.status


def fetch_arrays(*tensors: Tensor) -> list[Array]:
    """All as int64, by one copy."""
    flat = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return [x.reshape(t.shape) for x, t in zip(np.split(flat, ends[:-1]), tensors, strict=True)]


def _copy(source: Tensor, target: Tensor, pieces: Tensor) -> None:
    """pieces: int64 [n, 3], first byte in each and how many bytes."""
    copy_kernel[(len(pieces), COPIERS)](source, target, pieces, TILE=predict_device.TILE, **OPTIONS)
