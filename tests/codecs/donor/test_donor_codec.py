"""Codec 3 as the store sees it: rows with donors and without, exact whatever it is given."""

from __future__ import annotations

import struct
from typing import Any

import donorcases
import numpy as np
import pytest
import torch
from damaged_layers import every_byte_changed, noticed
from donorblocks import apart, decode, encode, info_of, wholes
from donorcases import Case, case_of, layout_of, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from predictcases import laid_out, same

from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.spans import STEPS, Span, SpanTable
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.raw import RawCodec
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError

SHAPES = [(2, 8, 8)] * 3
PLAIN = EntropyCodec()


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@settings(max_examples=part(60), deadline=None)
@given(
    st.sampled_from([SHAPES, [(1, 4, 6), (3, 4, 5)], [(1, 64, 64)] * 2]), st.booleans(), st.booleans(),
    st.sampled_from(["near", "same", "random", "special"]), st.integers(1, 100), st.integers(0, 1 << 20),
    st.sampled_from([PLAIN, RawCodec()]),
)  # fmt: skip
def test_any_block_with_any_donors_comes_back(
    shapes: donorcases.Shapes, rope: bool, propagated: bool, kind: str, count: int, seed: int, plain: Any
) -> None:
    model = model_of(shapes, rope, seed) if propagated else None
    case = apart(case_of(shapes, rope, kind, count, seed, model=model))
    codec = DonorCodec(plain, model)
    found = encode(codec, case)
    assert found is not None
    payload, sizes = found
    assert len(payload) <= codec.bound(info_of(case))
    table = codec.spans_of(info_of(case), memoryview(payload))
    assert table.spans == case.table.spans
    assert table.propagated == propagated
    assert same(decode(codec, case, payload, sizes), case.block)
    first = 1 + seed % count
    assert same(decode(codec, case, payload, sizes, first), case.block, first)


def test_rows_of_a_donor_are_smaller_than_plain() -> None:
    shapes = [(2, 32, 32)] * 9
    case = case_of(shapes, False, "same", 64, 3)
    case = apart(Case(case.layout, SpanTable.of(case.layout, [Span(0, 64, 0, 0, 0)]), 0, case.block, [case.block]))
    codec, info = DonorCodec(PLAIN), info_of(case)
    found = encode(codec, case)
    assert found is not None
    assert len(found[0]) < codec.usual(info) / 4 <= codec.bound(info) / 4


def test_no_room_is_said_so() -> None:
    case = apart(case_of(SHAPES, True, "near", 64, 5))
    assert case.table.gaps(64)
    codec = DonorCodec(RawCodec())
    found = encode(codec, case)
    assert found is not None
    for room in {0, 1, 20, case.table.nbytes, *range(40, len(found[0]), 97), len(found[0]) - 1}:
        assert encode(codec, case, room) is None
    assert encode(codec, case, len(found[0])) == found


def test_a_record_of_a_model_needs_that_model() -> None:
    model = model_of(SHAPES, True, 5)
    case = apart(case_of(SHAPES, True, "near", 30, 5, model=model))
    found = encode(DonorCodec(PLAIN, model), case)
    assert found is not None
    for other in (None, model_of([(2, 8, 8)] * 4, True, 5)):
        with pytest.raises(CodecError, match="profile"):
            decode(DonorCodec(PLAIN, other), case, *found)
    with pytest.raises(CodecError):
        decode(DonorCodec(PLAIN, model_of(SHAPES, True, 6)), case, *found)
    beyond = Case(case.layout, case.table, model.positions - 29, case.block, case.donors)
    plain = encode(DonorCodec(PLAIN, model), beyond)
    assert plain is not None
    assert plain == encode(DonorCodec(PLAIN), beyond)
    assert same(decode(DonorCodec(PLAIN, model), beyond, *plain), case.block)


@pytest.mark.parametrize("propagated", [False, True])
def test_every_truncation_and_every_changed_byte_is_noticed_or_harmless(propagated: bool) -> None:
    model = model_of(SHAPES, True, 5) if propagated else None
    case = apart(case_of(SHAPES, True, "near", 9, 5, model=model))
    assert case.table.gaps(9)
    codec = DonorCodec(RawCodec(), model)
    found = encode(codec, case)
    assert found is not None
    payload, sizes = found
    uncovered = sum(count for _, count in case.table.gaps(9)) * case.layout.bytes_per_token
    for length in range(len(payload)):
        with pytest.raises(CodecError):
            decode(codec, case, payload[:length], (*sizes[:-1], length - sum(sizes[:-1])))
    rows = donorcases.rows_alone(case)
    refused = noticed(
        every_byte_changed(payload),
        lambda changed: decode(codec, case, changed, sizes),
        lambda at, found: at < case.table.nbytes or same([(k[case.covered], v[case.covered]) for k, v in found], rows),
    )
    # Where rows go, what raw bytes hold, and padding, has no check of its own: records have checksums.
    assert refused > len(payload) - uncovered - 40


def test_headers_that_cannot_be_are_damage() -> None:
    cases = (apart(case_of(SHAPES, True, "near", 20, seed)) for seed in range(30))
    case = next(case for case in cases if len(case.table.angles) and case.table.gaps(20))
    codec = DonorCodec(RawCodec())
    found = encode(codec, case)
    assert found is not None
    payload, sizes = found
    (rest,) = struct.unpack_from("<I", payload, 12)

    def changed(at: int, kind: str, value: int, match: str) -> None:
        damaged = bytearray(payload)
        struct.pack_into(kind, damaged, at, value)
        with pytest.raises(CodecError, match=match):
            decode(codec, case, bytes(damaged), sizes)

    changed(0, "<I", STEPS, "the step is out of range, or a flag is unknown")
    changed(0, "<I", 99, "mode")
    changed(4, "<H", 0, "0 spans")
    changed(8, "<I", 1, "profile")
    changed(12, "<I", rest + sizes[-1], "too small|do not fit")
    changed(12, "<I", rest + 2, "donor: ")
    changed(20, "<H", 9, "overlaps|beyond the donor")
    changed(22, "<H", 9000, "beyond the donor")
    with pytest.raises(CodecError):
        decode(codec, case, payload, (sizes[0] + 1, -1, *sizes[2:]))
    with pytest.raises(CodecError, match="expected 3 layers"):
        decode(codec, case, payload, sizes[:2])
    still = layout_of([(2, 8, 8), (2, 6, 8)], True)
    with pytest.raises(CodecError, match="cannot be shifted"):
        codec.spans_of(BlockInfo(still, np.arange(20, dtype=np.uint32), 0), memoryview(payload))
    half = KVLayout(case.layout.layers, "float16", case.layout.rope)
    with pytest.raises(CodecError, match="float16"):
        codec.spans_of(BlockInfo(half, np.arange(20, dtype=np.uint32), 0), memoryview(payload))


def test_other_donors_are_noticed() -> None:
    case = apart(case_of(SHAPES, True, "near", 20, 5))
    codec = DonorCodec(PLAIN)
    found = encode(codec, case)
    assert found is not None
    donors, keep = wholes(case)
    out = [(torch.zeros(2, 20, 8).bfloat16(), torch.zeros(2, 20, 8).bfloat16()) for _ in range(3)]
    view = KVView.of_layers(case.layout, out)
    info, payload, sizes = info_of(case), memoryview(found[0]), found[1]
    codec.decode(info, payload, sizes, donors, view)
    other = layout_of([(2, 8, 8)] * 4, True)
    wide = laid_out(other, [*keep[0], keep[0][0]])
    for wrong in ([], [view.narrow(0, 1)] * len(donors), [wide] * len(donors)):
        with pytest.raises(CodecError, match="donor"):
            codec.decode(info, payload, sizes, wrong, view)
    keep[case.table.spans[0].donor][1][1][case.table.spans[0].donor_start] ^= 0x40
    with pytest.raises(CodecError):
        codec.decode(info, payload, sizes, [laid_out(case.layout, block) for block in keep], view)


def test_calls_that_are_not_in_order_are_refused() -> None:
    case = case_of(SHAPES, True, "near", 20, 5)
    codec, info, block = DonorCodec(PLAIN), info_of(case), laid_out(case.layout, case.block)
    out = memoryview(bytearray(codec.bound(info)))

    def refused(match: str, *spans: Span, info: BlockInfo = info, rows: KVView = block) -> None:
        with pytest.raises(ValueError, match=match):
            codec.encode(info, block, [DonorRows(span, rows.narrow(0, span.count)) for span in spans], out)

    refused("1 to 256 spans")
    refused("1 to 256 spans", *[Span(0, 1, 0, 0, 0)] * 257)
    refused("rising order", Span(0, 4, 0, 0, 0), Span(3, 4, 0, 0, 0))
    refused("rising order", Span(0, 4, 1, 0, 0))
    refused("rising order", Span(18, 4, 0, 0, 0))
    refused("the rows of its span", Span(0, 4, 0, 0, 0), rows=laid_out(layout_of(SHAPES, False), case.block))
    half = KVLayout(case.layout.layers, "float16", case.layout.rope)
    refused("bfloat16", Span(0, 4, 0, 0, 0), info=BlockInfo(half, info.tokens, 0))
    strange = KVLayout(case.layout.layers, "bfloat16", '{"rope_type": "dynamic"}')
    rows = laid_out(strange, case.block)
    refused("rotated to other positions", Span(0, 4, 0, 0, 3), info=BlockInfo(strange, info.tokens, 0), rows=rows)
    with pytest.raises(ValueError, match="narrow"):
        DonorRows.of(Span(0, 4, 0, 18, 0), block)


def test_a_model_of_a_profile_is_used_where_its_layout_is_the_blocks() -> None:
    model = model_of(SHAPES, True, 5)
    assert isinstance(model, DonorModel)
    case = apart(case_of([(2, 8, 8)] * 4, True, "near", 20, 5))
    assert encode(DonorCodec(PLAIN, model), case) == encode(DonorCodec(PLAIN), case)


def test_donors_may_lie_at_any_address() -> None:
    case = apart(case_of(SHAPES, True, "special", 20, 5))
    codec, info, (donors, keep) = DonorCodec(PLAIN), info_of(case), wholes(case)
    memory = [np.zeros(view.nbytes + 1, np.uint8) for view in donors]
    odd = [KVView.packed(case.layout, v.tokens, m.ctypes.data + 1, m) for v, m in zip(donors, memory, strict=True)]
    for view, packed in zip(donors, odd, strict=True):
        view.copy_to(packed)
    out = memoryview(bytearray(codec.bound(info)))
    rows = [DonorRows.of(span, odd[span.donor]) for span in case.table.spans]
    sizes = codec.encode(info, laid_out(case.layout, case.block), rows, out)
    assert sizes is not None
    assert encode(codec, case) == (bytes(out[: sum(sizes)]), sizes)
    assert len(keep) == len(donors)


def test_steps_lose_no_more_than_they_say_and_rows_without_a_donor_nothing() -> None:
    case = apart(case_of(SHAPES, True, "near", 40, 5))
    codec, info = DonorCodec(RawCodec(), None, 0.25), info_of(case)
    assert not codec.exact
    found = encode(codec, case)
    assert found is not None
    payload, sizes = found
    assert len(payload) <= codec.bound(info)
    bound = codec.largest_error(info, memoryview(payload))
    rows = decode(DonorCodec(RawCodec()), case, payload, sizes)  # either reads both
    pairs = [both for x, y in zip(rows, case.block, strict=True) for both in zip(x, y, strict=True)]
    assert 0 < max(float(np.abs(floats(a) - floats(b)).max()) for a, b in pairs) <= bound
    outside = [i for start, count in case.table.gaps(40) for i in range(start, start + count)]
    assert outside
    assert all(np.array_equal(a[outside], b[outside]) for a, b in pairs)
