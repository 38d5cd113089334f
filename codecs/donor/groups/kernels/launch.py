"""The mode in groups on the device that holds the tensors: rows of many blocks at once, the bytes of
csrc/donor/groups.h.

As in the levels (../../../predictive/levels/kernels/launch.py), parts of all blocks are coded together, one after the
other. What is said there of waiting and of threads holds here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.codecs.donor.groups.kernels.decode import join_differences_kernel
from kvstore.codecs.donor.groups.kernels.device import DeviceGroupsModel, GroupRows, Rows
from kvstore.codecs.donor.groups.reference import LEAST_SHIFT, MOST_SHIFT
from kvstore.codecs.launching import on
from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.kernels.device import Array, Tensor
from kvstore.codecs.predictive.kernels.launch import places_of_parts
from kvstore.codecs.predictive.kernels.layers import Coded, Sections, assemble
from kvstore.codecs.predictive.levels.kernels.decode import FOUND
from kvstore.codecs.predictive.levels.kernels.launch import check_found, encode_groups
from kvstore.codecs.predictive.levels.model import GROUP
from kvstore.codecs.rans.kernels.decode import STATE_COLUMNS
from kvstore.errors import CodecError

__all__ = ["DeviceGroupsModel", "Rows", "can_code", "decode_blocks", "encode_blocks"]


def can_code(model: DeviceGroupsModel, rows: Rows) -> bool:
    """Whether the model knows these rows' positions, and there are some, and not too many."""
    most = int(rows.positions.max(initial=0))
    return model.can_code(len(rows.positions), 0) and int(rows.positions.min()) >= 0 and most < model.positions


def decode_blocks(
    model: DeviceGroupsModel, payload: Tensor, sizes: Sequence[Sequence[int]], blocks: Sequence[Rows]
) -> Tensor:
    """Decodes rows of blocks, whose payloads follow each other in `payload` (uint8, contiguous, on the model's device).

    sizes: bytes of the layers of each block; blocks: `block` of each is mutated. Returns int32 `[blocks]` on the
    device: 0 where what was decoded is what was encoded. Whatever the payload holds, nothing outside of it is read, and
    nothing but the blocks written; blocks of another status have undefined values. Raises `CodecError` where arguments
    do not fit each other.
    """
    layers = len(model.layout.layers)
    _check(model, blocks, sizes)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise CodecError("donor: expected a payload of contiguous uint8")
    if any(len(of) != layers or min(of) < 0 for of in sizes) or sum(map(sum, sizes)) > payload.numel():
        raise CodecError("donor: the sizes do not fit the payload")
    before = np.array([len(rows.positions) for rows in blocks], np.int64) + model.groups
    table = np.array(sizes, np.int64).reshape(len(sizes), layers)
    begins = np.cumsum(table).reshape(table.shape) - table
    firsts = begins[:, 0].copy()
    table[:, 0] -= before
    begins[:, 0] += before
    chosen = [i for i, least in enumerate(table.min(1, initial=1 << 62)) if least >= model.header_bytes]
    with on(model.device):
        status = torch.ones(len(sizes), dtype=torch.int32, device=model.device)
        if chosen:
            run = GroupRows(model, [blocks[i] for i in chosen])
            damaged = _take_before(run, payload, firsts[chosen])
            sections = Sections(model, payload, begins[chosen], table[chosen])
            wrong = damaged | sections.wrong | decode_parts(run, payload, sections)
            status[model.send(np.array(chosen, np.int64))] = wrong.int()
        return status


def decode_parts(run: GroupRows, payload: Tensor, sections: Sections) -> Tensor:
    """Bool [blocks]: which are damaged."""
    model, device = run.model, payload.device
    symbols, classes = torch.empty(2, run.rows * GROUP, dtype=torch.uint8, device=device)
    row_sizes = torch.empty(run.rows, dtype=torch.int32, device=device)
    state = torch.zeros(run.blocks, STATE_COLUMNS.value, dtype=torch.int32, device=device)
    status = torch.empty(run.blocks, dtype=torch.int32, device=device)
    found = torch.empty(FOUND.value, len(model.parts), run.blocks, dtype=torch.int32, device=device)
    for part in model.parts:
        run.donate(part)
        run.add_up(part)
        join_differences_kernel[(run.blocks,)](
            *(sections.stream, sections.stream.numel(), sections.streams, model.tables.slots, model.tables.count),
            *(state, status, payload, sections.table, run.firsts, run.places, found, row_sizes, classes, symbols),
            *(*run.of_differences(part), *run.numbers(part)),
            TILE=predict_device.TILE,
            BITS=model.tables.prob_bits,
            **run.constants(part),
        )
    return check_found(found, sections) | (status != 0)


def encode_blocks(
    model: DeviceGroupsModel, blocks: Sequence[Rows], limits: Sequence[int]
) -> tuple[Tensor, list[tuple[int, ...] | None]]:
    """Codes rows of blocks; waits for the device once.

    limits: bytes that the layers of a block must come to less than. Returns the payloads one after the other, uint8 on
    the device, and the bytes of the layers of each block: None, and no payload, of those that do not stay below their
    limit. Raises `CodecError` where arguments do not fit each other.
    """
    _check(model, blocks, limits)
    if any(rows.block[0][0].shape[1] != len(rows.positions) for rows in blocks):
        raise CodecError("donor: expected a position for each row of the block")
    with on(model.device):
        if not blocks:
            return torch.empty(0, dtype=torch.uint8, device=model.device), []
        most = np.array(limits, np.int64)
        run = GroupRows(model, blocks)
        return assemble(run, encode_parts(run, most), most)


def encode_parts(run: GroupRows, limits: Array) -> Coded:
    """The parts of a run's blocks as symbols and streams. limits: of the bytes of each block."""
    model, places = run.model, places_of_parts(run)
    symbols, classes = torch.empty(2, places[-1].stop, dtype=torch.uint8, device=model.device)
    mu = torch.empty(run.rows * max(model.widths), dtype=torch.int16, device=model.device)
    totals = torch.empty(run.blocks * max(model.widths), dtype=torch.float32, device=model.device)
    run.choose_shifts()
    for part, mine in zip(model.parts, places, strict=True):
        run.donate(part)
        run.add_up(part)
        run.split_differences(part, mu, totals, symbols[mine], classes[mine])
    return encode_groups(run, symbols, classes, places, limits)


def _take_before(run: GroupRows, payload: Tensor, firsts: Array) -> Tensor:
    """Reads shifts and corrections; bool [blocks]: where a shift is out of bounds. firsts: of each block's bytes."""
    model = run.model
    begins, counts = model.send(firsts), torch.diff(run.firsts)
    bytes_at = payload.view(torch.int8)
    shifts = bytes_at[begins[run.block_of.long()] + run.in_block]
    groups = torch.arange(model.groups, device=payload.device)
    run.take_before(shifts, bytes_at[(begins + counts)[:, None] + groups])
    return run.totals((shifts < LEAST_SHIFT) | (shifts > MOST_SHIFT)) != 0


def _check(model: DeviceGroupsModel, blocks: Sequence[Rows], *lists: Sequence[object]) -> None:
    if any(len(one) != len(blocks) for one in lists):
        raise CodecError("donor: the lists differ in length")
    if not all(can_code(model, rows) for rows in blocks):
        raise CodecError("donor: the model does not know the positions of the rows, or there are none, or too many")
