"""What reads files takes anything with right checksums (see parsers.py); the inputs that once reached something new,
and changes of them by chance."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import seeds
from length import FULL

sys.path.append(str(Path(__file__).parent))
import parsers

CORPUS = Path(__file__).with_name("corpus")
MOST_BYTES = 200 << 10  # of all corpora


@pytest.mark.parametrize("name", parsers.TARGETS)
def test_a_parser_takes_anything(name: str) -> None:
    rng = random.Random(seeds.of(name))
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    assert inputs
    runs = {"catalog": 20, "tsc": 100}.get(name, 300) * (20 if FULL else 1)
    tried = inputs[:: 1 if FULL or name != "catalog" else 4]
    for data in [*tried, *(parsers.changed(rng.choice(inputs), rng) for _ in range(runs))]:
        try:
            parsers.TARGETS[name](data)
        except Exception as error:
            raise AssertionError(f"{name}: {data.hex()}") from error


def test_the_corpora_are_small() -> None:
    assert 0 < sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) <= MOST_BYTES
