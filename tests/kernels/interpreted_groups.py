"""The kernels of the donor codec's mode in groups in triton's interpreter, against the reference and the CPU:
`interpreted_groups.py GROUP...`."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import donorblocks
import donorcases
import groupcases
import kernelgroups
import numpy as np
import pytest
import torch
from donorcases import Shapes, case_of
from length import FULL as AT_LENGTH

from kvstore.codecs import KVView
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.device import copy_on_cpu
from kvstore.codecs.donor import codec as donor_codec
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.groups.kernels import blocks as group_blocks
from kvstore.codecs.donor.groups.kernels import device as groups_device
from kvstore.codecs.donor.groups.kernels import launch
from kvstore.codecs.donor.groups.kernels.device import DeviceGroupsModel, Rows
from kvstore.codecs.donor.groups.mode import GroupsMode, native_coder
from kvstore.codecs.donor.groups.model import model_of_section
from kvstore.codecs.donor.spans import SpanTable
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.pairs import order_of
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.predictive.kernels import device as predict_device
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.errors import CodecError

PLENTY = 1 << 40
CPU = torch.device("cpu")
Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Many:
    """Blocks of one model, and what the reference makes of them."""

    model: Any
    device: DeviceGroupsModel
    cases: list[donorcases.Case]
    coded: list[list[bytes]]

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(map(len, layers)) for layers in self.coded]


def make(shapes: Shapes, rope: bool, level: int, kinds: Sequence[str], counts: Sequence[int], seed: int) -> Many:
    model = groupcases.model_of(shapes, rope, level, seed)
    cases = [case_of(shapes, rope, kind, n, seed + i) for i, (kind, n) in enumerate(zip(kinds, counts, strict=True))]
    coded = [groupcases.written(case, model) for case in cases]
    return Many(model, DeviceGroupsModel(model, "cpu"), cases, coded)


def in_heads(case: donorcases.Case, block: donorcases.Block) -> Layers:
    """[n, C] to [heads, n, dim], of K with the tokens apart, of V with the heads."""
    layers = []
    for x, pair in zip(case.layout.layers, block, strict=True):
        k, v = (
            torch.from_numpy(bits.copy().view(np.int16)).view(torch.bfloat16).view(len(bits), x.heads, dim)
            for bits, dim in zip(pair, (x.key_dim, x.value_dim), strict=True)
        )
        layers.append((k.transpose(0, 1), v.transpose(0, 1).contiguous()))
    return layers


def rows_of(case: donorcases.Case, wanted: int | None = None) -> Rows:
    """wanted: to decode so many rows into sevens, else the rows of the block."""
    spans, joined = case.table.spans, range(len(case.layout.layers))
    donors = [tuple(np.concatenate([d[i][w] for d in case.donors]) for w in (0, 1)) for i in joined]
    block = in_heads(case, donorcases.rows_alone(case))
    if wanted is not None:
        block = [(torch.full_like(k, 7.0)[:, :wanted], torch.full_like(v, 7.0)[:, :wanted]) for k, v in block]
    turns = np.repeat(np.array(case.table.which, np.int32), [span.count for span in spans])
    return Rows(case.start + case.covered, block, in_heads(case, donors), case.table.angles, turns)  # type: ignore[arg-type]


def same(found: Layers, right: Layers) -> bool:
    pairs = [(a, b) for mine, theirs in zip(found, right, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)[:, : a.shape[1]]) for a, b in pairs)


def decoded(
    many: Many, coded: Sequence[Sequence[bytes]], wanted: Sequence[int] | None = None
) -> tuple[list[int], list[Layers]]:
    counts = [len(case.covered) for case in many.cases] if wanted is None else wanted
    rows = [rows_of(case, n) for case, n in zip(many.cases, counts, strict=True)]
    payload = torch.from_numpy(np.frombuffer(b"".join(b for layers in coded for b in layers), np.uint8).copy())
    status = launch.decode_blocks(many.device, payload, [list(map(len, layers)) for layers in coded], rows)
    return status.tolist(), [list(of.block) for of in rows]


def check(many: Many) -> None:
    payload, sizes = launch.encode_blocks(many.device, [rows_of(c) for c in many.cases], [PLENTY] * len(many.cases))
    assert sizes == many.sizes
    assert payload.numpy().tobytes() == b"".join(b for layers in many.coded for b in layers)
    coder = native_coder(many.model)
    for case, layers in zip(many.cases, many.coded, strict=True):
        assert groupcases.encoded(coder, case, "scalar") == layers
    status, out = decoded(many, many.coded)
    assert status == [0] * len(many.cases)
    assert all(same(of, list(rows_of(case).block)) for of, case in zip(out, many.cases, strict=True))


def shapes() -> None:
    """Every level, with and without rotation, V of other widths than K, layers that differ, narrow groups, odd numbers
    of heads, and rows that are alike, near, random, or not finite."""
    check(make([(3, 8, 6)] * 2, True, 1, ["near", "special"], [5, 2], 1))
    check(make([(1, 16, 24)] * 2, False, 2, ["near"], [3], 3))
    check(make([(2, 2, 1), (1, 2, 1), (3, 2, 5)], True, 3, ["special", "same", "random"], [1, 2, 3], 5))


def long() -> None:
    """More rows than a program has at once, of several blocks; more residuals than a product takes, and more columns
    than are measured at once."""
    predict_device.TILE, predict_device.BLOCK_M, groups_device.COLUMNS, groups_device.CORRECTED = 64, 16, 32, 2
    check(make([(1, 8, 8), (1, 8, 72)], True, 1, ["special", "near"], [40, 5], 7))


def prefixes() -> None:
    many = make([(2, 8, 8)] * 2, True, 2, ["near", "special"], [30, 12], 11)
    counts = [len(case.covered) for case in many.cases]
    assert min(counts) > 1
    status, out = decoded(many, many.coded, [1, counts[1] - 1])
    assert status == [0, 0]
    assert all(same(of, list(rows_of(case).block)) for of, case in zip(out, many.cases, strict=True))


def limits() -> None:
    """Blocks that come to too much have no payload; positions that the model does not know are refused."""
    many = make([(1, 8, 8)] * 2, True, 1, ["near"] * 3, [6] * 3, 9)
    size = sum(many.sizes[1])
    rows = [rows_of(case) for case in many.cases]
    for limit, kept in ((size, [0, 2]), (size + 1, [0, 1, 2])):
        payload, sizes = launch.encode_blocks(many.device, rows, [PLENTY, limit, PLENTY])
        assert [i for i, of in enumerate(sizes) if of is not None] == kept
        assert payload.numpy().tobytes() == b"".join(b for i in kept for b in many.coded[i])
    for changed in (
        {"positions": rows[0].positions + many.model.positions},
        {"positions": rows[0].positions - 1000},
        {"positions": rows[0].positions[:0]},
        {"turns": rows[0].turns + 1000},
        {"donors": rows[0].block[:1]},
        {"block": [(k[:, :-1], v[:, :-1]) for k, v in rows[0].block]},
    ):
        with pytest.raises(CodecError):
            launch.encode_blocks(many.device, [replace(rows[0], **changed), *rows[1:]], [PLENTY] * 3)
    for sizes in ([[1, 1 << 40]], [[-1, 4]], [[4]], []):
        with pytest.raises(CodecError):
            launch.decode_blocks(many.device, payload, sizes, rows[:1])


def latents() -> None:
    """Of a latent, K is coded as it stands, but donors' keys are rotated; so are layers of other numbers of columns."""
    many = make([(1, 8, 3), (1, 8, 5)], True, 1, ["near"], [12], 2)
    assert many.model.rope_fine is None
    assert (many.cases[0].table.runs[:, 2] >= 0).any()
    check(many)


def hostile() -> None:
    """What the CPU refuses is refused, what it decodes is decoded alike, beside blocks that are sound. Nothing beyond
    the payload is read: it ends where unreadable memory begins."""
    many = make([(1, 4, 3), (1, 4, 18)], True, 1, ["special"], [12], 10)
    case, good, rng = many.cases[0], many.coded[0], np.random.default_rng(0)
    before = len(case.covered) + many.device.groups
    coded = [good, [good[0], b""], [good[0][: before + 23], good[1]], [good[0][:3], good[1]], [good[1], good[0]]]
    coded += [[good[0], good[1] + b"\0\0"]]
    for shift in (31, 32, -32, -33):
        coded.append([struct.pack("b", shift) + good[0][1:], good[1]])
    for field in range(6):
        bad = [bytearray(layer) for layer in good]
        struct.pack_into("<I", bad[field % 2], 4 * field + (1 - field % 2) * before, (5, (1 << 32) - 1)[field % 2])
        coded.append([bytes(layer) for layer in bad])
    for turn in range(60 if AT_LENGTH else 12):
        bad = [bytearray(layer) for layer in good]
        which = bad[turn % 2]
        at = int(rng.integers(0, len(which)))
        if turn % 3 == 0:
            which[at] ^= 1 << int(rng.integers(8))
        elif turn % 3 == 1:
            which[at:] = rng.bytes(len(which) - at)
        else:
            del which[at:]
        coded.append([bytes(layer) for layer in bad])
    coded.append(good)
    text = b"".join(layer for layers in coded for layer in layers)
    room = -(-len(text) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
    payload = torch.from_numpy(np.frombuffer(memory, np.uint8, len(text), room - len(text)))
    payload.numpy()[:] = np.frombuffer(text, np.uint8)
    rows = [rows_of(case, len(case.covered)) for _ in coded]
    status = launch.decode_blocks(many.device, payload, [list(map(len, of)) for of in coded], rows).tolist()
    coder, refused = native_coder(many.model), 0
    for layers, bad, found in zip(coded, status, rows, strict=True):
        try:
            right = groupcases.decoded(coder, case, layers, "scalar")
        except CodecError:
            assert bad
            refused += 1
        else:
            assert not bad
            assert same(list(found.block), in_heads(case, [(k[case.covered], v[case.covered]) for k, v in right]))
    assert status[0] == status[-1] == 0
    assert len(coded) - 8 < refused


def trial() -> None:
    """A device that writes other bytes than the CPU codes nothing, and is not asked again."""
    predict_blocks.TRIAL_TOKENS = 64 if AT_LENGTH else 4
    model = groupcases.model_of([(2, 8, 6)] * 2, True, 3, 12)
    mode = GroupsMode(lambda: model)
    assert mode.codes_on(CPU)
    wrong, encode = [], group_blocks.encode_parts

    def damaged(run, limits):  # type: ignore[no-untyped-def]
        coded = encode(run, limits)
        coded.words.bitwise_xor_(1)
        wrong.append(run)
        return coded

    group_blocks.encode_parts = damaged
    codec = DonorCodec(EntropyCodec(), groups=lambda: model)
    assert not codec.codes_on(CPU, "bfloat16")
    assert not codec.codes_on(CPU, "bfloat16")
    assert len(wrong) == 1
    payload = memoryview(struct.pack("<I", 24))
    assert codec.kernels_decode(payload, (4,))
    assert not codec.decodes_on(CPU, "bfloat16", payload, (4,))  # so that what the CPU does is counted
    assert not codec.kernels_decode(memoryview(struct.pack("<I", 6)), (4,))  # bit for bit, without groups
    case = donorblocks.apart(case_of([(2, 8, 6)] * 2, True, "near", 6, 3))
    assert written_from(codec, case, posing) == written_from(codec, case)  # by the CPU


def posing(view: KVView) -> KVView:
    """As of tensors on a device: it has no rows, which the CPU would need."""
    return KVView(view.layout, view.tokens, None, view.tensors(), view.tensors())


def written_from(
    codec: DonorCodec, case: donorcases.Case, seen: Callable[[KVView], KVView] = lambda view: view
) -> tuple[bytes, tuple[int, ...]]:
    """The payload of a block, and the sizes of its layers."""
    info, (donors, keep) = donorblocks.info_of(case), donorblocks.wholes(case)
    rows = [DonorRows.of(span, donors[span.donor]) for span in case.table.spans]
    memory = memoryview(bytearray(codec.bound(info)))
    view = KVView.of_layers(case.layout, in_heads(case, case.block))
    sizes = codec.encode(info, seen(view), rows, memory)
    assert sizes is not None
    assert codec.encode(info, seen(view), rows, memoryview(bytearray(sum(sizes) - 1))) is None
    del keep
    return bytes(memory[: sum(sizes)]), sizes


def comes_back(codec: DonorCodec, case: donorcases.Case, payload: bytes, sizes: tuple[int, ...]) -> None:
    """To memory of a device, all of it and a beginning; and damage does not."""
    info, (donors, keep), right = donorblocks.info_of(case), donorblocks.wholes(case), in_heads(case, case.block)
    for wanted in (case.count, 1 + case.count // 2):
        room = [(torch.zeros_like(k)[:, :wanted], torch.zeros_like(v)[:, :wanted]) for k, v in right]
        codec.decode(info, memoryview(payload), sizes, donors, posing(KVView.of_layers(case.layout, room)))
        assert same(room, right)
    damaged = bytearray(payload)
    damaged[sizes[0] - 1] ^= 16
    with pytest.raises(CodecError):
        codec.decode(info, memoryview(damaged), sizes, donors, posing(KVView.of_layers(case.layout, room)))
    del keep


def codec() -> None:
    """By way of the codec: rows in no span, several spans, donors that are rotated."""
    predict_blocks.TRIAL_TOKENS = 4
    shapes = [(3, 8, 6)] * 2
    model = groupcases.model_of(shapes, True, 2, 12)
    codec = DonorCodec(EntropyCodec(), groups=lambda: model)
    for kind, count, seed in (("near", 12, 4), ("special", 30, 5))[: 2 if AT_LENGTH else 1]:
        case = donorblocks.apart(case_of(shapes, True, kind, count, seed))
        assert case.table.gaps(case.count)
        payload, sizes = written_from(codec, case, posing)
        assert (payload, sizes) == written_from(codec, case)
        comes_back(codec, case, payload, sizes)
    assert codec.codes_on(CPU, "bfloat16")  # nothing failed, so that the kernels did it


def partial() -> None:
    """A rotary embedding over a part of each head: K has another order in what is coded."""
    predict_blocks.TRIAL_TOKENS = 4
    rope = '{"partial_rotary_factor": 0.5, "rope_theta": 100.0, "rope_type": "default"}'
    layout = KVLayout(tuple(LayerLayout(2, 8, 6) for _ in range(2)), "bfloat16", rope)
    assert order_of(layout) is not None
    model = model_of_section(layout, groupcases.arrays_of([(2, 8, 6)] * 2, True, 1, 3))
    case = case_of([(2, 8, 6)] * 2, True, "near", 12, 4)
    spans = [replace(span, shift=7) for span in case.table.spans]
    case = donorblocks.apart(replace(case, layout=layout, table=SpanTable.of(layout, spans)))
    codec = DonorCodec(EntropyCodec(), groups=lambda: model)
    in_pairs, buffer = donor_codec.in_pairs, donor_codec.buffer
    # What is made of tensors that pose poses, too.
    donor_codec.in_pairs = lambda view, order: in_pairs(view, order) if view.on_cpu else posing(in_pairs(view, order))
    donor_codec.buffer = lambda view: buffer(view) if view.on_cpu else posing(copy_on_cpu(view))
    payload, sizes = written_from(codec, case, posing)
    assert (payload, sizes) == written_from(codec, case)
    comes_back(codec, case, payload, sizes)
    assert codec.codes_on(CPU, "bfloat16")


def failing() -> None:
    """What a device raises is its last, and the CPU goes on; memory that is short is the caller's to know."""
    predict_blocks.TRIAL_TOKENS = 4
    shapes = [(2, 8, 6)] * 2
    model = groupcases.model_of(shapes, True, 2, 12)
    case = donorblocks.apart(case_of(shapes, True, "near", 6, 4))
    for error in (torch.OutOfMemoryError("full"), RuntimeError("broken")):
        codec = DonorCodec(EntropyCodec(), groups=lambda: model)
        right = written_from(codec, case)
        assert codec.codes_on(CPU, "bfloat16")

        def raising(*_, error=error):  # type: ignore[no-untyped-def]
            raise error

        kept, group_blocks.encode_parts = group_blocks.encode_parts, raising
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                written_from(codec, case, posing)
        else:
            assert written_from(codec, case, posing) == right
        group_blocks.encode_parts = kept
        assert codec.codes_on(CPU, "bfloat16") == isinstance(error, torch.OutOfMemoryError)


if __name__ == "__main__":
    # Numbers that are not finite are part of what is coded.
    with np.errstate(all="ignore"):
        groups = (shapes, long, prefixes, limits, hostile, latents, trial, codec, partial, failing)
        kernelgroups.run({f.__name__: f for f in groups})
