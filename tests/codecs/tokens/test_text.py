"""The text of tokens: what is written is read, at its ideal length, and damage is told."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest

from kvstore.codecs.tokens.text import BITS, Distribution, Likely, Reader, Uniform, encode
from kvstore.errors import CodecError


def _case(vocabulary: int, count: int = 60) -> tuple[list[Distribution], list[int]]:
    """Distributions, every third of them even, and tokens, a third of them likely ones."""
    random = np.random.default_rng(vocabulary)
    found: list[Distribution] = []
    for number in range(count):
        few = np.full(vocabulary, 1e-12)
        few[random.integers(vocabulary, size=5)] = random.dirichlet(np.full(5, 0.3)) + 1e-9
        found.append(Likely(np.log(few)) if number % 3 else Uniform(vocabulary))
    return found, [
        each.token_at(int(random.integers(1 << BITS - 1))) if number % 2 else int(random.integers(vocabulary))
        for number, each in enumerate(found)
    ]


def _read(text: bytes, likely: list[Distribution]) -> list[int]:
    reader = Reader(text)
    tokens = [reader.take(each) for each in likely]
    reader.finish()
    return tokens


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 257, 49152, 1 << 20])
def test_what_is_written_is_read(vocabulary: int) -> None:
    likely, tokens = _case(vocabulary, 12 if vocabulary > 1 << 16 else 60)
    text = encode([each.interval(token) for each, token in zip(likely, tokens, strict=True)])
    assert _read(text, likely) == tokens


@pytest.mark.parametrize("vocabulary", [49152, 65793, 128256, 151936, 1 << 22])
def test_a_text_may_end_with_any_token(vocabulary: int) -> None:
    """One that is less likely than 2**-16 came back as others once, after few tokens that are as unlikely."""
    even = Uniform(vocabulary)
    for last in range(700):
        tokens = [5, 77, 1000, last]
        assert _read(encode([even.interval(token) for token in tokens]), [even] * 4) == tokens


def test_a_text_is_as_long_as_its_tokens_are_unlikely() -> None:
    likely, tokens = _case(49152, 200)
    intervals = [each.interval(token) for each, token in zip(likely, tokens, strict=True)]
    ideal = sum(BITS - math.log2(each.count) for each in intervals)
    assert ideal <= 8 * len(encode(intervals)) <= ideal + 32


def test_no_tokens_are_no_bytes() -> None:
    assert encode([]) == b""
    Reader(b"").finish()


def test_likely_gives_every_token_a_slot_and_all_slots_to_tokens() -> None:
    likely = Likely(np.array([-np.inf, 0.0, -50.0]))
    counts = [likely.interval(token).count for token in range(3)]
    assert min(counts) == 1
    assert sum(counts) == 1 << BITS
    assert [likely.token_at(slot) for slot in (0, 1, (1 << BITS) - 1)] == [0, 1, 2]


def test_a_damaged_text_is_told_or_ends_elsewhere() -> None:
    likely, tokens = _case(257)
    text = encode([each.interval(token) for each, token in zip(likely, tokens, strict=True)])
    for at in range(len(text)):
        damaged = bytearray(text)
        damaged[at] ^= 1 << at % 8
        with contextlib.suppress(CodecError):
            assert _read(bytes(damaged), likely) != tokens
    for cut in (text[:-2], text[:-1], text + b"\0\0", text[:4], b""):
        with pytest.raises(CodecError):
            _read(cut, likely)


@pytest.mark.parametrize("vocabulary", [0, -1, (1 << 22) + 1])
def test_a_vocabulary_out_of_range_is_refused(vocabulary: int) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        Uniform(vocabulary)
    if vocabulary >= 0:
        with pytest.raises(ValueError, match="logprobs"):
            Likely(np.zeros(vocabulary))


def test_logprobs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="logprobs"):
        Likely(np.array([0.0, np.nan]))
