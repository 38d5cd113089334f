"""Streams of several parts: the reference's bytes, decoded part by part, and hostile ones that stay harmless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from ranscases import HAVE, U8, Freqs, random_freqs, random_symbols

from kvstore.codecs.rans import _rans
from kvstore.codecs.rans import reference as rans_reference
from kvstore.codecs.rans.coder import RansDecoder, RansTables
from kvstore.errors import CodecError

pytestmark = pytest.mark.native

BITS = [11, 12]


@dataclass
class Case:
    freqs: Freqs
    bits: int
    symbols: list[U8]
    classes: list[U8]

    @property
    def tables(self) -> RansTables:
        return RansTables(self.freqs, self.bits)

    @property
    def parts(self) -> list[tuple[bytes, bytes]]:
        return [(s.tobytes(), c.tobytes()) for s, c in zip(self.symbols, self.classes, strict=True)]

    @property
    def counts(self) -> list[tuple[int, bytes]]:
        return [(len(s), c) for s, c in self.parts]

    def expected(self) -> tuple[bytes, list[int]]:
        return rans_reference.encode_parts(self.freqs.tolist(), self.bits, self.parts)


def make(seed: int, lengths: Sequence[int], periods: Sequence[int] | None = None, *, bits: int = 12) -> Case:
    """Parts of these lengths; a class for every symbol unless periods are given."""
    rng = np.random.default_rng(seed)
    freqs = random_freqs(rng, 7, bits)
    classes = [rng.integers(0, 7, period, dtype=np.uint8) for period in periods or lengths]
    symbols = [random_symbols(rng, freqs, c, n) for n, c in zip(lengths, classes, strict=True)]
    return Case(freqs, bits, symbols, classes)


def taken(decoder: RansDecoder, count: int, classes: U8, twin: str) -> U8:
    """The next part, between guards at an odd address."""
    memory = np.full(count + 14, 0xA5, np.uint8)
    try:
        decoder.part_into(classes, memory[7 : 7 + count], level=twin)
    finally:
        assert (memory[:7] == 0xA5).all()
        assert (memory[7 + count :] == 0xA5).all()
    return memory[7 : 7 + count]


def decoded(case: Case, stream: bytes, twin: str) -> list[bytes]:
    decoder = case.tables.decoder(stream)
    found = [taken(decoder, len(s), c, twin).tobytes() for s, c in zip(case.symbols, case.classes, strict=True)]
    decoder.finish()
    return found


def outcome(case: Case, stream: bytes, twin: str) -> list[bytes] | None:
    try:
        return decoded(case, stream, twin)
    except CodecError:
        return None


def expected_outcome(case: Case, stream: bytes) -> list[bytes] | None:
    try:
        return rans_reference.decode_parts(case.freqs.tolist(), case.bits, stream, case.counts)
    except CodecError:
        return None


def check(case: Case) -> None:
    stream, ends = case.expected()
    assert expected_outcome(case, stream) == [s.tobytes() for s in case.symbols]
    for twin in HAVE:
        assert case.tables.encode_parts(case.symbols, case.classes, level=twin) == (stream, ends)
        decoder = case.tables.decoder(stream)
        for symbols, classes, end in zip(case.symbols, case.classes, ends, strict=True):
            assert np.array_equal(taken(decoder, len(symbols), classes, twin), symbols)
            assert decoder.position == end
        decoder.finish()


@settings(max_examples=part(80), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    parts=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 500)), max_size=8),
    explicit=st.booleans(),
    bits=st.sampled_from(BITS),
)
def test_any_parts(seed: int, parts: list[tuple[int, int]], explicit: bool, bits: int) -> None:
    lengths = [n for n, _ in parts]
    check(make(seed, lengths, None if explicit else [period for _, period in parts], bits=bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lengths", [[4096] * 8, [1] * 200, [0, 33, 0, 0, 31, 0], [5000, 7, 5001], [32], [0], []])
def test_parts_of_many_lengths(lengths: list[int], bits: int) -> None:
    check(make(len(lengths), lengths, bits=bits))


def test_one_part_is_the_stream_of_encode(twin: str) -> None:
    case = make(1, [1000], [64])
    stream, ends = case.tables.encode_parts(case.symbols, case.classes, level=twin)
    assert stream == case.tables.encode(case.symbols[0], case.classes[0])
    assert ends == [len(stream)]
    assert np.array_equal(case.tables.decode(stream, 1000, case.classes[0]), case.symbols[0])


def test_parts_pay_the_states_once() -> None:
    case = make(2, [256] * 50)
    together = len(case.tables.encode_parts(case.symbols, case.classes)[0])
    alone = sum(len(case.tables.encode(s, c)) for s, c in zip(case.symbols, case.classes, strict=True))
    assert alone - together > 49 * 60


def test_classes_may_follow_from_the_part_before(twin: str) -> None:
    """What a codec does with it: the decoder knows a part's classes only when it has the one before."""
    rng = np.random.default_rng(3)
    freqs = random_freqs(rng, 256, 12)
    classes = [rng.integers(0, 256, 999, dtype=np.uint8)]
    for _ in range(5):
        classes.append(random_symbols(rng, freqs, classes[-1], 999))  # symbols of a part: the classes of the next
    tables = RansTables(freqs, 12)
    stream, _ = tables.encode_parts(classes[1:], classes[:-1], level=twin)
    decoder, known = tables.decoder(stream), classes[0]
    for expected in classes[1:]:
        known = taken(decoder, 999, known, twin)
        assert np.array_equal(known, expected)
    decoder.finish()


@pytest.mark.parametrize("bits", BITS)
def test_room_is_counted_to_the_byte(twin: str, bits: int) -> None:
    case = make(4, [40, 0, 64, 7], bits=bits)
    stream, ends = case.expected()
    native = _rans.Tables(case.freqs, bits)
    for room in range(len(stream) + 100):
        memory = np.full(room + 14, 0xA5, np.uint8)
        size, found = _rans.encode_parts(native, case.symbols, case.classes, memory[7 : 7 + room], twin)
        assert (memory[:7] == 0xA5).all()
        assert (memory[7 + room :] == 0xA5).all()
        assert size == (len(stream) if room >= len(stream) else _rans.NO_ROOM)
        if room >= len(stream):
            assert memory[7 : 7 + size].tobytes() == stream
            assert found == ends


def test_every_truncation_and_every_extension_is_an_error(twin: str) -> None:
    case = make(5, [50, 64, 0, 33])
    stream, _ = case.expected()
    assert outcome(case, stream, twin) is not None
    for length in range(len(stream)):
        assert outcome(case, stream[:length], twin) is None
    for more in (b"\0", b"\0\0", stream, b"\xff" * 400):
        assert outcome(case, stream + more, twin) is None


def test_bit_flips_do_what_the_reference_does(twin: str) -> None:
    case = make(6, [30, 40, 20])
    stream, _ = case.expected()
    noticed = 0
    for bit in range(8 * len(stream)):
        bad = bytearray(stream)
        bad[bit // 8] ^= 1 << (bit % 8)
        found = outcome(case, bytes(bad), twin)
        assert found == expected_outcome(case, bytes(bad))
        assert found != [s.tobytes() for s in case.symbols]
        noticed += found is None
    assert noticed > 7.5 * len(stream)  # the others are streams of other symbols


@settings(max_examples=part(100), deadline=None)
@given(data=st.binary(max_size=600), lengths=st.lists(st.integers(0, 150), max_size=4), valid=st.booleans())
def test_random_bytes_do_what_the_reference_does(data: bytes, lengths: list[int], valid: bool) -> None:
    case = make(7, lengths, bits=11)
    if valid and len(data) >= 128:  # first states that pass, so that the words are read
        states = np.frombuffer(data[:128], "<u4") % 0x7FFF8000 + 0x8000
        data = states.astype("<u4").tobytes() + data[128:]
    expected = expected_outcome(case, data)
    for twin in HAVE:
        assert outcome(case, data, twin) == expected


def test_parts_cut_elsewhere_are_noticed(twin: str) -> None:
    """The lanes begin anew with each part, so another division is another stream."""
    case = make(8, [100, 100])
    stream, _ = case.expected()
    joined = Case(case.freqs, case.bits, [np.concatenate(case.symbols)], [np.concatenate(case.classes)])
    assert outcome(joined, stream, twin) is None
    decoder = case.tables.decoder(stream)
    taken(decoder, 100, case.classes[0], twin)
    with pytest.raises(CodecError):
        decoder.finish()


def test_damage_is_for_ever(twin: str) -> None:
    case = make(9, [500, 500])
    stream, ends = case.expected()
    decoder = case.tables.decoder(stream[: ends[0] - 2])
    for count in (500, 1, 0):
        with pytest.raises(CodecError):
            taken(decoder, count, case.classes[0], twin)
    with pytest.raises(CodecError):
        decoder.finish()


def test_a_refused_class_takes_nothing(twin: str) -> None:
    case = make(10, [70, 70])
    stream, ends = case.expected()
    decoder = case.tables.decoder(stream)
    for classes in (np.full(70, 7, np.uint8), np.empty(0, np.uint8)):
        with pytest.raises(ValueError, match="classes"):
            taken(decoder, 70, classes, twin)
    for number in range(2):
        assert np.array_equal(taken(decoder, 70, case.classes[number], twin), case.symbols[number])
        assert decoder.position == ends[number]
    decoder.finish()
    with pytest.raises(ValueError, match="classes"):
        case.tables.encode_parts(case.symbols, [case.classes[0], np.full(70, 7, np.uint8)], level=twin)


def test_an_unused_symbol_of_any_part_is_refused(twin: str) -> None:
    tables = RansTables(np.array([[1024, 1024, 0]], np.uint16), 11)
    for place in range(3):
        symbols = [np.zeros(70, np.uint8) for _ in range(3)]
        classes = [np.zeros(1, np.uint8)] * 3
        tables.encode_parts(symbols, classes, level=twin)
        symbols[place][40] = 2
        with pytest.raises(ValueError, match="frequency 0"):
            tables.encode_parts(symbols, classes, level=twin)


def test_bad_arguments_are_named() -> None:
    case = make(11, [64, 64])
    tables, (stream, _) = case.tables, case.expected()
    with pytest.raises(ValueError, match="classes"):
        tables.encode_parts(case.symbols, case.classes[:1])
    with pytest.raises(ValueError, match="symbols"):
        tables.encode_parts([case.symbols[0], case.symbols[1].astype(np.int64)], case.classes)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="level"):
        tables.encode_parts(case.symbols, case.classes, level="sse9")
    memory = np.frombuffer(stream, np.uint8).copy()
    decoder = tables.decoder(memory)
    with pytest.raises(ValueError, match="overlaps"):
        decoder.part_into(case.classes[0], memory[:64])
    with pytest.raises(ValueError, match="out"):
        decoder.part_into(case.classes[0], memoryview(bytes(64)))
    with pytest.raises(ValueError, match="stream"):
        _rans.Decoder(_rans.Tables(case.freqs, 12), memory[::2])


def test_a_decoder_keeps_its_tables_and_its_stream() -> None:
    case = make(12, [5000])
    decoder = case.tables.decoder(bytearray(case.expected()[0]))
    held = [bytearray(b"\xff" * 9000) for _ in range(50)]  # whatever was freed is overwritten
    assert np.array_equal(decoder.part(case.classes[0], 5000), case.symbols[0])
    decoder.finish()
    assert held
