"""The levels of the exact predictor on the device that holds the tensors: many blocks at once, the bytes of
csrc/levels/levels.h.

As in the first mode (../../kernels/launch.py), parts of all blocks are coded together, one after the other. A launch
makes the sums of a part, and one goes over all of its groups. What is said there of waiting and of threads holds here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.codecs.predictive.kernels import launch as predict_launch
from kvstore.codecs.predictive.kernels.device import Array, Layers, Tensor
from kvstore.codecs.predictive.kernels.launch import Passes, encode_streams, places_of_parts
from kvstore.codecs.predictive.kernels.layers import Coded, Sections
from kvstore.codecs.predictive.levels.kernels.decode import BAD, ESCAPED, FOUND, RAW_BITS, SUM, WEIGHTED, join_kernel
from kvstore.codecs.predictive.levels.kernels.device import DeviceLevelModel, LevelRows
from kvstore.codecs.predictive.levels.model import GROUP, group_sizes
from kvstore.codecs.rans.kernels.decode import STATE_COLUMNS

__all__ = ["DeviceLevelModel", "decode_blocks", "encode_blocks"]


def decode_blocks(
    model: DeviceLevelModel,
    payload: Tensor,
    sizes: Sequence[Sequence[int]],
    tokens: Sequence[Array],
    starts: Sequence[int],
    out: Sequence[Layers],
) -> Tensor:
    """As `predict_launch.decode_blocks`, of blocks that were coded in the model's level."""
    return predict_launch.decode_blocks(model, payload, sizes, tokens, starts, out, LEVELS)


def encode_blocks(
    model: DeviceLevelModel,
    blocks: Sequence[Layers],
    tokens: Sequence[Array],
    starts: Sequence[int],
    limits: Sequence[int],
) -> tuple[Tensor, list[tuple[int, ...] | None]]:
    """As `predict_launch.encode_blocks`, in the model's level."""
    return predict_launch.encode_blocks(model, blocks, tokens, starts, limits, LEVELS)


def decode_parts(run: LevelRows, payload: Tensor, sections: Sections) -> Tensor:
    """Bool [blocks]: which are damaged."""
    model, device = run.model, payload.device
    symbols, classes = torch.empty(2, run.rows * GROUP, dtype=torch.uint8, device=device)
    row_sizes = torch.empty(run.rows, dtype=torch.int32, device=device)
    state = torch.zeros(run.blocks, STATE_COLUMNS.value, dtype=torch.int32, device=device)
    status = torch.empty(run.blocks, dtype=torch.int32, device=device)
    found = torch.empty(FOUND.value, len(model.parts), run.blocks, dtype=torch.int32, device=device)
    for part in model.parts:
        run.add_up(part)
        join_kernel[(run.blocks,)](
            *(sections.stream, sections.stream.numel(), sections.streams, model.tables.slots, model.tables.count),
            *(state, status, payload, sections.table, run.firsts, run.places, found, row_sizes, classes, symbols),
            *(*run.of_groups(part), run.cos, run.sin, run.p, run.mu, run.values, *run.of_inputs(part)),
            *run.numbers(part),
            TILE=predict_device.TILE,
            BITS=model.tables.prob_bits,
            **run.constants(part),
        )
    return check_found(found, sections) | (status != 0)


def check_found(found: Tensor, sections: Sections) -> Tensor:
    """Bool [blocks]: of which blocks not all values are what was encoded. found: see `join_kernel`."""
    _, raw_bytes, _, escapes = sections.table.unbind(-1)
    wrong = ((found[RAW_BITS.value].long() + 7) >> 3 != raw_bytes) | (found[ESCAPED.value] != escapes)
    wrong |= found[BAD.value] != 0
    sums = found[SUM.value : WEIGHTED.value + 1].long()
    differ = (sums[:, ::2] + sums[:, 1::2]) & 0xFFFFFFFF != sections.sums
    return wrong.any(0) | differ.any(0).any(0)


def encode_parts(run: LevelRows, limits: Array) -> Coded:
    """As `predict_launch.encode_parts`."""
    model, places = run.model, places_of_parts(run)
    symbols, classes = torch.empty(2, places[-1].stop, dtype=torch.uint8, device=model.device)
    for part, mine in zip(model.parts, places, strict=True):
        run.add_up(part)
        run.split(part, symbols[mine], classes[mine])
    return encode_groups(run, symbols, classes, places, limits)


def encode_groups(run: LevelRows, symbols: Tensor, classes: Tensor, places: list[slice], limits: Array) -> Coded:
    """Symbols of all parts as streams. symbols, classes: group after group; places: see `places_of_parts`."""
    groups = [
        (mine.start + GROUP * number * run.rows, size)
        for part, mine in zip(run.model.parts, places, strict=True)
        for number, size in enumerate(group_sizes(part.width))
    ]
    begins, widths = np.array(groups, np.int64).T
    spans = np.stack([run.ends - run.counts, run.counts], -1)[:, None] * widths[:, None]
    spans[..., 0] += begins
    return encode_streams(run, symbols, classes, places, spans, limits)


LEVELS = Passes(LevelRows, decode_parts, encode_parts)
