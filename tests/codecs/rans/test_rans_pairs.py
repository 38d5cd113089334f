"""Two streams at once: what each alone gives, whatever their lengths, and damage to either is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part
from ranscases import HAVE, U8, random_freqs, random_symbols

from kvstore.codecs.rans import _rans
from kvstore.codecs.rans.coder import RansTables

pytestmark = pytest.mark.native

LENGTHS = st.sampled_from([0, 1, 31, 32, 33, 64, 300, 1000, 4096])
PERIODS = st.sampled_from([1, 7, 32, 64, 5000])


class Pair:
    """Two streams of the same tables."""

    def __init__(self, seed: int, lengths: tuple[int, int], periods: tuple[int, int], bits: int) -> None:
        rng = np.random.default_rng(seed)
        freqs = random_freqs(rng, 7, bits)
        coder = RansTables(freqs, bits)
        wide = np.zeros((7, 256), np.uint16)
        wide[:, : freqs.shape[1]] = freqs
        self.tables = _rans.Tables(wide, bits)
        self.classes = [rng.integers(0, 7, period, dtype=np.uint8) for period in periods]
        self.symbols = [random_symbols(rng, freqs, c, n) for n, c in zip(lengths, self.classes, strict=True)]
        self.streams = [coder.encode(s, c) for s, c in zip(self.symbols, self.classes, strict=True)]

    def decode(self, streams: list[bytes], level: str) -> list[U8] | None:
        """The symbols, written between guards; None if either stream is damaged."""
        memory = [np.full(len(s) + 14, 0xA5, np.uint8) for s in self.symbols]
        outs = [room[7 : 7 + len(s)] for room, s in zip(memory, self.symbols, strict=True)]
        given = [np.frombuffer(stream, np.uint8) for stream in streams]
        status = _rans.decode_pair(self.tables, given, self.classes, outs, level)
        for room in memory:
            assert (room[:7] == 0xA5).all()
            assert (room[-7:] == 0xA5).all()
        assert status in (0, _rans.DAMAGED)
        return outs if status == 0 else None

    def alone(self, number: int, stream: bytes) -> U8 | None:
        out = np.empty(len(self.symbols[number]), np.uint8)
        status = _rans.decode(self.tables, np.frombuffer(stream, np.uint8), self.classes[number], out, "scalar")
        return out if status == 0 else None


@settings(max_examples=part(80), deadline=None)
@given(st.integers(0, 1 << 20), st.tuples(LENGTHS, LENGTHS), st.tuples(PERIODS, PERIODS), st.sampled_from([11, 12]))
def test_both_are_what_each_alone_is(seed: int, lengths: tuple[int, int], periods: tuple[int, int], bits: int) -> None:
    pair = Pair(seed, lengths, periods, bits)
    for level in HAVE:
        found = pair.decode(pair.streams, level)
        assert found is not None
        for symbols, want in zip(found, pair.symbols, strict=True):
            assert np.array_equal(symbols, want)


@settings(max_examples=part(80), deadline=None)
@given(st.integers(0, 1 << 20), st.integers(0, 1), st.tuples(LENGTHS, LENGTHS))
def test_damage_to_either_is_found_as_alone(seed: int, which: int, lengths: tuple[int, int]) -> None:
    pair, rng = Pair(seed, lengths, (7, 5000), 12), np.random.default_rng(seed)
    for turn in range(10):
        bad = bytearray(pair.streams[which])
        if turn % 2 and bad:
            bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        else:
            bad = bad[: int(rng.integers(len(bad) + 1))] + rng.bytes(int(rng.integers(0, 40)))
        streams = list(pair.streams)
        streams[which] = bytes(bad)
        want = pair.alone(which, streams[which])
        for level in HAVE:
            found = pair.decode(streams, level)
            assert (found is None) == (want is None)
            if found is not None and want is not None:
                assert np.array_equal(found[which], want)
                assert np.array_equal(found[1 - which], pair.symbols[1 - which])


def test_unknown_classes_and_wrong_arrays_are_refused() -> None:
    pair = Pair(1, (100, 100), (7, 7), 12)
    streams, outs = [np.frombuffer(s, np.uint8) for s in pair.streams], [np.empty(100, np.uint8) for _ in range(2)]
    for level in HAVE:
        for wrong in (np.full(7, 9, np.uint8), np.empty(0, np.uint8)):
            for classes in ([pair.classes[0], wrong], [wrong, pair.classes[1]]):
                assert _rans.decode_pair(pair.tables, streams, classes, outs, level) == _rans.UNKNOWN_CLASS
    with pytest.raises(ValueError, match="two streams"):
        _rans.decode_pair(pair.tables, streams[:1], pair.classes, outs)
    with pytest.raises(ValueError, match="overlaps"):
        _rans.decode_pair(pair.tables, streams, pair.classes, [outs[0], pair.classes[0]])
