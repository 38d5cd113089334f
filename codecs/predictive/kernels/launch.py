"""The lossless predictive codec on the device that holds the tensors: many blocks at once, the bytes of
csrc/predictive/predictive.h.

Parts of all blocks are coded together, one after the other: a part is predicted from those before. `decode_blocks` does
not wait for the device; `encode_blocks` waits once, for sizes. Neither may be called by two threads at once unless each
has a stream of its own; results are there when the current stream is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore.codecs.predictive.kernels.decode import finish_kernel, measure_kernel, read_kernel
from kvstore.codecs.predictive.kernels.device import Array, DeviceModel, DevicePart, Layers, Run, Tensor, on
from kvstore.codecs.predictive.kernels.encode import split_kernel
from kvstore.codecs.predictive.kernels.layers import Coded, Sections, assemble
from kvstore.codecs.predictive.reference import HEADER
from kvstore.codecs.rans.coder import RansTables
from kvstore.codecs.rans.kernels.launch import DeviceDecoder, encode
from kvstore.errors import CodecError

__all__ = ["DeviceModel", "decode_blocks", "encode_blocks"]


def decode_blocks(
    model: DeviceModel,
    payload: Tensor,
    sizes: Sequence[Sequence[int]],
    tokens: Sequence[Array],
    starts: Sequence[int],
    out: Sequence[Layers],
) -> Tensor:
    """Decodes blocks, whose payloads follow each other in `payload` (uint8, contiguous, on the model's device).

    sizes: bytes of the layers of each block; tokens: integers `[n]`, starts: position of the first; out: tensors of
    each block, mutated: of its first tokens as many as they have. Returns int32 `[blocks]` on the device: 0 where what
    was decoded is what was encoded. Whatever the payload holds, nothing outside of it is read, and nothing but `out`
    written; blocks of another status have undefined values. Raises `CodecError` where arguments do not fit each other.
    """
    layers = len(model.layout.layers)
    _check(sizes, tokens, starts, out)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise CodecError("predictive: expected a payload of contiguous uint8")
    if payload.device.type != model.device.type:
        raise CodecError(f"predictive: the payload is on {payload.device}, the model on {model.device}")
    if any(len(of) != layers or min(of) < 0 for of in sizes) or sum(map(sum, sizes)) > payload.numel():
        raise CodecError("predictive: the sizes do not fit the payload")
    for ids, pairs in zip(tokens, out, strict=True):
        if not 0 < pairs[0][0].shape[1] <= max(1, len(ids)):
            raise CodecError(f"predictive: a block of {len(ids)} tokens has tensors of {pairs[0][0].shape[1]}")
    chosen = [
        i for i in range(len(sizes)) if model.can_code(len(tokens[i]), starts[i]) and min(sizes[i]) >= HEADER.size
    ]
    with on(model.device):
        status = torch.ones(len(sizes), dtype=torch.int32, device=model.device)
        if not chosen:
            return status
        run = Run(model, [tokens[i] for i in chosen], [starts[i] for i in chosen], [out[i] for i in chosen])
        table = np.array(sizes, np.int64).reshape(len(sizes), layers)
        begins = np.cumsum(table).reshape(table.shape) - table
        sections = Sections(model, payload, begins[chosen], table[chosen])
        wrong = sections.wrong | _decode_parts(run, payload, sections)
        status[model.send(np.array(chosen, np.int64))] = wrong.int()
        return status


def _decode_parts(run: Run, payload: Tensor, sections: Sections) -> Tensor:
    """Bool [blocks]: which are damaged."""
    model, most = run.model, run.rows * max(run.model.widths)
    symbols, classes = torch.empty(2, most, dtype=torch.uint8, device=payload.device)
    values = torch.empty(most, dtype=torch.int16, device=payload.device)
    bad = torch.empty_like(run.raw_bits)
    decoder = DeviceDecoder(model.tables, sections.stream, sections.streams)
    spans = np.stack([run.ends - run.counts, run.counts], -1)[:, None]
    where = {width: model.send(spans * width) for width in set(model.widths)}
    status = torch.empty(0)
    for part in model.parts:
        count = run.rows * part.width
        run.predict(part, classes)
        status = decoder.parts(classes[:count], where[part.width], symbols[:count])
        of_part = (part.number, run.rows)
        of_payload = (payload, sections.table, run.block_of, run.firsts, symbols)
        left_open = (part.scale, run.offsets, run.raw_bits, run.escapes, bad, values)
        run.launch(
            measure_kernel,
            *(symbols, run.mu, part.scale, model.adapts, run.offsets, run.fits, run.raw_bits),
            *(*of_part, part.width),
        )
        run.launch(read_kernel, *of_payload, run.mu, *left_open, *of_part, run.blocks, part.width)
        run.launch(
            finish_kernel,
            *(*of_payload, run.escapes, values, run.places, run.sums, *_of_inputs(run, part), run.blocks, part.width),
            DIM=part.dim,
            ROTATE=part.rotated,
        )
    _, raw_bytes, _, escapes = sections.table.unbind(-1)
    wrong = ((run.totals(run.raw_bits) + 7) >> 3 != raw_bytes) | (run.totals(run.escapes) != escapes)
    wrong |= run.totals(bad) != 0
    return wrong.any(0) | (run.layer_sums() != sections.sums).any(0).any(0) | (status != 0)


def encode_blocks(
    model: DeviceModel,
    blocks: Sequence[Layers],
    tokens: Sequence[Array],
    starts: Sequence[int],
    limits: Sequence[int],
) -> tuple[Tensor, list[tuple[int, ...] | None]]:
    """Codes blocks; waits for the device once.

    tokens, starts: as in `decode_blocks`; limits: bytes that a block must come to less than. Returns the payloads one
    after the other, uint8 on the device, and the bytes of the layers of each block: None, and no payload, of those that
    cannot be predicted or do not stay below their limit. Raises `CodecError` where arguments do not fit each other.
    """
    _check(limits, tokens, starts, blocks)
    for ids, pairs in zip(tokens, blocks, strict=True):
        if pairs[0][0].shape[1] != len(ids):
            raise CodecError(f"predictive: a block of {len(ids)} tokens has tensors of {pairs[0][0].shape[1]}")
    chosen = [i for i in range(len(blocks)) if model.can_code(len(tokens[i]), starts[i])]
    found: list[tuple[int, ...] | None] = [None] * len(blocks)
    with on(model.device):
        if not chosen:
            return torch.empty(0, dtype=torch.uint8, device=model.device), found
        run = Run(model, [tokens[i] for i in chosen], [starts[i] for i in chosen], [blocks[i] for i in chosen])
        most = np.array([limits[i] for i in chosen], np.int64)
        payload, sizes = assemble(run, encode_parts(run, most), most)
    for i, of in zip(chosen, sizes, strict=True):
        found[i] = of
    return payload, found


def encode_parts(run: Run, limits: Array) -> Coded:
    model, parts = run.model, len(run.model.parts)
    widths = np.array(model.widths, np.int64)
    ends = np.cumsum(widths * run.rows)
    begins = ends - widths * run.rows
    symbols, classes = torch.empty(2, int(ends[-1]), dtype=torch.uint8, device=model.device)
    for part in model.parts:
        mine = slice(begins[part.number], ends[part.number])
        run.predict(part, classes[mine])
        run.launch(
            split_kernel,
            *(run.places, run.block_of, run.firsts, run.mu, part.scale, model.adapts, run.offsets, run.fits),
            *(symbols[mine], run.raw_bits, run.escapes, run.sums, *_of_inputs(run, part), run.blocks, part.width),
            DIM=part.dim,
            ROTATE=part.rotated,
        )
    spans = np.stack([run.ends - run.counts, run.counts], -1)[:, None] * widths[:, None]
    spans[..., 0] += begins
    values = run.counts * widths.sum()
    # A longer stream would not stay below the block's limit.
    rooms = np.minimum([RansTables.bound(int(count)) for count in values], np.maximum(limits, 0) + 1) // 2 * 2
    out = torch.empty(int(rooms.sum()), dtype=torch.uint8, device=model.device)
    table = model.send(np.stack([np.cumsum(rooms) - rooms, rooms], -1))
    done = encode(model.tables, symbols, classes, model.send(spans.reshape(run.blocks, parts, 2)), out, table)
    return Coded(symbols, [slice(a, b) for a, b in zip(begins, ends, strict=True)], out, done)


def _of_inputs(run: Run, part: DevicePart) -> tuple[Any, ...]:
    """What the kernels that make inputs take for it, and what comes next."""
    return (
        part.in_scale,
        part.to_fixed,
        run.cos,
        run.sin,
        run.inputs,
        run.model.input_stride,
        part.column,
        len(run.model.parts),
        part.number,
        run.rows,
    )


def _check(*lists: Sequence[Any]) -> None:
    if len({len(one) for one in lists}) != 1:
        raise CodecError("predictive: the lists differ in length")
