"""Views of keys and values: rows in memory, whoever owns it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
import xxhash
from cpulevels import cpu_levels
from hypothesis import given
from hypothesis import strategies as st
from kvcases import mixed_layout, random_kv, same_bits, same_kv

from kvstore import KVLayout, LayerLayout
from kvstore.codecs import KVView, _native
from kvstore.codecs.view import Packed

LAYOUT = mixed_layout("bfloat16")


def packed(layout: KVLayout, count: int) -> tuple[KVView, np.ndarray]:
    memory = np.full(count * layout.bytes_per_token, 0xEE, dtype=np.uint8)
    return KVView.packed(layout, count, memory.ctypes.data, memory), memory


def back(view: KVView) -> list[tuple[torch.Tensor, torch.Tensor]]:
    out = random_kv(view.tokens, view.layout, seed=77)
    view.copy_to(KVView.of_layers(view.layout, out))
    return out


def test_packed_memory_holds_the_tensors_in_order_without_gaps() -> None:
    kv = random_kv(6, LAYOUT)
    view, memory = packed(LAYOUT, 6)
    KVView.of_layers(LAYOUT, kv).copy_to(view)
    assert memory.tobytes() == b"".join(t.view(torch.uint8).numpy().tobytes() for pair in kv for t in pair)


def test_a_copy_there_and_back_keeps_every_bit() -> None:
    kv = random_kv(6, LAYOUT)
    view, _ = packed(LAYOUT, 6)
    KVView.of_layers(LAYOUT, kv).copy_to(view)
    assert same_kv(back(view), kv)


@given(st.integers(1, 20), st.data())
def test_narrow_is_the_slice_of_tokens(count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(1, count - start))
    kv = random_kv(count, LAYOUT)
    for view in (KVView.of_layers(LAYOUT, kv), packed_copy(kv, count)):
        expected = [tuple(t[:, start : start + length] for t in pair) for pair in kv]
        part = view.narrow(start, length)
        assert (part.tokens, part.nbytes) == (length, length * LAYOUT.bytes_per_token)
        assert same_kv(back(part), expected)


def packed_copy(kv: list, count: int) -> KVView:
    view, _ = packed(LAYOUT, count)
    KVView.of_layers(LAYOUT, kv).copy_to(view)
    return view


def test_a_slice_of_a_slice_counts_from_the_slice() -> None:
    kv = random_kv(20, LAYOUT)
    for view in (KVView.of_layers(LAYOUT, kv), packed_copy(kv, 20)):
        assert same_kv(back(view.narrow(5, 10).narrow(2, 3)), [tuple(t[:, 7:10] for t in pair) for pair in kv])
    tensors = KVView.of_layers(LAYOUT, kv).narrow(5, 10).narrow(2, 3).tensors()
    assert same_bits(tensors[1], kv[0][1][:, 7:10])


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 7), (6, 1), (7, 0), (2, -1)])
def test_a_slice_outside_of_the_view_is_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match="narrow"):
        KVView.of_layers(LAYOUT, random_kv(6, LAYOUT)).narrow(start, count)


@pytest.mark.parametrize("number", range(3))
def test_one_layer_is_a_view_of_one_layer(number: int) -> None:
    kv = random_kv(6, LAYOUT)
    for view in (KVView.of_layers(LAYOUT, kv), packed_copy(kv, 6)):
        layer = view.narrow(1, 4).layer(number)
        assert layer.layout == KVLayout((LAYOUT.layers[number],), LAYOUT.dtype, LAYOUT.rope)
        assert same_kv(back(layer), [tuple(t[:, 1:5] for t in kv[number])])


def test_copying_between_views_that_differ_is_refused() -> None:
    view = KVView.of_layers(LAYOUT, random_kv(6, LAYOUT))
    other_dtype = mixed_layout("float16")
    with pytest.raises(ValueError, match="same layout and number of tokens"):
        view.copy_to(packed(LAYOUT, 5)[0])
    with pytest.raises(ValueError, match="same layout and number of tokens"):
        view.copy_to(packed(other_dtype, 6)[0])


def test_strided_rows_are_copied_exactly_and_gaps_left_alone() -> None:
    layout = KVLayout.uniform(1, 3, 8)
    source = random_kv(5, layout)
    room = torch.full((7, 4, 16), 1.0, dtype=torch.bfloat16)  # [tokens, heads, dim], larger than needed in each
    target = room[1:6, :3, 4:12].transpose(0, 1)
    value = torch.empty(3, 5, 8, dtype=torch.bfloat16)
    KVView.of_layers(layout, source).copy_to(KVView.of_layers(layout, [(target, value)]))
    assert same_bits(target, source[0][0])
    mask = torch.ones_like(room, dtype=torch.bool)
    mask[1:6, :3, 4:12] = False
    assert bool((room[mask] == 1.0).all())


def test_a_source_whose_last_dimension_is_strided_is_read_exactly() -> None:
    layout = KVLayout.uniform(1, 2, 8)
    kv = random_kv(5, layout)
    odd = [tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in pair) for pair in kv]
    assert odd[0][0].stride(2) != 1
    assert same_kv(back(KVView.of_layers(layout, odd)), kv)


def test_a_target_whose_last_dimension_is_strided_is_refused() -> None:
    layout = KVLayout.uniform(1, 2, 8)
    kv = random_kv(5, layout)
    target = [tuple(torch.zeros(2, 8, 5, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))]
    with pytest.raises(ValueError, match="contiguous"):
        KVView.of_layers(layout, kv).copy_to(KVView.of_layers(layout, target))


def test_rows_of_one_value_need_no_contiguous_dimension() -> None:
    layout = KVLayout((LayerLayout(2, 1, 1),), "float32")
    kv = random_kv(5, layout)
    spread = torch.zeros(2, 5, 3)[:, :, ::3]
    KVView.of_layers(layout, kv).copy_to(KVView.of_layers(layout, [(spread, torch.zeros(2, 5, 1))]))
    assert same_bits(spread, kv[0][0])


def test_a_view_keeps_its_memory_alive() -> None:
    memory = np.zeros(6 * LAYOUT.bytes_per_token, dtype=np.uint8)
    gone = weakref.ref(memory)
    view = KVView.packed(LAYOUT, 6, memory.ctypes.data, memory).narrow(1, 2).layer(0)
    del memory
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_a_packed_view_has_no_tensors() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        packed(LAYOUT, 2)[0].tensors()


@pytest.mark.native
@pytest.mark.parametrize(
    ("target", "heads", "row_bytes"),
    [
        (np.zeros((3, 1), np.int64), [1, 1], [4, 4]),
        (np.zeros((2, 2), np.int64), [1, 1], [4, 4]),
        (np.zeros(6, np.int64), [1, 1], [4, 4]),
        (np.zeros((3, 2), np.int64), [1, 1], [4]),
    ],
)
def test_row_tables_of_other_shapes_are_refused_by_the_extension(target, heads, row_bytes) -> None:
    source = np.zeros((3, 2), np.int64)
    with pytest.raises(ValueError, match="expected"):
        _native.copy_rows(target, source, np.array(heads, np.uint32), np.array(row_bytes, np.uint32), 1)


@pytest.mark.native
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans())
def test_the_extension_copies_what_numpy_copies(
    heads: int, count: int, row: int, wide_in: bool, wide_out: bool, unlock: bool
) -> None:
    """Against numpy's strided assignment, with and without gaps between rows."""
    source = np.arange(heads * count * 2 * row, dtype=np.uint32).astype(np.uint8).reshape(heads, count, 2 * row)
    source = source[:, :, :row] if wide_in else np.ascontiguousarray(source[:, :, :row])
    room = np.full((heads, count, row + 3 * wide_out), 0xEE, np.uint8)
    expected = room.copy()
    expected[:, :, :row] = source
    tables = [np.array([[a.ctypes.data], [a.strides[0]], [a.strides[1]]], np.int64) for a in (room, source)]
    _native.copy_rows(*tables, np.array([heads], np.uint32), np.array([row], np.uint32), count, unlock=unlock)
    assert np.array_equal(room, expected)


@pytest.mark.native
@pytest.mark.parametrize("row", [1, 2, 63, 64, 65, 127, 128, 129, 192, 200])
@pytest.mark.parametrize("count", [1, 2, 3, 64])
@pytest.mark.parametrize("gap", [0, 5, 64])
def test_copies_past_the_caches_write_the_rows_and_nothing_else(row: int, count: int, gap: int) -> None:
    """At every place in a line of the cache, so that heads and tails of every length are written."""
    rng = np.random.default_rng([row, count, gap])
    heads, shape = 2, [np.array([2], np.uint32), np.array([row], np.uint32)]
    source = rng.integers(0, 256, (heads, count, row), np.uint8)
    memory = np.empty(64 + heads * count * (row + gap) + 64, np.uint8)
    for place in range(64):
        memory[:] = 0xEE
        begin = (place - memory.ctypes.data) % 64
        room = memory[begin : begin + heads * count * (row + gap)].reshape(heads, count, row + gap)
        tables = [np.array([[a.ctypes.data], [a.strides[0]], [a.strides[1]]], np.int64) for a in (room, source)]
        _native.copy_rows(*tables, *shape, count, large=True)
        assert np.array_equal(room[:, :, :row], source)
        room[:, :, :row] = 0xEE
        assert (memory == 0xEE).all()


def test_parts_of_large_views_are_large() -> None:
    layout = KVLayout.uniform(2, 2, 64, "float32")
    least = (16 << 20) // layout.bytes_per_token
    large, small = (KVView.packed(layout, tokens, 0, None) for tokens in (least, least - 1))
    for view, expected in ((large, True), (small, False)):
        parts = [view, view.narrow(5, 1), view.layer(1), view.narrow(5, 1).layer(0)]
        assert [part.large for part in parts] == [expected] * 4


def test_a_large_copy_is_the_same() -> None:
    layout = KVLayout.uniform(1, 3, 40, "bfloat16")
    count = (16 << 20) // layout.bytes_per_token + 7
    kv = random_kv(count, layout)
    copy, memory = packed(layout, count)
    KVView.of_layers(layout, kv).copy_to(copy)
    assert memory.tobytes() == b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in kv[0])
    for start, tokens in ((0, 1), (3, 61), (count - 5, 5)):
        back = random_kv(tokens, layout)
        copy.narrow(start, tokens).copy_to(KVView.of_layers(layout, back))
        assert all(same_bits(a, b[:, start : start + tokens]) for a, b in zip(back[0], kv[0], strict=True))


def test_tensors_that_are_not_on_the_cpu_have_no_rows() -> None:
    kv = [tuple(t.to("meta") for t in pair) for pair in random_kv(3, LAYOUT)]
    assert not KVView.of_layers(LAYOUT, kv, checked=True).on_cpu
    assert KVView.of_layers(LAYOUT, random_kv(3, LAYOUT)).on_cpu


@given(st.integers(1, 20), st.data())
def test_packing_and_unpacking_is_what_copies_to_and_from_a_packed_view_are(count: int, data: st.DataObject) -> None:
    wanted, unlock = data.draw(st.integers(0, count)), data.draw(st.booleans())
    kv, (view, expected) = random_kv(count, LAYOUT), packed(LAYOUT, count)
    KVView.of_layers(LAYOUT, kv).copy_to(view)
    memory = bytearray(expected.nbytes + 3)
    KVView.of_layers(LAYOUT, kv).pack(memoryview(memory), unlock)
    assert memory == expected.tobytes() + bytes(3)  # what is behind the rows stays
    found = random_kv(count, LAYOUT, seed=5)
    rest = part(found, wanted, count)
    KVView.of_layers(LAYOUT, found).narrow(0, wanted).unpack(memoryview(memory), count)
    assert same_kv(part(found, 0, wanted), part(kv, 0, wanted))
    assert same_kv(part(found, wanted, count), rest)


def part(kv: list, begin: int, end: int) -> list:
    return [tuple(t[:, begin:end].clone() for t in pair) for pair in kv]


def test_packed_memory_that_is_too_small_or_read_only_is_refused_and_nothing_is_written() -> None:
    kv, found = random_kv(4, LAYOUT), random_kv(4, LAYOUT, seed=5)
    view, memory = KVView.of_layers(LAYOUT, kv), bytearray(4 * LAYOUT.bytes_per_token - 1)
    with pytest.raises(ValueError, match="out: expected memory for all rows"):
        view.pack(memoryview(memory))
    assert not any(memory)
    with pytest.raises((ValueError, BufferError)):
        view.pack(memoryview(bytes(4 * LAYOUT.bytes_per_token)))
    target, before = KVView.of_layers(LAYOUT, found), [tuple(t.clone() for t in pair) for pair in found]
    with pytest.raises(ValueError, match="packed: expected memory for all rows"):
        target.unpack(memoryview(memory), 4)
    with pytest.raises(ValueError, match="wanted: expected at most"):
        target.unpack(memoryview(memory), 3)
    assert same_kv(found, before)
    strided = [(k.transpose(1, 2).contiguous().transpose(1, 2), v) for k, v in kv]
    with pytest.raises(ValueError, match="unpack: the last dimension"):
        KVView.of_layers(LAYOUT, strided).unpack(memoryview(bytearray(4 * LAYOUT.bytes_per_token)), 4)


@pytest.mark.native
@pytest.mark.parametrize("twin", cpu_levels())
@pytest.mark.parametrize("row", [1, 60, 241, 242, 1024, 1025, 4096])
def test_the_sums_of_what_is_packed_are_those_of_xxhash(twin: str, row: int) -> None:
    """Around a stripe of 64 bytes, a block of 1,024, and the 240 bytes below which the hash is another."""
    rng = np.random.default_rng(row)
    counts = [1, 4, 5, 17]
    sources = [rng.integers(0, 256, (count, row), np.uint8) for count in counts]
    outs = [bytearray(count * row + 1) for count in counts]
    tables = [np.array([[a.ctypes.data], [a.nbytes], [row]], np.int64) for a in sources]
    sums = _native.pack_all(outs, tables, np.array([1], np.uint32), np.array([row], np.uint32), counts, twin)
    for source, out, found in zip(sources, outs, sums, strict=True):
        assert bytes(out) == source.tobytes() + b"\0"
        assert found == (xxhash.xxh3_128_digest(source.tobytes()) if source.nbytes > 240 else None)


@pytest.mark.native
def test_packing_of_several_views_is_refused_as_a_whole() -> None:
    source, out = np.arange(8, dtype=np.uint8), bytearray(8)
    table = np.array([[source.ctypes.data], [8], [4]], np.int64)
    shape = np.array([1], np.uint32), np.array([4], np.uint32)
    with pytest.raises(ValueError, match="outs, sources and tokens"):
        _native.pack_all([out], [table, table], *shape, [2, 2])
    with pytest.raises(ValueError, match="outs: expected memory for all rows"):
        _native.pack_all([out, bytearray(7)], [table, table], *shape, [2, 2])
    assert not any(out)
    assert _native.pack_all([], [], *shape, []) == []


@given(st.integers(1, 20), st.data())
def test_unpacking_several_pieces_is_unpacking_each(room: int, data: st.DataObject) -> None:
    found, expected, pieces = random_kv(room, LAYOUT, seed=5), random_kv(room, LAYOUT, seed=5), []
    for number in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, room))
        wanted = data.draw(st.integers(0, room - at))
        count = wanted + data.draw(st.integers(0, 4))
        memory = bytearray(count * LAYOUT.bytes_per_token + 1)
        if count:
            KVView.of_layers(LAYOUT, random_kv(count, LAYOUT, seed=number)).pack(memoryview(memory))
        pieces.append(Packed(memoryview(memory), count, at, wanted))
        KVView.of_layers(LAYOUT, expected).narrow(at, wanted).unpack(memoryview(memory), count)
    KVView.of_layers(LAYOUT, found).unpack_all(pieces)
    assert same_kv(found, expected)


def test_pieces_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    kv = random_kv(4, LAYOUT)
    target, before = KVView.of_layers(LAYOUT, kv), [tuple(t.clone() for t in pair) for pair in kv]
    memory = memoryview(bytearray(3 * LAYOUT.bytes_per_token))
    good = Packed(memory, 3, 0, 3)
    for bad, why in (
        (Packed(memory, 4, 0, 3), "packed: expected memory for all rows"),
        (Packed(memory, 3, 0, 4), "wanted: expected at most"),
        (Packed(memory, 3, 2, 3), "at: the target has no such rows"),
        (Packed(memory, 3, 5, 0), "at: the target has no such rows"),
        (Packed(memory, 3, 1, 1 << 62), "at: the target has no such rows"),
    ):
        with pytest.raises(ValueError, match=why):
            target.unpack_all([good, bad])
        assert same_kv(kv, before)
    strided = [(k.transpose(1, 2).contiguous().transpose(1, 2), v) for k, v in kv]
    with pytest.raises(ValueError, match="unpack_all: the last dimension"):
        KVView.of_layers(LAYOUT, strided).unpack_all([good])
    with pytest.raises(ValueError, match="rows: only a view on the CPU"):
        KVView.of_layers(LAYOUT, [tuple(t.to("meta") for t in pair) for pair in kv], checked=True).unpack_all([good])


@pytest.mark.native
def test_lists_of_pieces_must_have_the_same_length() -> None:
    table, shape = np.zeros((3, 1), np.int64), (np.array([1], np.uint32), np.array([4], np.uint32))
    for tokens, at, wanted in (([], [0], [1]), ([1], [], [1]), ([1], [0], [])):
        with pytest.raises(ValueError, match="packed, tokens, at and wanted"):
            _native.unpack_all(table, 1, [bytearray(4)], *shape, tokens, at, wanted)
