"""Whole blocks and their donors through the donor codec."""

from __future__ import annotations

from typing import Any

import donorcases
import numpy as np
import torch
from donorcases import Case
from predictcases import as_bits, laid_out

from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.spans import Span, SpanTable


def info_of(case: Case) -> BlockInfo:
    return BlockInfo(case.layout, np.arange(case.count, dtype=np.uint32), case.start)


def wholes(case: Case) -> tuple[list[KVView], Any]:
    """The donor blocks that the spans number, whole: 16 rows more than are used, any others; and what they are in."""
    rng = np.random.default_rng(7)
    spans = case.table.spans
    blocks = []
    for number in range(case.table.donors):
        rows = max([s.donor_start + s.count for s in spans if s.donor == number], default=0) + 16
        block = [tuple(rng.integers(0, 1 << 16, (rows, x.shape[1])).astype(np.uint16) for x in p) for p in case.block]
        for span, theirs in zip(spans, case.donors, strict=True):
            if span.donor == number:
                for pair, bits in zip(block, theirs, strict=True):
                    for mine, other in zip(pair, bits, strict=True):
                        mine[span.donor_start : span.donor_start + span.count] = other
        blocks.append(block)
    return [laid_out(case.layout, block) for block in blocks], blocks  # type: ignore[arg-type]


def apart(case: Case) -> Case:
    """With no two spans in the same rows of a donor, so that whole donors can be made of their rows."""
    spans, at = [], 0
    for span in case.table.spans:
        spans.append(Span(span.start, span.count, span.donor, at, span.shift))
        at += span.count + 3
    table = SpanTable.of(case.layout, spans, case.table.mode, case.table.flags)
    return Case(case.layout, table, case.start, case.block, case.donors, case.model)


def encode(codec: DonorCodec, case: Case, room: int | None = None) -> tuple[bytes, tuple[int, ...]] | None:
    info, (donors, keep) = info_of(case), wholes(case)
    rows = [DonorRows.of(span, donors[span.donor]) for span in case.table.spans]
    memory = memoryview(bytearray(codec.bound(info) if room is None else room))
    sizes = codec.encode(info, laid_out(case.layout, case.block), rows, memory)
    del keep
    return None if sizes is None else (bytes(memory[: sum(sizes)]), sizes)


def decode(
    codec: DonorCodec, case: Case, payload: bytes, sizes: tuple[int, ...], count: int | None = None
) -> donorcases.Block:
    n, (donors, keep) = case.count if count is None else count, wholes(case)
    out = [
        (torch.zeros(x.heads, n, x.key_dim).bfloat16(), torch.zeros(x.heads, n, x.value_dim).bfloat16())
        for x in case.layout.layers
    ]
    codec.decode(info_of(case), memoryview(payload), sizes, donors, KVView.of_layers(case.layout, out))
    del keep
    return [(_rows(k), _rows(v)) for k, v in out]


def _rows(values: torch.Tensor) -> np.ndarray:
    """[heads, n, dim] -> bits [n, C]"""
    return as_bits(values).transpose(1, 0, 2).reshape(values.shape[1], -1)
