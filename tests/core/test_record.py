"""Records: what is sealed is parsed again, and what is not whole is refused before anything is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import xxhash
from cpulevels import cpu_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.config import PAGE_BYTES
from kvstore.core import _sums
from kvstore.core._sums import xxh3_128
from kvstore.core.record import (
    FLAG_PINNED,
    FLAG_SUMS,
    HEADER_BYTES,
    MAGIC,
    Damage,
    DamagedRecord,
    Donor,
    RecordHeader,
    check_layers,
    check_payload,
    layer_sums,
    padded,
    parse,
    payload_of,
    payload_offset,
    seal,
)

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
HASH = st.binary(min_size=32, max_size=32)

headers = st.builds(
    RecordHeader,
    key=HASH,
    parent=HASH,
    namespace=HASH,
    codec=st.integers(0, (1 << 16) - 1),
    record_id=U64,
    start=U32,
    tokens=st.lists(U32, min_size=1, max_size=80).map(lambda x: np.array(x, np.uint32)),
    layer_sizes=st.lists(st.integers(0, 200), min_size=1, max_size=8).map(tuple),
    raw_bytes=U64,
    bits=st.floats(width=32, allow_nan=False),
    expiry=st.floats(allow_nan=False),
    flags=st.sampled_from([0, FLAG_PINNED, FLAG_SUMS]),
    profile=st.binary(min_size=16, max_size=16),
    error_bound=st.floats(0, width=32, allow_nan=False, allow_infinity=False),
    donors=st.lists(st.builds(Donor, U64, HASH), max_size=5).map(tuple),
)

# name of the field -> where it starts in the header (FORMAT.md, "Record")
LAYOUT = {
    "magic": 0,
    "version": 8,
    "codec": 10,
    "payload_offset": 12,
    "key": 16,
    "parent": 48,
    "donor": 80,
    "namespace": 112,
    "profile": 144,
    "record_id": 160,
    "raw_bytes": 168,
    "payload_bytes": 176,
    "count": 184,
    "start": 188,
    "layers": 192,
    "error_bound": 196,
    "bits": 200,
    "flags": 204,
    "expiry": 208,
    "donors": 216,
    "reserved": 218,
    "payload_sum": 224,
    "header_sum": 240,
}


DONORS = (Donor(11, b"d" * 32), Donor(1 << 40, b"e" * 32))


def simple(**changes: Any) -> RecordHeader:
    values: dict[str, Any] = {
        "key": bytes(range(32)),
        "parent": bytes(range(32, 64)),
        "namespace": bytes(range(64, 96)),
        "codec": 0,
        "record_id": 7,
        "start": 64,
        "tokens": np.arange(5, dtype=np.uint32),
        "layer_sizes": (100, 28),
        "raw_bytes": 128,
        "bits": 80.0,
    }
    return RecordHeader(**{**values, **changes})


def sealed(header: RecordHeader, page: bool = True) -> bytearray:
    size = padded(header.record_bytes) if page else header.record_bytes
    record = bytearray(np.random.default_rng(0).bytes(size))
    seal(header, memoryview(record))
    return record


def equal(one: RecordHeader, other: RecordHeader) -> bool:
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(RecordHeader) if f.name != "tokens"]
    return all(a == b for a, b in pairs) and np.array_equal(one.tokens, other.tokens)


def tables_end(header: RecordHeader) -> int:
    """Where layer sizes, tokens, donors and checksums of layers end."""
    sums = 8 * len(header.layer_sizes) * bool(header.flags & FLAG_SUMS)
    return HEADER_BYTES + 4 * (header.count + len(header.layer_sizes)) + 40 * len(header.donors) + sums


def read(data: bytes | bytearray) -> RecordHeader:
    header = parse(memoryview(data), len(data))
    check_payload(header, memoryview(data))
    return header


def damage_of(data: bytes | bytearray) -> Damage:
    """Why a record is refused; fails where it is not."""
    with pytest.raises(DamagedRecord) as error:
        read(data)
    return error.value.damage


def is_refused_before_anything_is_allocated(record: bytearray) -> None:
    """For its sizes, in a file that pretends to be large enough for anything."""
    tracemalloc.start()
    with pytest.raises(DamagedRecord) as error:
        parse(memoryview(record), 1 << 62)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.value.damage is Damage.LENGTH
    assert peak < 100_000


def resealed(record: bytearray, **changes: tuple[str, int]) -> bytearray:
    """The record with header fields changed and a header checksum that is right again: what a hostile hand can do."""
    changed = bytearray(record)
    for field, (code, value) in changes.items():
        struct.pack_into("<" + code, changed, LAYOUT[field], value)
    count, layers = struct.unpack_from("<I", changed, 184)[0], struct.unpack_from("<I", changed, 192)[0]
    (donors,) = struct.unpack_from("<H", changed, 216)
    table = bytes(changed[HEADER_BYTES : HEADER_BYTES + min(4 * (layers + count) + 40 * donors, len(changed))])
    changed[240:256] = xxhash.xxh3_128_digest(bytes(changed[:240]) + table)
    return changed


@given(headers, st.booleans())
def test_what_is_sealed_is_parsed_again(header: RecordHeader, page: bool) -> None:
    # float32 fields come back as the float32 that was stored
    assert equal(read(sealed(header, page)), header)


@given(headers)
def test_the_header_can_be_parsed_before_the_payload_is_there(header: RecordHeader) -> None:
    record = sealed(header)
    head = memoryview(record)[: header.payload_offset]
    assert equal(parse(head, len(record)), header)


@given(headers)
def test_the_payload_is_left_where_it_stands_and_the_padding_is_zero(header: RecordHeader) -> None:
    payload = np.random.default_rng(0).bytes(padded(header.record_bytes))[header.payload_offset : header.record_bytes]
    record = sealed(header)
    assert bytes(payload_of(header, memoryview(record))) == payload
    assert not any(record[header.record_bytes :])
    assert not any(record[tables_end(header) : header.payload_offset])


def test_payloads_start_at_multiples_of_64_after_the_tables() -> None:
    for layers in (1, 2, 30, 1024):
        for count in (1, 63, 64, 4096):
            for donors in (0, 1, 16, 65535):
                offset = payload_offset(layers, count, donors)
                assert offset % 64 == 0
                assert 0 <= offset - (HEADER_BYTES + 4 * (layers + count) + 40 * donors) < 64


def test_records_take_whole_pages() -> None:
    assert [padded(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]


def test_every_field_stands_where_the_format_says() -> None:
    header = simple(codec=3, expiry=2.5, flags=FLAG_PINNED, error_bound=0.5, donors=DONORS, profile=b"p" * 16)
    record = bytes(sealed(header))
    expected = {
        "magic": MAGIC,
        "version": struct.pack("<H", 1),
        "codec": struct.pack("<H", 3),
        "payload_offset": struct.pack("<I", header.payload_offset),
        "key": header.key,
        "parent": header.parent,
        "donor": DONORS[0].key,
        "namespace": header.namespace,
        "profile": header.profile,
        "record_id": struct.pack("<Q", 7),
        "raw_bytes": struct.pack("<Q", 128),
        "payload_bytes": struct.pack("<Q", 128),
        "count": struct.pack("<I", 5),
        "start": struct.pack("<I", 64),
        "layers": struct.pack("<I", 2),
        "error_bound": struct.pack("<f", 0.5),
        "bits": struct.pack("<f", 80.0),
        "flags": struct.pack("<I", 1),
        "expiry": struct.pack("<d", 2.5),
        "donors": struct.pack("<H", 2),
        "reserved": bytes(6),
        "payload_sum": xxhash.xxh3_128_digest(record[header.payload_offset : header.record_bytes]),
        "header_sum": xxhash.xxh3_128_digest(record[:240] + record[256 : 256 + 4 * 7 + 40 * 2]),
    }
    assert {name: record[LAYOUT[name] : LAYOUT[name] + len(value)] for name, value in expected.items()} == expected
    assert sum(map(len, expected.values())) == HEADER_BYTES
    table = struct.pack("<Q", 11) + b"d" * 32 + struct.pack("<Q", 1 << 40) + b"e" * 32
    assert record[256 + 4 * 7 : 256 + 4 * 7 + 80] == table


def test_without_donors_the_field_of_the_first_is_zeros() -> None:
    record = bytes(sealed(simple()))
    assert record[80:112] == bytes(32)
    assert record[216:224] == bytes(8)
    assert read(record).donors == ()


# ---- checksums of layers ---------------------------------------------------------------------------------------------


def with_sums(sizes: tuple[int, ...] = (100, 28), **changes: Any) -> RecordHeader:
    return simple(layer_sizes=sizes, raw_bytes=sum(sizes), flags=FLAG_SUMS, **changes)


@pytest.mark.parametrize("sizes", [(100, 28), (17,), (1000, 5000, 300), (0, 40), (16, 3)])
@pytest.mark.parametrize("donors", [(), DONORS])
def test_checksums_of_layers_stand_behind_the_donors(sizes: tuple[int, ...], donors: Any) -> None:
    header = with_sums(sizes, donors=donors)
    record = sealed(header)
    assert equal(read(record), header)
    begin, at, sums = tables_end(header) - 8 * len(sizes), header.payload_offset, b""
    for size in sizes:
        sums += struct.pack("<Q", xxhash.xxh3_64_intdigest(record[at : at + size]))
        at += size
    assert at == header.record_bytes
    assert record[begin : begin + len(sums)] == sums == layer_sums(header, memoryview(record))
    assert header.payload_offset == payload_offset(len(sizes), 5, len(donors), has_sums=True)
    assert header.payload_offset == -(-(begin + len(sums)) // 64) * 64
    assert record[224:240] == xxhash.xxh3_128_digest(sums)
    assert record[240:256] == xxhash.xxh3_128_digest(bytes(record[:240] + record[256 : begin + len(sums)]))


def test_layers_are_checked_one_by_one() -> None:
    header = with_sums((1000, 5000, 300))
    record, sums = sealed(header), layer_sums(header, memoryview(sealed(header)))
    record[header.payload_offset + 1000] ^= 1  # in the second layer
    payload = payload_of(header, memoryview(record))
    check_layers(header, sums, range(1), payload[:1000])
    check_layers(header, sums, range(2, 3), payload[6000:])
    for layers, coded in ((range(1, 2), payload[1000:6000]), (range(3), payload)):
        with pytest.raises(DamagedRecord) as error:
            check_layers(header, sums, layers, coded)
        assert error.value.damage is Damage.PAYLOAD_SUM
    assert damage_of(record) is Damage.PAYLOAD_SUM


def test_damage_anywhere_in_a_record_with_checksums_of_layers_is_found() -> None:
    header = with_sums()
    record = sealed(header)
    for at in [*range(tables_end(header)), *range(header.payload_offset, header.record_bytes)]:
        damaged = bytearray(record)
        damaged[at] ^= 4
        damage_of(damaged)


def test_without_checksums_of_layers_there_are_none() -> None:
    assert layer_sums(simple(), memoryview(sealed(simple()))) == b""


@pytest.mark.parametrize("level", cpu_levels())
def test_every_twin_sums_layers_as_the_library_does(level: str) -> None:
    data, sizes = np.random.default_rng(1).bytes(3 << 20), [17, 128, 129, 240, 241, 1024, 2_000_000]
    sizes.append(len(data) - sum(sizes))
    expected, at = b"", 0
    for size in sizes:
        expected += struct.pack("<Q", xxhash.xxh3_64_intdigest(data[at : at + size]))
        at += size
    assert _sums.xxh3_64_each(data, sizes, level) == expected
    part = sum(sizes[:3])
    assert _sums.xxh3_64_each(data[:part], sizes[:3], level) == expected[:24]  # with Python's lock


@pytest.mark.parametrize("sizes", [[16, 84], [50, 51], [50, 49], [], [1 << 40]])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes: "):
        _sums.xxh3_64_each(bytes(100), sizes)


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donors", [(), DONORS])
def test_every_flipped_bit_of_header_and_tables_is_noticed(donors: tuple[Donor, ...]) -> None:
    header = simple(donors=donors)
    record = sealed(header)
    end = tables_end(header)
    for where in range(end):
        for bit in range(8):
            record[where] ^= 1 << bit
            with pytest.raises(DamagedRecord):
                parse(memoryview(record), len(record))
            record[where] ^= 1 << bit
    read(record)


def test_every_flipped_bit_of_the_payload_is_noticed() -> None:
    header = simple()
    record = sealed(header)
    for where in range(header.payload_offset, header.record_bytes):
        for bit in range(8):
            record[where] ^= 1 << bit
            with pytest.raises(DamagedRecord) as error:
                read(record)
            assert error.value.damage is Damage.PAYLOAD_SUM
            record[where] ^= 1 << bit
    read(record)


@settings(max_examples=part(200))
@given(headers, st.data())
def test_any_bytes_written_over_the_header_are_noticed(header: RecordHeader, data: st.DataObject) -> None:
    record = sealed(header)
    end = tables_end(header)
    where = data.draw(st.integers(0, end - 1))
    new = data.draw(st.binary(min_size=1, max_size=end - where))
    before = bytes(record)
    record[where : where + len(new)] = new
    if bytes(record) == before:
        read(record)
    else:
        with pytest.raises(DamagedRecord):
            parse(memoryview(record), len(record))


@given(headers, st.data())
def test_a_record_that_was_cut_anywhere_is_noticed(header: RecordHeader, data: st.DataObject) -> None:
    record = sealed(header, page=False)
    cut = data.draw(st.integers(0, len(record) - 1))
    assert damage_of(record[:cut]) is Damage.LENGTH


@given(st.binary(max_size=600), st.integers(0, 1 << 40))
def test_noise_is_no_record(noise: bytes, limit: int) -> None:
    with pytest.raises(DamagedRecord):
        parse(memoryview(noise), limit)
    with pytest.raises(DamagedRecord):
        parse(memoryview(MAGIC + b"\x01\0" + noise), limit)


@pytest.mark.parametrize(
    ("field", "code", "value", "damage"),
    [
        ("magic", "Q", 0, Damage.MAGIC),
        ("version", "H", 2, Damage.VERSION),
        ("version", "H", 0, Damage.VERSION),
        ("payload_offset", "I", 0, Damage.LENGTH),
        ("payload_offset", "I", 384, Damage.LENGTH),
        ("payload_bytes", "Q", 1 << 63, Damage.LENGTH),
        ("payload_bytes", "Q", (1 << 64) - 320, Damage.LENGTH),
        ("payload_bytes", "Q", 127, Damage.FIELD),
        ("count", "I", 0xFFFFFFFF, Damage.LENGTH),
        ("layers", "I", 0xFFFFFFFF, Damage.LENGTH),
        ("layers", "I", 0, Damage.FIELD),
        ("flags", "I", 2, Damage.FIELD),
        ("flags", "I", 1 << 31, Damage.FIELD),
        ("donors", "H", 0xFFFF, Damage.LENGTH),
        ("donors", "H", 2, Damage.LENGTH),
        ("donor", "Q", 1, Damage.FIELD),
    ],
)
def test_a_hostile_field_with_a_right_checksum_is_refused(field: str, code: str, value: int, damage: Damage) -> None:
    assert damage_of(resealed(sealed(simple()), **{field: (code, value)})) is damage


@pytest.mark.parametrize(
    ("field", "code", "value", "damage"),
    [
        ("donors", "H", 0, Damage.LENGTH),
        ("donors", "H", 3, Damage.LENGTH),
        ("donors", "H", 0xFFFF, Damage.LENGTH),
        ("donor", "Q", 0, Damage.FIELD),
    ],
)
def test_hostile_donors_with_a_right_checksum_are_refused(field: str, code: str, value: int, damage: Damage) -> None:
    """Other counts than there are, and a first donor that is not the table's."""
    assert damage_of(resealed(sealed(simple(donors=DONORS)), **{field: (code, value)})) is damage


def test_donors_beyond_the_end_of_the_record_allocate_nothing() -> None:
    """A count that agrees with the offset, in a file that is too short for it."""
    offset = payload_offset(2, 5, 0xFFFF)
    record = resealed(sealed(simple(donors=DONORS)), donors=("H", 0xFFFF), payload_offset=("I", offset))
    is_refused_before_anything_is_allocated(record)


def test_a_record_of_the_most_donors_comes_back() -> None:
    header = simple(donors=tuple(Donor(n, bytes([n % 256]) * 32) for n in range(0xFFFF)))
    assert read(sealed(header)).donors == header.donors


def test_a_right_checksum_after_a_harmless_change_is_accepted() -> None:
    """The positive control of the test above."""
    assert read(resealed(sealed(simple()), record_id=("Q", 8))).record_id == 8


def test_no_tokens_at_all_is_refused() -> None:
    header = simple(tokens=np.zeros(0, np.uint32))
    assert damage_of(sealed(header)) is Damage.FIELD


@pytest.mark.parametrize(
    ("layers", "count"), [(0xFFFFFFFF, 0xFFFFFFFF), (1 << 30, 5), (2, 1 << 30), (1 << 31, 1 << 31)]
)
def test_hostile_sizes_allocate_nothing(layers: int, count: int) -> None:
    """Sizes that agree with each other and with the offset, from a file that pretends to be large enough."""
    offset = payload_offset(layers, count)
    record = resealed(
        sealed(simple()),
        layers=("I", layers),
        count=("I", count),
        payload_offset=("I", offset & 0xFFFFFFFF),
        payload_bytes=("Q", 1 << 40),
    )
    is_refused_before_anything_is_allocated(record)


def test_a_record_larger_than_allowed_is_refused() -> None:
    header = simple()
    record = sealed(header)
    assert parse(memoryview(record), header.record_bytes).count == 5
    with pytest.raises(DamagedRecord) as error:
        parse(memoryview(record), header.record_bytes - 1)
    assert error.value.damage is Damage.LENGTH


@pytest.mark.native
@pytest.mark.parametrize("twin", cpu_levels())
@pytest.mark.parametrize("size", [241, 255, 256, 1023, 1024, 1025, 1087, 1088, 1089, 4096, 100_001])
def test_the_sum_with_pythons_lock_is_that_of_xxhash(twin: str, size: int) -> None:
    data = np.random.default_rng(size).bytes(size + 3)
    for begin in range(3):  # any alignment
        part = memoryview(data)[begin : begin + size]
        assert xxh3_128(part, twin) == xxhash.xxh3_128_digest(part)


@pytest.mark.native
def test_the_sum_of_few_bytes_is_left_to_the_package() -> None:
    with pytest.raises(ValueError, match="at least 241"):
        xxh3_128(bytes(240))
    with pytest.raises(ValueError, match="level"):
        xxh3_128(bytes(300), "sse9")
