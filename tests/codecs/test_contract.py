"""What every codec must do, whatever its number: each behaviour for each row of `codecrows.ROWS`.

What a lossy codec gives back is as near as it says, and the same every time; where "exactly" stands in a name here, a
lossy codec is held to that.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from codeccontract import (
    SHAPES,
    another_size_is_refused,
    block_info,
    comes_back,
    decode,
    empty,
    encode,
    kv_of_smooth,
    outside_is_untouched,
    shaped,
    small,
    special_of,
    spread,
)
from codecrows import DTYPES, ROWS, Row
from kvcases import mixed_layout, random_kv, same_kv

from kvstore import KVLayout
from kvstore.codecs import KVView
from kvstore.errors import CodecError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test for the rows that it is held for, and for each dtype that these take, where it asks for one."""
    if "row" not in metafunc.fixturenames:
        return
    rows = [row for row in ROWS if metafunc.function.__name__ not in row.not_held]
    if "dtype" in metafunc.fixturenames:
        pairs = [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row in rows for dtype in row.dtypes]
        metafunc.parametrize(("row", "dtype"), pairs)
    else:
        metafunc.parametrize("row", [pytest.param(row, id=row.name) for row in rows])


@pytest.fixture(params=["likely", "random"])
def fill(request: pytest.FixtureRequest) -> str:
    """Blocks that codecs code as they are meant to, and blocks that they fall back from."""
    return str(request.param)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_bits_come_back_exactly(row: Row, dtype: str, shape: str) -> None:
    layout, count = shaped(row, dtype, shape)
    assert comes_back(row, block_info(layout, count), random_kv(count, layout))


@pytest.mark.parametrize("shape", SHAPES)
def test_likely_values_come_back_exactly(row: Row, dtype: str, shape: str) -> None:
    layout, count = shaped(row, dtype, shape)
    assert comes_back(row, block_info(layout, count), row.likely(layout, count))


def test_likely_values_are_coded_and_not_fallen_back_from(row: Row) -> None:
    """Or the other tests would say nothing of the codec itself."""
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 37)
    payload, sizes = encode(codec, info, row.likely(layout, 37))
    assert codec.fallbacks(memoryview(payload), sizes) == 0
    assert len(payload) < 0.8 * sum(info.layer_bytes())


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_come_back_exactly(row: Row, dtype: str, shape: str) -> None:
    layout, count = shaped(row, dtype, shape)
    assert comes_back(row, block_info(layout, count), empty(layout, count))


def test_smooth_values_come_back_exactly(row: Row, dtype: str) -> None:
    layout = row.layout(KVLayout.uniform(2, 2, 32, dtype))
    ramp = torch.linspace(-3, 3, 2 * 50 * 32).reshape(2, 50, 32)
    kv = [tuple(t.to(getattr(torch, dtype)) for t in pair) for pair in ((ramp, ramp * 2), (ramp.exp(), -ramp))]
    assert comes_back(row, block_info(layout, 50), kv)


def test_nan_payloads_infinities_subnormals_and_the_sign_of_zero_come_back_exactly(row: Row, dtype: str) -> None:
    special = special_of(dtype)
    layout = row.layout(KVLayout.uniform(1, 1, len(special), dtype))
    rows = special.repeat(1, 7, 1)
    assert comes_back(row, block_info(layout, 7), [(rows, rows.flip(1))])


def test_special_values_among_likely_ones_come_back_exactly(row: Row, dtype: str) -> None:
    layout, special = small(row, dtype), special_of(dtype)
    kv = [tuple(t.clone() for t in pair) for pair in row.likely(layout, 37)]
    for number, tensor in enumerate(t for pair in kv for t in pair):
        tensor[:, 5 + 7 * number, 3 : 3 + len(special)] = special
    assert comes_back(row, block_info(layout, 37), kv)


def test_transposed_and_strided_inputs_give_the_same_bytes_as_contiguous_ones(row: Row, fill: str, dtype: str) -> None:
    layout, count = row.layout(KVLayout.uniform(2, 3, 16, dtype)), 20
    codec, info, kv = row.coder(layout), block_info(layout, count), row.block(fill, layout, count)
    plain = encode(codec, info, kv)
    # As models make them: [tokens, heads, dim] seen as [heads, tokens, dim].
    transposed = [tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in pair) for pair in kv]
    assert not transposed[0][0].is_contiguous()
    every_other = [tuple(spread(t, 1) for t in pair) for pair in kv]
    last_dim_strided = [tuple(spread(t, 2) for t in pair) for pair in kv]
    for other in (transposed, every_other, last_dim_strided):
        assert encode(codec, info, other) == plain


def test_tensors_that_only_torch_can_copy_give_the_same_bytes(row: Row, fill: str, dtype: str) -> None:
    """As those on a device: a view that has tensors and no rows in memory."""
    layout, count = mixed_layout(dtype), 20
    kv = row.block(fill, layout, count)
    longer = [tuple(torch.nn.functional.pad(t.float(), (0, 0, 4, 3)).to(t.dtype) for t in pair) for pair in kv]
    for pair, wide in zip(kv, longer, strict=True):
        for tensor, other in zip(pair, wide, strict=True):
            other[:, 4 : 4 + count] = tensor
    rowless = KVView(layout, count, None, [t for pair in longer for t in pair], start=4)
    assert not rowless.on_cpu
    codec, info = row.coder(layout), block_info(layout, count)
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, rowless, memory)
    assert sizes is not None
    assert (bytes(memory[: sum(sizes)]), sizes) == encode(codec, info, kv)


def test_one_row_expanded_over_all_tokens_is_coded_as_its_copies(row: Row, dtype: str) -> None:
    layout, count = row.layout(KVLayout.uniform(1, 2, 16, dtype)), 9
    ((k, v),) = row.likely(layout, 1)
    expanded = [(k.expand(2, count, 16), v.expand(2, count, 16))]
    assert expanded[0][0].stride(1) == 0
    assert comes_back(row, block_info(layout, count), [(k.repeat(1, 9, 1), v.repeat(1, 9, 1))], expanded)


def test_a_strided_slice_of_the_result_is_filled_and_nothing_around_it(row: Row, fill: str, dtype: str) -> None:
    layout, count = mixed_layout(dtype), 13
    codec, info, kv = row.coder(layout), block_info(layout, count), row.block(fill, layout, count)
    payload, sizes = encode(codec, info, kv)
    whole = empty(layout, count + 10, fill=0x5A5A)
    slices = [tuple(t[:, 4 : 4 + count] for t in pair) for pair in whole]
    codec.decode(info, memoryview(payload), sizes, KVView.of_layers(layout, slices))
    expected = [
        tuple(torch.cat([w[:, :4], t, w[:, 4 + count :]], dim=1) for w, t in zip(ws, ts, strict=True))
        for ws, ts in zip(empty(layout, count + 10, fill=0x5A5A), decode(codec, info, payload, sizes), strict=True)
    ]
    assert same_kv(whole, expected)
    assert row.faithful(slices, kv, codec.error_bound(memoryview(payload), sizes))


def test_a_transposed_result_is_filled(row: Row, fill: str, dtype: str) -> None:
    layout, count = row.layout(KVLayout.uniform(2, 3, 16, dtype)), 12
    codec, info = row.coder(layout), block_info(layout, count)
    payload, sizes = encode(codec, info, row.block(fill, layout, count))
    out = [tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in pair) for pair in empty(layout, count)]
    codec.decode(info, memoryview(payload), sizes, KVView.of_layers(layout, out))
    assert same_kv(out, decode(codec, info, payload, sizes))


@pytest.mark.parametrize("wanted", [1, 7, 36, 37])
def test_the_first_tokens_of_a_block_can_be_decoded_alone(row: Row, fill: str, dtype: str, wanted: int) -> None:
    layout = mixed_layout(dtype)
    codec, info = row.coder(layout), block_info(layout, 37)
    payload, sizes = encode(codec, info, row.block(fill, layout, 37))
    assert same_kv(decode(codec, info, payload, sizes, wanted), decode(codec, info, payload, sizes), wanted)


def test_equal_blocks_give_equal_bytes_whatever_was_coded_in_between(row: Row, fill: str, dtype: str) -> None:
    layout = row.layout(KVLayout.uniform(2, 2, 32, dtype))
    codec, info, kv = row.coder(layout), block_info(layout, 30), row.block(fill, layout, 30)
    first = encode(codec, info, kv)
    decoded = decode(codec, info, *first)
    encode(codec, block_info(layout, 64), random_kv(64, layout))
    assert encode(codec, info, kv) == first
    assert same_kv(decode(codec, info, *first), decoded)


def test_the_bound_holds_for_bits_that_cannot_be_compressed(row: Row, dtype: str) -> None:
    for count in (1, 2, 3, 31, 64, 257):
        for layout in (KVLayout.uniform(1, 1, 1, dtype), KVLayout.uniform(3, 2, 31, dtype), mixed_layout(dtype)):
            codec, info = row.coder(row.layout(layout)), block_info(row.layout(layout), count)
            payload, sizes = encode(codec, info, random_kv(count, layout))
            assert sum(sizes) == len(payload) <= codec.bound(info)
            assert codec.usual(info) <= codec.bound(info)


def test_nothing_is_written_beyond_too_little_room(row: Row, fill: str) -> None:
    layout = small(row)
    codec, info, kv = row.coder(layout), block_info(layout, 16), row.block(fill, layout, 16)
    payload, sizes = encode(codec, info, kv)
    for room in (0, 1, 40, len(payload) // 2, len(payload) - 1, len(payload), len(payload) + 1):
        memory = bytearray(b"\xa5" * (room + 64))
        found = codec.encode(info, KVView.of_layers(layout, kv), memoryview(memory)[:room])
        # Some codecs need more than they take, but less than `bound`.
        assert found is None or (found == sizes and memory[: len(payload)] == payload)
        assert bytes(memory[room:]) == b"\xa5" * 64


def test_encoding_writes_nothing_beyond_what_it_reports(row: Row) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    memory = bytearray(b"\xa5" * (codec.bound(info) + 64))
    sizes = codec.encode(info, KVView.of_layers(layout, empty(layout, 16)), memoryview(memory)[: codec.bound(info)])
    assert sizes is not None
    assert bytes(memory[codec.bound(info) :]) == b"\xa5" * 64
    assert bytes(memory[sum(sizes) : codec.bound(info)]) == b"\xa5" * (codec.bound(info) - sum(sizes))


def test_coding_leaves_the_input_as_it_was(row: Row, fill: str) -> None:
    layout = small(row)
    kv = row.block(fill, layout, 16)
    before = [tuple(t.clone() for t in pair) for pair in kv]
    encode(row.coder(layout), block_info(layout, 16), kv)
    assert same_kv(kv, before)


def test_what_is_lost_is_recorded_and_nothing_is_by_an_exact_codec(row: Row) -> None:
    layout = small(row)
    codec = row.coder(layout)
    payload, sizes = encode(codec, block_info(layout, 37), row.likely(layout, 37))
    bound = codec.error_bound(memoryview(payload), sizes)
    assert codec.exact == (row.fidelity == "exact")
    assert math.isfinite(bound)
    assert (bound > 0) == (row.fidelity == "recorded")


def test_a_dtype_that_a_codec_does_not_take_is_refused(row: Row) -> None:
    for layout in (small(row, dtype) for dtype in DTYPES if dtype not in row.dtypes):
        with pytest.raises((ValueError, CodecError)):
            encode(row.coder(layout), block_info(layout, 9), random_kv(9, layout))


@pytest.mark.parametrize("cut", ["nothing-left", "one-byte-short", "half", "a-header-only"])
def test_a_payload_that_was_cut_is_refused(row: Row, fill: str, cut: str) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    payload, sizes = encode(codec, info, row.block(fill, layout, 16))
    left = {"nothing-left": 0, "one-byte-short": len(payload) - 1, "half": len(payload) // 2, "a-header-only": 32}[cut]
    with pytest.raises(CodecError):
        decode(codec, info, payload[:left], sizes)


@pytest.mark.parametrize("sizes", [(), (1,), (0, 0), (1, 2, 3), (1 << 40, 5), (-5, 5)])
def test_layer_sizes_that_contradict_the_payload_are_refused(row: Row, fill: str, sizes: tuple[int, ...]) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    payload, _ = encode(codec, info, row.block(fill, layout, 16))
    with pytest.raises(CodecError):
        decode(codec, info, payload, sizes)


def test_layer_sizes_with_the_right_sum_and_a_wrong_split_are_refused(row: Row, fill: str) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    payload, (first, second) = encode(codec, info, row.block(fill, layout, 16))
    for sizes in ((first - 1, second + 1), (0, first + second), (first + second, 0), (-1, first + second + 1)):
        with pytest.raises(CodecError):
            decode(codec, info, payload, sizes)


def test_a_block_of_another_size_is_refused(row: Row) -> None:
    another_size_is_refused(row, "random")


def test_a_likely_block_of_another_size_is_refused(row: Row) -> None:
    another_size_is_refused(row, "likely")


def test_more_tokens_than_the_block_has_and_none_at_all_are_refused(row: Row, fill: str) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    payload, sizes = encode(codec, info, row.block(fill, layout, 16))
    for count in (0, 17):
        with pytest.raises(CodecError):
            decode(codec, info, payload, sizes, count)


def test_a_view_of_another_layout_is_refused(row: Row, fill: str) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    payload, sizes = encode(codec, info, row.block(fill, layout, 16))
    other = KVLayout.uniform(2, 2, 16, "float16")
    with pytest.raises(CodecError):
        codec.decode(info, memoryview(payload), sizes, KVView.of_layers(other, empty(other, 16)))


def test_damaged_bytes_decode_to_something_or_raise_and_never_write_outside(row: Row) -> None:
    """Whether a damaged payload is noticed is the record's checksum's matter; that nothing else happens is the
    codec's: no other exception, no byte outside the slice."""
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    smooth = [tuple(t.cumsum(1) for t in pair) for pair in kv_of_smooth(layout, 16)]
    generator = np.random.default_rng(0)
    for kv in (smooth, row.likely(layout, 16)):
        payload, sizes = encode(codec, info, kv)
        for trial in range(600):
            damaged = bytearray(payload)
            # Headers first: each of the first 32 bytes of each layer, then anywhere.
            where = [trial % 32, sizes[0] + trial % 32, int(generator.integers(len(payload)))][trial % 3] % len(payload)
            damaged[where] ^= 1 << int(generator.integers(8)) if trial % 2 else int(generator.integers(1, 256))
            outside_is_untouched(codec, info, damaged, sizes)


def test_damage_of_headers_is_noticed(row: Row) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    payload, sizes = encode(codec, info, row.likely(layout, 16))
    noticed = sum(
        not outside_is_untouched(codec, info, payload[:at] + bytes([payload[at] ^ 0xFF]) + payload[at + 1 :], sizes)
        for at in range(32)
    )
    assert noticed


def test_noise_is_refused_or_decoded_but_never_fatal(row: Row) -> None:
    layout = small(row)
    codec, info = row.coder(layout), block_info(layout, 16)
    generator = np.random.default_rng(1)
    for length in (0, 1, 16, 31, 32, 33, 64, 1000, 2048):
        payload = generator.bytes(2 * length)
        if [length, length] != info.layer_bytes():
            with pytest.raises(CodecError):
                decode(codec, info, payload, (length, length))


def test_a_foreign_chunk_of_the_right_shape_is_refused(row: Row) -> None:
    layout = row.layout(KVLayout.uniform(1, 1, 16))
    codec, info = row.coder(layout), block_info(layout, 16)
    for magic in (b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\x1f\x8b\x08\x00", struct.pack("<Q", 1 << 60)):
        payload = magic.ljust(300, b"\x01")
        with pytest.raises(CodecError):
            decode(codec, info, payload, (300,))


# -- the table ---------------------------------------------------------------------------------------------------------


def test_what_is_not_held_is_part_of_the_contract_and_has_a_reason() -> None:
    contract = globals()
    for row in ROWS:
        for name, reason in row.not_held.items():
            assert name in contract, f"{row.name}: there is no {name}"
            assert reason
