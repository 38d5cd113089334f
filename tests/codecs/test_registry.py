"""Codec numbers mean the same for ever."""

from __future__ import annotations

import pytest

from kvstore.codecs import codec_by_id, codec_by_name, codec_names
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.registry import Registry
from kvstore.codecs.zstd import ZstdCodec
from kvstore.errors import CodecError, UnknownCodec

# Only ever added to: these numbers are on disks.
NUMBERS = {"raw": 0, "splitzip": 1, "entropy": 7, "zstd": 16}


def test_every_codec_has_its_number_for_ever() -> None:
    assert {name: codec_by_name(name).id for name in codec_names()} == NUMBERS


@pytest.mark.parametrize("name", NUMBERS)
def test_a_codec_is_found_by_number_and_by_name(name: str) -> None:
    codec = codec_by_name(name)
    assert codec.name == name
    assert codec_by_id(codec.id) is codec


@pytest.mark.parametrize("number", [2, 15, 17, 65535, -1, 1 << 40])
def test_an_unknown_number_is_a_codec_error(number: int) -> None:
    with pytest.raises(UnknownCodec, match=f"codec {number} is unknown; a newer kvstore may have written it"):
        codec_by_id(number)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownCodec, match="'gzip' is unknown; known are raw, splitzip, entropy, zstd"):
        codec_by_name("gzip")
    assert issubclass(UnknownCodec, CodecError)


class _Renamed(RawCodec):
    name = "other"


class _Renumbered(RawCodec):
    id = 5


class _TooHigh(RawCodec):
    id = 1 << 16
    name = "high"


@pytest.mark.parametrize("second", [RawCodec(), _Renamed(), _Renumbered()], ids=["both", "number", "name"])
def test_a_number_or_a_name_that_is_taken_is_refused(second: RawCodec) -> None:
    with pytest.raises(ValueError, match="registered already"):
        Registry([RawCodec(), ZstdCodec(), second])


def test_a_number_that_does_not_fit_the_record_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 16 bits"):
        Registry([_TooHigh()])
