"""The entropy coder: all twins write the reference's bytes, no stream harms the decoder, bad arguments are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from ranscases import HAVE, case
from threadruns import run_together

from kvstore.codecs.rans import reference as rans_reference
from kvstore.codecs.rans.coder import RansTables
from kvstore.errors import CodecError

pytestmark = pytest.mark.native

U8 = npt.NDArray[np.uint8]
BITS = [11, 12]


@pytest.fixture(params=BITS)
def bits(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def fitted(tables: RansTables, symbols: U8, classes: U8, twin: str, room: int) -> bytes | None:
    """The stream, if it fits `room` bytes: dirty memory at an odd address, with a guard on each side."""
    memory = np.full(room + 14, 0xA5, np.uint8)
    size = tables.encode_into(symbols, classes, memory[7 : 7 + room], level=twin)
    assert (memory[:7] == 0xA5).all()
    assert (memory[7 + room :] == 0xA5).all()
    return None if size is None else memory[7 : 7 + size].tobytes()


def encoded(tables: RansTables, symbols: U8, classes: U8, twin: str) -> bytes:
    stream = fitted(tables, symbols, classes, twin, tables.bound(len(symbols)))
    assert stream is not None
    return stream


def decoded(tables: RansTables, stream: bytes, n: int, classes: U8, twin: str) -> U8:
    memory = np.full(n + 14, 0xA5, np.uint8)
    try:
        tables.decode_into(stream, classes, memory[7 : 7 + n], level=twin)
    finally:
        assert (memory[:7] == 0xA5).all()
        assert (memory[7 + n :] == 0xA5).all()
    return memory[7 : 7 + n]


def check(freqs: npt.NDArray[np.uint16], symbols: U8, classes: U8, bits: int, twins: list[str]) -> None:
    rows = freqs.tolist()
    expected = rans_reference.encode(rows, bits, symbols.tobytes(), classes.tobytes())
    back = rans_reference.decode(rows, bits, expected, len(symbols), classes.tobytes())
    assert back == symbols.tobytes()
    tables = RansTables(freqs, bits)
    assert len(expected) <= tables.bound(len(symbols))
    for twin in twins:
        assert encoded(tables, symbols, classes, twin) == expected
        assert np.array_equal(decoded(tables, expected, len(symbols), classes, twin), symbols)


def test_every_length_up_to_200(bits: int) -> None:
    for n in range(201):
        check(*case(n, n, (1, 3, 32, 50, max(n, 1))[n % 5], 5, bits), bits, HAVE)


@settings(max_examples=part(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(0, 3000),
    period=st.one_of(st.integers(1, 200), st.integers(1, 4000)),
    tables=st.integers(1, 40),
    bits=st.sampled_from(BITS),
)
def test_any_case(seed: int, n: int, period: int, tables: int, bits: int) -> None:
    check(*case(seed, n, period, tables, bits), bits, HAVE)


@pytest.mark.parametrize(("n", "period", "tables"), [(50_000, 64, 256), (50_001, 1, 1), (40_031, 1500, 48)])
def test_long_messages(n: int, period: int, tables: int, bits: int) -> None:
    check(*case(1, n, period, tables, bits), bits, HAVE)


@pytest.mark.parametrize("period", [1, 2, 5, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 1056, 1057, 2999, 3000, 3001])
def test_a_period_is_the_same_as_all_classes_written_out(period: int, twin: str) -> None:
    freqs, symbols, classes = case(period, 3000, period, 9, 12)
    tables = RansTables(freqs, 12)
    stream = encoded(tables, symbols, classes, twin)
    assert stream == encoded(tables, symbols, np.resize(classes, 3000), twin)
    assert np.array_equal(decoded(tables, stream, 3000, classes, twin), symbols)


def test_frequencies_of_all_sizes_divide_exactly(twin: str, bits: int) -> None:
    """The vector twins divide in floating point and correct the quotient."""
    every = 1 << bits
    for low in range(1, every // 2 + 1, 173):
        freqs = np.array([[low, every - low], [every - 1, 1], [low, every - low]], np.uint16)
        symbols = np.random.default_rng(low).integers(0, 2, 1000, dtype=np.uint8)
        check(freqs_256(freqs), symbols, np.array([0, 1, 2], np.uint8), bits, [twin])


def freqs_256(freqs: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    return np.pad(freqs, ((0, 0), (0, 256 - freqs.shape[1])))


def test_the_empty_message(twin: str) -> None:
    tables = RansTables(np.array([[2048]], np.uint16), 11)
    nothing = np.empty(0, np.uint8)
    assert tables.encode_into(nothing, nothing, nothing, level=twin) == 0
    assert len(tables.decode(b"", 0, nothing)) == 0
    with pytest.raises(CodecError):
        tables.decode(b"\0\0", 0, nothing)


def test_a_certain_symbol_costs_nothing(twin: str) -> None:
    tables = RansTables(np.array([[2048]], np.uint16), 11)
    symbols, classes = np.zeros(100_000, np.uint8), np.zeros(1, np.uint8)
    assert len(encoded(tables, symbols, classes, twin)) == 128


def test_room_is_counted_to_the_byte(twin: str, bits: int) -> None:
    for n in (1, 20, 40, 64, 500):
        freqs, symbols, classes = case(n, n, 7, 4, bits)
        tables = RansTables(freqs, bits)
        stream = encoded(tables, symbols, classes, twin)
        for room in range(len(stream), min(len(stream) + 200, tables.bound(n))):
            assert fitted(tables, symbols, classes, twin, room) == stream
        for room in {0, 1, 127, 128, *range(max(0, len(stream) - 100), len(stream))} - {len(stream)}:
            assert fitted(tables, symbols, classes, twin, room) is None


@pytest.mark.parametrize("place", [0, 1, 31, 32, 63, 64, 95, 96, 99])
def test_a_symbol_of_frequency_zero_is_refused(place: int, twin: str) -> None:
    tables = RansTables(np.array([[1024, 1024, 0]], np.uint16), 11)
    symbols = np.zeros(100, np.uint8)
    out = np.empty(tables.bound(100), np.uint8)
    assert tables.encode_into(symbols, symbols[:1], out, level=twin) is not None
    for bad in (2, 255):
        symbols[place] = bad
        with pytest.raises(ValueError, match="frequency 0"):
            tables.encode_into(symbols, np.zeros(1, np.uint8), out, level=twin)


@pytest.mark.parametrize("place", [0, 31, 32, 98, 99])
def test_a_class_without_a_table_is_refused(place: int, twin: str) -> None:
    tables = RansTables(np.array([[2048], [2048]], np.uint16), 11)
    symbols, classes = np.zeros(100, np.uint8), np.ones(100, np.uint8)
    stream = encoded(tables, symbols, classes, twin)
    for wrong in (classes[:0], np.where(np.arange(100) == place, 2, classes).astype(np.uint8)):
        with pytest.raises(ValueError, match="classes"):
            encoded(tables, symbols, wrong, twin)
        with pytest.raises(ValueError, match="classes"):
            decoded(tables, stream, 100, wrong, twin)
    # What lies behind the last symbol is not looked at.
    assert encoded(tables, symbols, np.append(classes, np.uint8(9)), twin) == stream


@pytest.mark.parametrize("n", [1, 33, 700])
def test_every_truncation_and_every_extension_is_an_error(n: int, twin: str) -> None:
    freqs, symbols, classes = case(n, n, 7, 5, 11)
    tables = RansTables(freqs, 11)
    stream = encoded(tables, symbols, classes, twin)
    assert np.array_equal(decoded(tables, stream, n, classes, twin), symbols)
    for length in range(1, len(stream)):
        with pytest.raises(CodecError):
            decoded(tables, stream[:length], n, classes, twin)
    for more in (b"\0", b"\0\0", stream, b"\xff" * 400):
        with pytest.raises(CodecError):
            decoded(tables, stream + more, n, classes, twin)


def outcome(call: Callable[[], U8 | bytes]) -> bytes | None:
    try:
        return bytes(call())
    except CodecError:
        return None


def test_bit_flips_are_noticed_or_change_the_message_as_in_the_reference(twin: str) -> None:
    freqs, symbols, classes = case(3, 90, 7, 5, 12)
    tables = RansTables(freqs, 12)
    stream = encoded(tables, symbols, classes, twin)
    noticed = 0
    for bit in range(8 * len(stream)):
        bad = bytearray(stream)
        bad[bit // 8] ^= 1 << (bit % 8)
        got = outcome(lambda bad=bad: decoded(tables, bytes(bad), 90, classes, twin))  # type: ignore[misc]
        args = (freqs.tolist(), 12, bytes(bad), 90, classes.tobytes())
        assert got == outcome(lambda args=args: rans_reference.decode(*args))  # type: ignore[misc]
        assert got != symbols.tobytes()
        noticed += got is None
    assert noticed > 7.9 * len(stream)


@settings(max_examples=part(150), deadline=None)
@given(data=st.binary(max_size=600), n=st.integers(0, 400), seed=st.integers(0, 99), valid=st.booleans())
def test_random_bytes_do_what_the_reference_does(data: bytes, n: int, seed: int, valid: bool) -> None:
    freqs, _, classes = case(seed, 0, 13, 6, 11)
    if valid and len(data) >= 128:  # first states that pass, so that the words are read
        states = np.frombuffer(data[:128], "<u4") % 0x7FFF8000 + 0x8000
        data = states.astype("<u4").tobytes() + data[128:]
    tables = RansTables(freqs, 11)
    expected = outcome(lambda: rans_reference.decode(freqs.tolist(), 11, data, n, classes.tobytes()))
    for twin in HAVE:
        out = np.empty(n, np.uint8)

        def run(twin: str = twin, out: U8 = out) -> U8:
            tables.decode_into(data, classes, out, level=twin)
            return out

        assert outcome(run) == expected


def test_a_stream_of_any_first_states_stays_within_its_memory(twin: str, bits: int) -> None:
    """Extreme states and words, for a message long enough for the fast path: an error, and the guards stand."""
    freqs, _, classes = case(8, 0, 64, 48, bits)
    tables = RansTables(freqs, bits)
    for state in (1 << 15, (1 << 31) - 1):
        for word in (0, 0xFFFF):
            for words in (0, 31, 32, 33, 2000):
                stream = np.full(32, state, "<u4").tobytes() + np.full(words, word, "<u2").tobytes()
                with pytest.raises(CodecError):
                    decoded(tables, stream, 2050, classes, twin)
    for state in (0, (1 << 15) - 1, 1 << 31, (1 << 32) - 1):
        with pytest.raises(CodecError):
            decoded(tables, np.full(32, state, "<u4").tobytes(), 100, classes, twin)


def test_bad_arguments_are_named() -> None:
    good = np.array([[2047, 1]], np.uint16)
    for freqs, bits in [
        (good, 12),
        (good, 10),
        (good[0], 11),
        (good.astype(np.int64), 11),
        (good[:0], 11),
        (np.array([[2047, 2]], np.uint16), 11),
        (np.tile(good, (257, 1)), 11),
        (np.full((1, 512), 4, np.uint16), 11),
        (np.array([[65535, 2049]], np.uint16), 11),
    ]:
        with pytest.raises(ValueError, match=r"freqs|prob_bits"):
            RansTables(freqs, bits)
    tables = RansTables(good, 11)
    a = np.zeros(64, np.uint8)
    for symbols, classes in [(a.astype(np.int64), a), (a[::2], a), (a.reshape(8, 8), a), (a, a.astype(np.uint16))]:
        with pytest.raises(ValueError, match=r"symbols|classes"):
            tables.encode(symbols, classes)
    memory = np.zeros(400, np.uint8)
    with pytest.raises(ValueError, match="overlaps"):
        tables.encode_into(memory[:64], a, memory)
    with pytest.raises(ValueError, match="out"):
        tables.encode_into(a, a, memoryview(bytes(400)))  # read-only
    with pytest.raises(ValueError, match="out"):
        tables.decode_into(tables.encode(a, a), a, memoryview(bytes(64)))
    with pytest.raises(ValueError, match="level"):
        tables.encode_into(a, a, memory, level="sse9")


def test_threads_share_tables() -> None:
    freqs, symbols, classes = case(5, 20_000, 64, 48, 11)
    tables = RansTables(freqs, 11)
    stream = tables.encode(symbols, classes)
    right = []

    def work() -> None:
        same = all(tables.encode(symbols, classes) == stream for _ in range(10))
        right.append(same and all(np.array_equal(tables.decode(stream, 20_000, classes), symbols) for _ in range(10)))

    run_together(*[work] * 4)
    assert right == [True] * 4
