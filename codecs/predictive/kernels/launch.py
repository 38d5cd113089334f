"""The lossless predictive codec on the device that holds the tensors: many blocks at once, the bytes of
csrc/predictive/predictive.h.

Parts of all blocks are coded together, one after the other: a part is predicted from those before. `decode_blocks` does
not wait for the device; `encode_blocks` waits once, for sizes. Neither may be called by two threads at once unless each
has a stream of its own; results are there when the current stream is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.codecs.launching import on
from kvstore.codecs.predictive.kernels.decode import finish_kernel, measure_kernel, read_kernel
from kvstore.codecs.predictive.kernels.device import (
    Array,
    DeviceLinearModel,
    DeviceModel,
    DevicePart,
    Layers,
    Rows,
    Run,
    Tensor,
)
from kvstore.codecs.predictive.kernels.encode import split_kernel
from kvstore.codecs.predictive.kernels.layers import Coded, Sections, assemble
from kvstore.codecs.predictive.reference import HEADER
from kvstore.codecs.rans.coder import RansTables
from kvstore.codecs.rans.kernels.launch import DeviceDecoder, encode
from kvstore.errors import CodecError

__all__ = ["DeviceModel", "decode_blocks", "encode_blocks"]


class Passes(NamedTuple):
    """How the parts of blocks are coded in one mode."""

    begin: Callable[..., Rows]
    decode_parts: Callable[..., Tensor]
    encode_parts: Callable[..., Coded]


def decode_blocks(
    model: DeviceLinearModel,
    payload: Tensor,
    sizes: Sequence[Sequence[int]],
    tokens: Sequence[Array],
    starts: Sequence[int],
    out: Sequence[Layers],
    passes: Passes | None = None,
) -> Tensor:
    """Decodes blocks, whose payloads follow each other in `payload` (uint8, contiguous, on the model's device).

    sizes: bytes of the layers of each block; tokens: integers `[n]`, starts: position of the first; out: tensors of
    each block, mutated: of its first tokens as many as they have; passes: of the model's mode, `EXACT` by default.
    Returns int32 `[blocks]` on the device: 0 where what was decoded is what was encoded. Whatever the payload holds,
    nothing outside of it is read, and nothing but `out` written; blocks of another status have undefined values.
    Raises `CodecError` where arguments do not fit each other.
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
        passes = passes or EXACT
        here = ([of[i] for i in chosen] for of in (tokens, starts, out))
        run = passes.begin(model, *here)
        table = np.array(sizes, np.int64).reshape(len(sizes), layers)
        begins = np.cumsum(table).reshape(table.shape) - table
        sections = Sections(model, payload, begins[chosen], table[chosen])
        wrong = sections.wrong | passes.decode_parts(run, payload, sections)
        status[model.send(np.array(chosen, np.int64))] = wrong.int()
        return status


def decode_parts(run: Run, payload: Tensor, sections: Sections) -> Tensor:
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
    model: DeviceLinearModel,
    blocks: Sequence[Layers],
    tokens: Sequence[Array],
    starts: Sequence[int],
    limits: Sequence[int],
    passes: Passes | None = None,
) -> tuple[Tensor, list[tuple[int, ...] | None]]:
    """Codes blocks; waits for the device once.

    tokens, starts, passes: as in `decode_blocks`; limits: bytes that a block must come to less than. Returns the
    payloads one after the other, uint8 on the device, and the bytes of the layers of each block: None, and no payload,
    of those that cannot be predicted or do not stay below their limit. Raises `CodecError` where arguments do not fit
    each other.
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
        passes = passes or EXACT
        here = ([of[i] for i in chosen] for of in (tokens, starts, blocks))
        run = passes.begin(model, *here)
        most = np.array([limits[i] for i in chosen], np.int64)
        payload, sizes = assemble(run, passes.encode_parts(run, most), most)
    for i, of in zip(chosen, sizes, strict=True):
        found[i] = of
    return payload, found


def encode_parts(run: Run, limits: Array) -> Coded:
    """The parts of a run's blocks as symbols and streams. limits: of the bytes of each block."""
    model, places = run.model, places_of_parts(run)
    symbols, classes = torch.empty(2, places[-1].stop, dtype=torch.uint8, device=model.device)
    for part, mine in zip(model.parts, places, strict=True):
        run.predict(part, classes[mine])
        run.launch(
            split_kernel,
            *(run.places, run.block_of, run.firsts, run.mu, part.scale, model.adapts, run.offsets, run.fits),
            *(symbols[mine], run.raw_bits, run.escapes, run.sums, *_of_inputs(run, part), run.blocks, part.width),
            DIM=part.dim,
            ROTATE=part.rotated,
        )
    widths = np.array(model.widths, np.int64)
    spans = np.stack([run.ends - run.counts, run.counts], -1)[:, None] * widths[:, None]
    spans[..., 0] += [mine.start for mine in places]
    return encode_streams(run, symbols, classes, places, spans, limits)


def places_of_parts(run: Rows) -> list[slice]:
    """Where the symbols of each part are: one part of all rows after the other."""
    ends = np.cumsum(np.array(run.model.widths, np.int64) * run.rows).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def encode_streams(
    run: Rows, symbols: Tensor, classes: Tensor, places: list[slice], spans: Array, limits: Array
) -> Coded:
    """spans: int64 [blocks, parts of a stream, 2]: where symbols of each part of each stream begin, and how many."""
    model = run.model
    # A longer stream would not stay below the block's limit.
    bounds = [RansTables.bound(int(count)) for count in run.counts * sum(model.widths)]
    rooms = np.minimum(bounds, np.maximum(limits, 0) + 1) // 2 * 2
    out = torch.empty(int(rooms.sum()), dtype=torch.uint8, device=model.device)
    table = model.send(np.stack([np.cumsum(rooms) - rooms, rooms], -1))
    done = encode(model.tables, symbols, classes, model.send(spans), out, table)
    return Coded(symbols, places, out, done)


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


EXACT = Passes(Run, decode_parts, encode_parts)
