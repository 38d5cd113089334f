"""What every codec must do, whatever its number."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from kvcases import INTEGERS, kv_of, mixed_layout, random_kv, same_kv

from kvstore import KVLayout, LayerLayout
from kvstore.codecs import BlockInfo, Codec, KVView, codec_by_name, codec_names
from kvstore.errors import CodecError

DTYPES = ["bfloat16", "float16", "float32", "float8_e5m2", "float8_e4m3fn"]
SHAPES = {
    "typical": lambda dtype: (KVLayout.uniform(4, 3, 64, dtype), 64),
    "odd": lambda dtype: (KVLayout((LayerLayout(5, 123, 123),), dtype), 123),
    "one-token": lambda dtype: (KVLayout.uniform(2, 3, 16, dtype), 1),
    "one-value": lambda dtype: (KVLayout.uniform(1, 1, 1, dtype), 1),
    "mixed-layers": lambda dtype: (mixed_layout(dtype), 37),
    "many-layers": lambda dtype: (KVLayout.uniform(40, 1, 4, dtype), 5),
}
SPECIAL = {  # NaNs with payloads (quiet and signalling, both signs), infinities, subnormals, both zeros
    "bfloat16": [0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x0000, 0x8000],
    "float16": [0x7E00, 0x7E01, 0xFFFF, 0x7C01, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x0000, 0x8000],
    "float32": [0x7FC00000, 0x7FC12345, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0, 0x80000000],
    "float8_e5m2": [0x7F, 0x7E, 0xFF, 0x7D, 0x7C, 0xFC, 0x01, 0x83, 0x00, 0x80],
    "float8_e4m3fn": [0x7F, 0xFF, 0x01, 0x87, 0x00, 0x80],
}


@pytest.fixture(params=codec_names())
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_by_name(request.param)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def block_info(layout: KVLayout, count: int) -> BlockInfo:
    return BlockInfo(layout, np.arange(count, dtype=np.uint32), 0)


def encode(codec: Codec, info: BlockInfo, kv) -> tuple[bytes, tuple[int, ...]]:
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(info.layout, kv), memory)
    assert sum(sizes) <= codec.bound(info)
    assert len(sizes) == len(info.layout.layers)
    return bytes(memory[: sum(sizes)]), sizes


def empty(layout: KVLayout, count: int, fill: int = 0):
    item = INTEGERS[layout.dtype]
    if item is torch.uint8:
        fill &= 0xFF
    dtype = getattr(torch, layout.dtype)
    return [
        tuple(torch.full((x.heads, count, dim), fill, dtype=item).view(dtype) for dim in (x.key_dim, x.value_dim))
        for x in layout.layers
    ]


def decode(codec: Codec, info: BlockInfo, payload: bytes, sizes, count: int | None = None):
    out = empty(info.layout, info.count if count is None else count)
    codec.decode(info, memoryview(payload), sizes, KVView.of_layers(info.layout, out))
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_random_bits_come_back_exactly(codec: Codec, dtype: str, shape: str) -> None:
    layout, count = SHAPES[shape](dtype)
    info, kv = block_info(layout, count), random_kv(count, layout)
    assert same_kv(decode(codec, info, *encode(codec, info, kv)), kv)


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_come_back_exactly(codec: Codec, dtype: str, shape: str) -> None:
    layout, count = SHAPES[shape](dtype)
    info, kv = block_info(layout, count), empty(layout, count)
    out = empty(layout, count, fill=-1)
    codec.decode(info, *_payload(encode(codec, info, kv)), KVView.of_layers(layout, out))
    assert same_kv(out, kv)


def test_smooth_values_come_back_exactly(codec: Codec, dtype: str) -> None:
    layout = KVLayout.uniform(2, 2, 32, dtype)
    ramp = torch.linspace(-3, 3, 2 * 50 * 32).reshape(2, 50, 32)
    kv = [tuple(t.to(getattr(torch, dtype)) for t in pair) for pair in ((ramp, ramp * 2), (ramp.exp(), -ramp))]
    info = block_info(layout, 50)
    assert same_kv(decode(codec, info, *encode(codec, info, kv)), kv)


def test_nan_payloads_infinities_subnormals_and_the_sign_of_zero_come_back_exactly(codec: Codec, dtype: str) -> None:
    special = np.array(SPECIAL[dtype], dtype=f"uint{8 * INTEGERS[dtype].itemsize}")
    layout = KVLayout.uniform(1, 1, len(special), dtype)
    rows = torch.from_numpy(np.tile(special, (1, 7, 1))).view(getattr(torch, dtype))
    info = block_info(layout, 7)
    assert same_kv(decode(codec, info, *encode(codec, info, [(rows, rows.flip(1))])), [(rows, rows.flip(1))])


def test_transposed_and_strided_inputs_give_the_same_bytes_as_contiguous_ones(codec: Codec, dtype: str) -> None:
    layout, count = KVLayout.uniform(2, 3, 16, dtype), 20
    info, kv = block_info(layout, count), random_kv(count, layout)
    plain = encode(codec, info, kv)
    # As models make them: [tokens, heads, dim] seen as [heads, tokens, dim].
    transposed = [tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in pair) for pair in kv]
    assert not transposed[0][0].is_contiguous()
    every_other = [tuple(_spread(t, 1) for t in pair) for pair in kv]
    last_dim_strided = [tuple(_spread(t, 2) for t in pair) for pair in kv]
    assert encode(codec, info, transposed) == plain
    assert encode(codec, info, every_other) == plain
    assert encode(codec, info, last_dim_strided) == plain


def test_tensors_that_only_torch_can_copy_give_the_same_bytes(codec: Codec, dtype: str) -> None:
    """As those on a device: a view that has tensors and no rows in memory."""
    layout, count = mixed_layout(dtype), 20
    kv = random_kv(count + 7, layout)
    tensors = [t for pair in kv for t in pair]
    rowless = KVView(layout, count, None, tensors, start=4)
    assert not rowless.on_cpu
    info, memory = block_info(layout, count), memoryview(bytearray(codec.bound(block_info(layout, count))))
    sizes = codec.encode(info, rowless, memory)
    cut = [tuple(t[:, 4 : 4 + count] for t in pair) for pair in kv]
    assert (bytes(memory[: sum(sizes)]), sizes) == encode(codec, info, cut)


def test_one_row_expanded_over_all_tokens_is_coded_as_its_copies(codec: Codec, dtype: str) -> None:
    layout, count = KVLayout.uniform(1, 2, 16, dtype), 9
    info = block_info(layout, count)
    ((k, v),) = random_kv(1, layout)
    expanded = [(k.expand(2, count, 16), v.expand(2, count, 16))]
    assert expanded[0][0].stride(1) == 0
    assert same_kv(decode(codec, info, *encode(codec, info, expanded)), [(k.repeat(1, 9, 1), v.repeat(1, 9, 1))])


def test_a_strided_slice_of_the_result_is_filled_and_nothing_around_it(codec: Codec, dtype: str) -> None:
    layout, count = mixed_layout(dtype), 13
    info, kv = block_info(layout, count), random_kv(count, layout)
    whole = empty(layout, count + 10, fill=0x5A5A)
    slices = [tuple(t[:, 4 : 4 + count] for t in pair) for pair in whole]
    codec.decode(info, *_payload(encode(codec, info, kv)), KVView.of_layers(layout, slices))
    expected = [
        tuple(torch.cat([w[:, :4], t, w[:, 4 + count :]], dim=1) for w, t in zip(ws, ts, strict=True))
        for ws, ts in zip(empty(layout, count + 10, fill=0x5A5A), kv, strict=True)
    ]
    assert same_kv(whole, expected)


def test_a_transposed_result_is_filled(codec: Codec, dtype: str) -> None:
    layout, count = KVLayout.uniform(2, 3, 16, dtype), 12
    info, kv = block_info(layout, count), random_kv(count, layout)
    out = [tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in pair) for pair in empty(layout, count)]
    codec.decode(info, *_payload(encode(codec, info, kv)), KVView.of_layers(layout, out))
    assert same_kv(out, kv)


@pytest.mark.parametrize("wanted", [1, 7, 36, 37])
def test_the_first_tokens_of_a_block_can_be_decoded_alone(codec: Codec, dtype: str, wanted: int) -> None:
    layout = mixed_layout(dtype)
    info, kv = block_info(layout, 37), random_kv(37, layout)
    assert same_kv(decode(codec, info, *encode(codec, info, kv), wanted), kv, wanted)


def test_equal_blocks_give_equal_bytes_whatever_was_coded_in_between(codec: Codec, dtype: str) -> None:
    layout = KVLayout.uniform(2, 2, 32, dtype)
    info, kv = block_info(layout, 30), kv_of(range(30), layout)
    first = encode(codec, info, kv)
    encode(codec, block_info(layout, 64), random_kv(64, layout))
    assert encode(codec, info, kv) == first


def test_the_bound_holds_for_bits_that_cannot_be_compressed(codec: Codec, dtype: str) -> None:
    for count in (1, 2, 3, 31, 64, 257):
        for layout in (KVLayout.uniform(1, 1, 1, dtype), KVLayout.uniform(3, 2, 31, dtype), mixed_layout(dtype)):
            info = block_info(layout, count)
            payload, sizes = encode(codec, info, random_kv(count, layout))
            assert sum(sizes) == len(payload) <= codec.bound(info)


def test_encoding_writes_nothing_beyond_what_it_reports(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    info = block_info(layout, 16)
    memory = bytearray(b"\xa5" * (codec.bound(info) + 64))
    sizes = codec.encode(info, KVView.of_layers(layout, empty(layout, 16)), memoryview(memory)[: codec.bound(info)])
    assert bytes(memory[codec.bound(info) :]) == b"\xa5" * 64
    assert bytes(memory[sum(sizes) : codec.bound(info)]) == b"\xa5" * (codec.bound(info) - sum(sizes))


def test_coding_leaves_the_input_as_it_was(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    kv = random_kv(16, layout)
    before = [tuple(t.clone() for t in pair) for pair in kv]
    encode(codec, block_info(layout, 16), kv)
    assert same_kv(kv, before)


@pytest.mark.parametrize("cut", ["nothing-left", "one-byte-short", "half", "a-header-only"])
def test_a_payload_that_was_cut_is_refused(codec: Codec, cut: str) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    info = block_info(layout, 16)
    payload, sizes = encode(codec, info, random_kv(16, layout))
    left = {"nothing-left": 0, "one-byte-short": len(payload) - 1, "half": len(payload) // 2, "a-header-only": 32}[cut]
    with pytest.raises(CodecError):
        decode(codec, info, payload[:left], sizes)


@pytest.mark.parametrize("sizes", [(), (1,), (0, 0), (1, 2, 3), (1 << 40, 5), (-5, 5)])
def test_layer_sizes_that_contradict_the_payload_are_refused(codec: Codec, sizes: tuple[int, ...]) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    info = block_info(layout, 16)
    payload, _ = encode(codec, info, random_kv(16, layout))
    with pytest.raises(CodecError):
        decode(codec, info, payload, sizes)


def test_layer_sizes_with_the_right_sum_and_a_wrong_split_are_refused(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    info = block_info(layout, 16)
    payload, (first, second) = encode(codec, info, random_kv(16, layout))
    for sizes in ((first - 1, second + 1), (0, first + second), (first + second, 0), (-1, first + second + 1)):
        with pytest.raises(CodecError):
            decode(codec, info, payload, sizes)


def test_a_block_of_another_size_is_refused(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    payload, sizes = encode(codec, block_info(layout, 16), random_kv(16, layout))
    with pytest.raises(CodecError):
        decode(codec, block_info(layout, 15), payload, sizes)
    with pytest.raises(CodecError):
        decode(codec, block_info(layout, 17), payload, sizes)


def test_more_tokens_than_the_block_has_and_none_at_all_are_refused(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    info = block_info(layout, 16)
    payload, sizes = encode(codec, info, random_kv(16, layout))
    for count in (0, 17):
        with pytest.raises(CodecError):
            decode(codec, info, payload, sizes, count)


def test_a_view_of_another_layout_is_refused(codec: Codec) -> None:
    info = block_info(KVLayout.uniform(2, 2, 16), 16)
    payload, sizes = encode(codec, info, random_kv(16, info.layout))
    other = KVLayout.uniform(2, 2, 16, "float16")
    with pytest.raises(CodecError):
        codec.decode(info, memoryview(payload), sizes, KVView.of_layers(other, empty(other, 16)))


def test_damaged_bytes_decode_to_something_or_raise_and_never_write_outside(codec: Codec) -> None:
    """Whether a damaged payload is noticed is the record's checksum's matter; that nothing else happens is the
    codec's: no other exception, no byte outside the slice."""
    layout = KVLayout.uniform(2, 2, 16)
    info, kv = block_info(layout, 16), [tuple(t.cumsum(1) for t in pair) for pair in kv_of_smooth(layout, 16)]
    payload, sizes = encode(codec, info, kv)
    generator = np.random.default_rng(0)
    noticed = 0
    for trial in range(600):
        damaged = bytearray(payload)
        # Headers first: each of the first 32 bytes of each layer, then anywhere.
        where = [trial % 32, sizes[0] + trial % 32, int(generator.integers(len(payload)))][trial % 3]
        damaged[where] ^= 1 << int(generator.integers(8)) if trial % 2 else int(generator.integers(1, 256))
        whole = empty(layout, 18, fill=0x1234)
        try:
            slices = [tuple(t[:, 1:17] for t in pair) for pair in whole]
            codec.decode(info, memoryview(damaged), sizes, KVView.of_layers(layout, slices))
        except CodecError:
            noticed += 1
        edges = [tuple(torch.cat([t[:, :1], t[:, 17:]], dim=1) for t in pair) for pair in whole]
        assert same_kv(edges, empty(layout, 2, fill=0x1234))
    assert noticed or codec.name == "raw"


def test_noise_is_refused_or_decoded_but_never_fatal(codec: Codec) -> None:
    layout = KVLayout.uniform(2, 2, 16)
    info = block_info(layout, 16)
    generator = np.random.default_rng(1)
    for length in (0, 1, 16, 31, 32, 33, 64, 1000, 2048):
        payload = generator.bytes(2 * length)
        if [length, length] != info.layer_bytes():
            with pytest.raises(CodecError):
                decode(codec, info, payload, (length, length))


@pytest.mark.parametrize("name", [name for name in codec_names() if name != "raw"])  # any bytes are a raw block
def test_a_foreign_chunk_of_the_right_shape_is_refused(name: str) -> None:
    codec = codec_by_name(name)
    layout = KVLayout.uniform(1, 1, 16)
    info = block_info(layout, 16)
    for magic in (b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\x1f\x8b\x08\x00", struct.pack("<Q", 1 << 60)):
        payload = magic.ljust(300, b"\x01")
        with pytest.raises(CodecError):
            decode(codec, info, payload, (300,))


def kv_of_smooth(layout: KVLayout, count: int):
    def ramp(heads: int, dim: int) -> torch.Tensor:
        numbers = torch.arange(heads * count * dim).remainder(7)
        return numbers.reshape(heads, count, dim).to(getattr(torch, layout.dtype))

    return [(ramp(x.heads, x.key_dim), ramp(x.heads, x.value_dim)) for x in layout.layers]


def _spread(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values with a gap after each one along `dim`."""
    wide = torch.zeros([2 * n if d == dim else n for d, n in enumerate(tensor.shape)], dtype=tensor.dtype)
    index = [slice(None)] * 3
    index[dim] = slice(None, None, 2)
    wide[tuple(index)] = tensor
    return wide[tuple(index)]


def _payload(encoded: tuple[bytes, tuple[int, ...]]) -> tuple[memoryview, tuple[int, ...]]:
    return memoryview(encoded[0]), encoded[1]
