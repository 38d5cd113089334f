"""Streams of the entropy coder that were written once are decoded for ever, and written again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.codecs.rans.coder import RansTables

PATHS = sorted((Path(__file__).parents[2] / "golden" / "rans").glob("*.json"))


class Stream:
    """A golden file, taken apart."""

    def __init__(self, path: Path) -> None:
        found: dict[str, Any] = json.loads(path.read_text())
        self.tables = RansTables(np.array(found["freqs"], np.uint16), found["bits"])
        self.classes = np.array(found["classes"], np.uint8)
        self.symbols = np.frombuffer(bytes.fromhex(found["symbols"]), np.uint8)
        self.stream, self.parts = bytes.fromhex(found["stream"]), bytes.fromhex(found["parts"])
        self.ends: list[int] = found["ends"]
        half = len(self.symbols) // 2
        self.halves = [self.symbols[:half], self.symbols[half:]]
        self.of_halves = [self.classes, np.roll(self.classes, -half)]


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Stream:
    return Stream(request.param)


def test_there_are_streams_of_both_precisions() -> None:
    assert {Stream(path).tables.prob_bits for path in PATHS} == {11, 12}
    assert max(len(Stream(path).symbols) for path in PATHS) >= 1000


def test_a_golden_stream_decodes_to_its_symbols(golden: Stream) -> None:
    assert np.array_equal(golden.tables.decode(golden.stream, len(golden.symbols), golden.classes), golden.symbols)


def test_a_golden_stream_of_parts_decodes_to_its_symbols(golden: Stream) -> None:
    decoder = golden.tables.decoder(golden.parts)
    for symbols, classes, end in zip(golden.halves, golden.of_halves, golden.ends, strict=True):
        assert np.array_equal(decoder.part(classes, len(symbols)), symbols)
        assert decoder.position == end
    decoder.finish()


def test_encoding_today_gives_the_same_bytes(golden: Stream) -> None:
    assert golden.tables.encode(golden.symbols, golden.classes) == golden.stream
    assert golden.tables.encode_parts(golden.halves, golden.of_halves) == (golden.parts, golden.ends)
