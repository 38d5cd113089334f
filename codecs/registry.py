"""The closed list of codecs. Numbers are written to disk and mean the same forever."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.codecs.base import Codec
from kvstore.codecs.entropy import EntropyCodec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.splitzip import SplitZipCodec
from kvstore.codecs.zstd import ZstdCodec
from kvstore.errors import UnknownCodec


class Registry:
    """Codecs by number and by name; both are unique."""

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._by_id: dict[int, Codec] = {}
        self._by_name: dict[str, Codec] = {}
        for codec in codecs:
            if codec.id in self._by_id or codec.name in self._by_name:
                raise ValueError(f"codec {codec.id} ({codec.name}) is registered already")
            if not 0 <= codec.id < 1 << 16:
                raise ValueError(f"codec {codec.name}: number {codec.id} does not fit 16 bits")
            self._by_id[codec.id] = codec
            self._by_name[codec.name] = codec

    def by_id(self, number: int) -> Codec:
        if number not in self._by_id:
            raise UnknownCodec(f"codec {number} is unknown; a newer kvstore may have written it")
        return self._by_id[number]

    def by_name(self, name: str) -> Codec:
        if name not in self._by_name:
            raise UnknownCodec(f"codec {name!r} is unknown; known are {', '.join(self.names())}")
        return self._by_name[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)


_REGISTRY = Registry([RawCodec(), SplitZipCodec(), EntropyCodec(), ZstdCodec()])


def codec_by_id(number: int) -> Codec:
    """The codec with this number. Raises `UnknownCodec`."""
    return _REGISTRY.by_id(number)


def codec_by_name(name: str) -> Codec:
    """The codec with this name. Raises `UnknownCodec` naming the known ones."""
    return _REGISTRY.by_name(name)


def codec_names() -> tuple[str, ...]:
    return _REGISTRY.names()
