"""Archives: what is packed is parsed, old bytes stay readable, anything else raises `CodecError`."""

from __future__ import annotations

from itertools import starmap

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.tokens.archive import TOKENS, Archive, Pass, cut_passes, passes_of, sum_of_cache, sum_of_tokens
from kvstore.codecs.tokens.text import Reader, Uniform, encode
from kvstore.errors import CodecError

PASSES = (Pass(40, 64), *[Pass(1, 1)] * 7, Pass(3, 3))
IDS = [(number * 7919) % 1000 for number in range(50)]
# Written once; decodes for ever.
GOLDEN = (
    "4b5641310100080098d399e32c036392000102030405060708090a0b0c0d0e0fae709400f3cf6ccb0000000000000000000000000000"
    "00000002e807032840010101070303014173340097f20900659794d8c35b25c98a20ecc403fcd58bcbcc1d4126d96823b6935741a558"
    "5807a33d2fab165371aab8fe1d75bde889500fc77d2d8e673c18728274686520626f6479"
)


def _archive() -> Archive:
    even, tokens = Uniform(1000), np.array(IDS, np.uint32)
    text = encode([even.interval(token) for token in IDS])
    identity = bytes(range(16))
    return Archive(TOKENS, identity, PASSES, 1000, False, 2, sum_of_tokens(tokens), bytes(16), text, b"the body")


def test_what_is_packed_is_parsed() -> None:
    assert Archive.parse(_archive().pack()) == _archive()
    assert Archive.parse(memoryview(_archive().pack())).count == 50


def test_old_bytes_are_read_for_ever() -> None:
    found = Archive.parse(bytes.fromhex(GOLDEN))
    reader, even = Reader(found.text), Uniform(found.vocabulary)
    assert [reader.take(even) for _ in range(found.count)] == IDS
    reader.finish()
    assert found == _archive()


def test_single_passes_take_no_room() -> None:
    answer = tuple(starmap(Pass, [(1, 1)] * 5000))
    short, long = (Archive(8, bytes(16), each, 9, True, 0, bytes(8), bytes(16), b"", b"") for each in (PASSES, answer))
    assert len(long.pack()) <= len(short.pack())
    assert Archive.parse(long.pack()).count == 5000


@pytest.mark.parametrize("at", range(16, 78))
def test_fields_out_of_range_are_refused(at: int) -> None:
    """Every byte behind the head set to its largest, with a checksum that fits: no field may ask for memory."""
    data = bytearray(_archive().pack())
    data[at : at + 5] = b"\xff\xff\xff\xff\x7f"
    data[8:16] = xxhash.xxh3_64_intdigest(data[16:]).to_bytes(8, "little")
    try:
        found = Archive.parse(bytes(data))
    except CodecError:
        return
    assert found.count <= 1 << 22
    assert len(found.text) + len(found.body) <= len(data)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        Archive.parse(data)


def test_damage_and_other_versions_are_told_apart() -> None:
    data = bytearray(_archive().pack())
    data[-1] ^= 1
    with pytest.raises(CodecError, match="damaged"):
        Archive.parse(bytes(data))
    data[4] = 2
    with pytest.raises(CodecError, match="version 2"):
        Archive.parse(bytes(data))


def test_a_pass_takes_the_place_of_what_it_computes_again() -> None:
    assert passes_of([(0, 300), (256, 44), (300, 1), (301, 1)]) == (Pass(256, 300), Pass(44, 44), *[Pass(1, 1)] * 2)
    assert passes_of([(0, 3), (3, 3), (0, 5)]) == (Pass(5, 5),)
    with pytest.raises(ValueError, match="begins at 0 to 3"):
        passes_of([(0, 3), (4, 1)])


def test_passes_are_cut_to_the_tokens() -> None:
    assert cut_passes(PASSES, 42) == (Pass(40, 64), Pass(1, 1), Pass(1, 1))
    with pytest.raises(ValueError, match="51 tokens"):
        cut_passes(PASSES, 51)


def test_the_sum_of_a_cache_follows_its_bits() -> None:
    k, v = torch.randn(2, 2, 5, 8).bfloat16()
    assert sum_of_cache(((k, v),)) == sum_of_cache(((k.transpose(0, 1).contiguous().transpose(0, 1), v),))
    changed = v.clone()
    changed.view(torch.int16)[1, 4, 7] ^= 1
    assert sum_of_cache(((k, v),)) != sum_of_cache(((k, changed),))
