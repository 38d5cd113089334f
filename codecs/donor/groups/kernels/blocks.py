"""Members of the store, coded against their donors by the device that holds them.

Donors are on the CPU, where their cache is: their rows go to the device in one copy. Every call returns when the device
is done with it, and may be made by any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor.groups.kernels.device import DeviceGroupsModel, GroupRows, Rows
from kvstore.codecs.donor.groups.kernels.launch import can_code, decode_blocks, encode_parts
from kvstore.codecs.donor.spans import GROUPS, Span, SpanTable
from kvstore.codecs.launching import LAUNCH, on
from kvstore.codecs.predictive.kernels.blocks import FetchedRows
from kvstore.codecs.predictive.kernels.device import Array, Layers, Tensor
from kvstore.codecs.predictive.kernels.layers import assemble
from kvstore.codecs.predictive.levels.kernels.blocks import sample
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.splitzip.kernels.blocks import beside, readable, writable
from kvstore.codecs.view import KVView
from kvstore.core.rope import can_code_moved
from kvstore.errors import CodecError

TRIAL_SHIFT = 7
_NOISE = 1 / 64  # of a trial's values, that the donor has not
Written = Callable[[BlockInfo, KVView, SpanTable, Sequence[KVView], memoryview], "tuple[int, ...] | None"]


class LoadedGroups(DeviceGroupsModel):
    """A model of differences on a device, for blocks of the store."""

    def send(self, array: Array) -> Tensor:
        # A profile's arrays are read-only, of which torch makes no tensor without a warning.
        return super().send(array if array.flags.writeable else array.copy())


class _FetchedGroups(FetchedRows, GroupRows):
    pass


def load(model: LevelModel, device: torch.device) -> LoadedGroups:
    """The model on a device (a GPU with its index)."""
    with beside(device):
        return LoadedGroups(model, device)


def tried(model: LevelModel, write: Written, device: torch.device) -> LoadedGroups | None:
    """The model on a device that was seen to code a block to the bytes of the CPU (`write`) and back; None for a device
    that does not. Nothing else is asked of it before blocks of the store depend on it."""
    try:
        found = load(model, device)
        return found if _agrees(found, model, write) else None
    except Exception:  # whatever the compiler and the driver raise: the CPU writes the same bytes
        return None


def encode_into(
    model: LoadedGroups, info: BlockInfo, block: KVView, table: SpanTable, donors: Sequence[KVView], out: memoryview
) -> tuple[int, ...] | None:
    """Codes the rows of a block that are in spans into memory on the host; returns the bytes of its layers.

    block: on the model's device; donors: the rows of each span, on the CPU. Both have K in pairs. None where `out` is
    too small. Raises `CodecError` where the model does not know the positions, or the block is not of its shapes.
    """
    most = np.array([len(out) + 1], np.int64)
    with beside(model.device), on(model.device):
        layers = [(_taken(k, table.spans), _taken(v, table.spans)) for k, v in readable(block)]
        rows = _rows_of(model, info, table, donors, layers)
        if not can_code(model, rows):
            raise CodecError("donor: the model does not know the positions of the rows, or there are too many")
        with LAUNCH:
            run = _FetchedGroups(model, [rows])
            coded = encode_parts(run, most)
        coded = replace(coded, streams=run.fetch(coded.streams))  # waits
        with LAUNCH:
            payload, (sizes,) = assemble(run, coded, most)
        if sizes is not None:
            torch.from_numpy(np.frombuffer(out, np.uint8, payload.numel())).copy_(payload)  # waits
        return sizes


def decode_from(
    model: LoadedGroups,
    info: BlockInfo,
    payload: memoryview,
    layer_sizes: Sequence[int],
    table: SpanTable,
    donors: Sequence[KVView],
    out: KVView,
) -> bool:
    """Decodes the rows in spans from memory on the host into a view on the model's device, as far as it has them.

    The payload may hold anything, but is as long as its layers say. Returns whether it is damaged: the contents of the
    rows are undefined then.
    """
    targets = [tensor for pair in writable(out) for tensor in pair]
    with beside(model.device), on(model.device):
        coded = torch.from_numpy(np.array(payload, np.uint8)).to(model.device)
        made = [torch.empty(t.shape[0], table.covered(), t.shape[2], dtype=t.dtype, device=t.device) for t in targets]
        rows = _rows_of(model, info, table, donors, list(zip(made[::2], made[1::2], strict=True)))
        with LAUNCH:
            status = decode_blocks(model, coded, [layer_sizes], [rows])
        for target, values in zip(targets, made, strict=True):
            at = 0
            for span in table.spans:
                wanted = max(0, min(span.end, target.shape[1]) - span.start)
                target[:, span.start : span.start + wanted].copy_(values[:, at : at + wanted])
                at += span.count
        return bool(status.any())  # waits


def _taken(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """The rows in spans: a view if there is one span."""
    pieces = [tensor[:, span.start : span.end] for span in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _rows_of(model: LoadedGroups, info: BlockInfo, table: SpanTable, donors: Sequence[KVView], layers: Layers) -> Rows:
    positions = np.concatenate([np.arange(span.start, span.end) for span in table.spans]) + info.start
    turns = np.repeat(np.array(table.which, np.int32), [span.count for span in table.spans])
    return Rows(positions, layers, _sent(model, info, donors), table.angles, turns)


def _sent(model: LoadedGroups, info: BlockInfo, donors: Sequence[KVView]) -> Layers:
    """The rows of donors on the device, one span's behind the other's."""
    shapes = [(x.heads, dim) for x in info.layout.layers for dim in (x.key_dim, x.value_dim)]
    count, pinned = sum(view.tokens for view in donors), model.device.type == "cuda"
    host = torch.empty(count * info.layout.bytes_per_token // 2, dtype=torch.bfloat16, pin_memory=pinned)
    ends = np.cumsum([heads * count * dim for heads, dim in shapes]).tolist()
    places = list(zip([0, *ends], ends, shapes, strict=False))
    there = [host[begin:end].view(heads, count, dim) for begin, end, (heads, dim) in places]
    whole, at = KVView.of_layers(info.layout, list(zip(there[::2], there[1::2], strict=True))), 0
    for view in donors:
        view.copy_to(whole.narrow(at, view.tokens))
        at += view.tokens
    sent = host.to(model.device)  # waits, so that the memory may go
    found = [sent[begin:end].view(heads, count, dim) for begin, end, (heads, dim) in places]
    return list(zip(found[::2], found[1::2], strict=True))


# ---- the trial ---------------------------------------------------------------------------------------------------


def _agrees(device: LoadedGroups, model: LevelModel, write: Written) -> bool:
    """Of two spans, one of them rotated where keys can be, with a gap between."""
    info, tensors = sample(model)
    count = info.count
    first, rotated = count // 2, info.layout.rope != "none" and can_code_moved(info.layout)
    spans = [Span(0, first - 1, 0, 0, 0), Span(first, count - first, 1, 0, TRIAL_SHIFT * rotated)]
    table = SpanTable.of(info.layout, spans, GROUPS)
    generator = torch.Generator().manual_seed(0)
    near = [(t.float() * (1 + _NOISE * torch.randn(t.shape, generator=generator))).bfloat16() for t in tensors]
    whole = _view(info, near)
    donors = [whole.narrow(span.start, span.count) for span in spans]
    view = _view(info, tensors)
    room = memoryview(bytearray(4 * view.nbytes + (1 << 16)))  # as of the levels
    sizes = write(info, view, table, donors, room)
    if sizes is None:
        return False
    right = room[: sum(sizes)]
    found = memoryview(bytearray(len(right)))
    there = [tensor.to(device.device) for tensor in tensors]
    if encode_into(device, info, _view(info, there), table, donors, found) != sizes or found != right:
        return False
    back = [torch.zeros_like(tensor) for tensor in there]
    if decode_from(device, info, right, sizes, table, donors, _view(info, back)):
        return False
    pairs, rows = zip(tensors, back, strict=True), np.r_[0 : first - 1, first:count]
    return all(torch.equal(a.view(torch.int16)[:, rows], b.cpu().view(torch.int16)[:, rows]) for a, b in pairs)


def _view(info: BlockInfo, tensors: list[Tensor]) -> KVView:
    return KVView.of_layers(info.layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
