"""Archives: one sequence's tokens and what its cache is made of again from, as bytes that describe themselves.

An archive says which tokens, in which passes the model computed their cache, and the checksum of that cache. What else
it takes to have the cache back bit for bit is the body, which is empty for codec 8: the model runs the same passes
again. FORMAT.md has the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.codecs.tokens.text import MOST_VOCABULARY
from kvstore.core.layout import KVLayers
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError

TOKENS = 8  # the codec's number
MAGIC, VERSION = b"KVA1", 1
MOST_TOKENS = 1 << 22
_HEAD = struct.Struct("<4sHHQ")  # magic, version, codec, checksum of what follows
_SUMS = struct.Struct("<16s8s16sBB")  # identity, of the tokens, of the cache, whether the model coded the text, threads


class Pass(NamedTuple):
    """One pass of a model: how many tokens it was given, and how many of its rows the cache kept, the first ones.

    A pass gives the same bits only with the same number of tokens. What stood in the rows that were not kept does not
    matter to the others.
    """

    kept: int
    given: int


@dataclass(frozen=True)
class Archive:
    """What an archive says. Immutable.

    Attributes:
        codec: how the cache comes back: `TOKENS`, by the same passes alone.
        identity: the first 16 bytes of the digest of the model's layout and weights.
        passes: how the cache was computed; their kept rows are its tokens.
        vocabulary: ids are below it.
        by_model: whether the text is coded by the model's probabilities, or all tokens are as likely.
        threads: of the CPU that computed it, at most 255, for some kernels split their sums by them; 0 for a GPU.
        tokens_sum: `sum_of_tokens`.
        cache_sum: `sum_of_cache`.
        text: the tokens, coded.
        body: what else the cache comes back from.

    Example:
        >>> archive = Archive(TOKENS, bytes(16), (Pass(3, 3),), 50, False, 2, bytes(8), bytes(16), b"text", b"")
        >>> Archive.parse(archive.pack()) == archive, archive.count
        (True, 3)
    """

    codec: int
    identity: bytes
    passes: tuple[Pass, ...]
    vocabulary: int
    by_model: bool
    threads: int
    tokens_sum: bytes
    cache_sum: bytes
    text: bytes
    body: bytes

    @property
    def count(self) -> int:
        """How many tokens the archive has."""
        return sum(each.kept for each in self.passes)

    def pack(self) -> bytes:
        """Return the bytes of the archive."""
        runs = _runs(self.passes)
        numbers = [self.vocabulary, len(runs), *(number for run in runs for number in run), len(self.text)]
        sums = _SUMS.pack(self.identity, self.tokens_sum, self.cache_sum, self.by_model, self.threads)
        rest = sums + b"".join(map(_varint, numbers)) + self.text + self.body
        return _HEAD.pack(MAGIC, VERSION, self.codec, xxhash.xxh3_64_intdigest(rest)) + rest

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Archive:
        """Return what the bytes of an archive say.

        Raises:
            CodecError: they are not those of an archive, or damaged, or of another version.
        """
        data = bytes(data)
        if len(data) < _HEAD.size + _SUMS.size or data[:4] != MAGIC:
            raise CodecError("archive: these bytes are not an archive")
        _, version, codec, check = _HEAD.unpack_from(data)
        if version != VERSION:
            raise CodecError(f"archive: version {version} is unknown; a newer kvstore may have written it")
        if xxhash.xxh3_64_intdigest(data[_HEAD.size :]) != check:
            raise CodecError("archive: the bytes do not match their checksum; they are damaged")
        identity, tokens_sum, cache_sum, mode, threads = _SUMS.unpack_from(data, _HEAD.size)
        numbers = _Numbers(data, _HEAD.size + _SUMS.size)
        vocabulary, runs = numbers.take(1, MOST_VOCABULARY), numbers.take(1, MOST_TOKENS)
        passes, left = list[Pass](), MOST_TOKENS
        for _ in range(runs):
            kept = numbers.take(1, left)
            given, times = numbers.take(kept, MOST_TOKENS), numbers.take(1, left // kept)
            passes.extend([Pass(kept, given)] * times)
            left -= kept * times
        size = numbers.take(0, len(data))
        end = numbers.at + size
        if mode > 1 or end > len(data):
            raise CodecError("archive: a field is out of range")
        text, body = data[numbers.at : end], data[end:]
        return cls(codec, identity, tuple(passes), vocabulary, bool(mode), threads, tokens_sum, cache_sum, text, body)


def passes_of(starts: Iterable[tuple[int, int]]) -> tuple[Pass, ...]:
    """Return the passes that a cache is left of, in order.

    Args:
        starts: of each pass, in the order of time, the tokens that the cache had before, and those that it was given.
            One that begins before the end of another takes its place from there on.

    Raises:
        ValueError: a pass begins behind the end of those before.

    Example:
        >>> passes_of([(0, 5), (3, 4), (7, 1)])
        (Pass(kept=3, given=5), Pass(kept=4, given=4), Pass(kept=1, given=1))
    """
    found = list[Pass]()
    end = 0
    for start, given in starts:
        if not 0 <= start <= end or given < 1:
            raise ValueError(f"passes: expected one that begins at 0 to {end}, found {given} tokens at {start}")
        while end > start:
            last = found.pop()
            end -= last.kept
            if end < start:
                found.append(Pass(start - end, last.given))
                end = start
        found.append(Pass(given, given))
        end += given
    return tuple(found)


def cut_passes(passes: Sequence[Pass], count: int) -> tuple[Pass, ...]:
    """Return the passes of the first `count` tokens.

    Raises:
        ValueError: the passes are of fewer tokens.

    Example:
        >>> cut_passes([Pass(3, 3), Pass(4, 4)], 5)
        (Pass(kept=3, given=3), Pass(kept=2, given=4))
    """
    found, left = list[Pass](), count
    for each in passes:
        if not left:
            break
        found.append(Pass(min(each.kept, left), each.given))
        left -= found[-1].kept
    if left:
        raise ValueError(f"passes: expected those of {count} tokens, found {count - left}")
    return tuple(found)


def sum_of_tokens(tokens: Tokens) -> bytes:
    """Return the checksum of token ids, 8 bytes: xxh3-64 of them as uint32, little endian."""
    return xxhash.xxh3_64_digest(np.ascontiguousarray(tokens, "<u4").data)


def sum_of_cache(layers: KVLayers) -> bytes:
    """Return the checksum of a cache, 16 bytes: xxh3-128 of K and V of each layer, `[heads, tokens, dim]`."""
    import torch

    found = xxhash.xxh3_128()
    for pair in layers:
        for tensor in pair:
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.digest()


def _runs(passes: Sequence[Pass]) -> list[tuple[int, int, int]]:
    """Equal passes that follow each other as (kept, given, times)."""
    runs = list[tuple[int, int, int]]()
    for kept, given in passes:
        times = 1
        if runs and runs[-1][:2] == (kept, given):
            times += runs.pop()[2]
        runs.append((kept, given, times))
    return runs


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


class _Numbers:
    """Reads numbers of seven bits a byte, the lowest first."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, least: int, most: int) -> int:
        value = 0
        for shift in range(0, 35, 7):
            if self.at == len(self._data):
                break
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                if not least <= value <= most:
                    break
                return value
        raise CodecError("archive: a number is out of range")
