"""Token ids, each with a distribution of its own over the whole vocabulary: rANS with one state.

The coder of `kvstore.codecs.rans` has 32 states, which would be a fifth of a text of a few hundred bytes, and tables of
256 symbols that are made beforehand. Here there are thousands of symbols, and what a token is coded with follows from
the tokens before it. So this is the same method (Duda, arXiv:1311.2540) in Python's integers: a microsecond a token,
beside a pass of the model for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import CodecError

BITS = 24  # frequencies of a distribution sum to at most 2**BITS
MOST_VOCABULARY = 1 << 22
_TOTAL, _LOW, _WORD = 1 << BITS, 1 << 32, 16
_STATE_BYTES = 7
_FIRST = 1  # the state before the first token: nothing is paid for a larger one


@dataclass(frozen=True)
class Interval:
    """What a token is coded as: `count` of the 2**24 slots, from `start` on. Immutable.

    Example:
        >>> Uniform(4).interval(3)
        Interval(start=12582912, count=4194304)
    """

    start: int
    count: int


class Distribution(Protocol):
    """How likely each token is, in integers. Immutable."""

    def interval(self, token: int) -> Interval:
        """Return the slots of a token."""

    def token_at(self, slot: int) -> int:
        """Return the token whose slots hold this one; `CodecError` if no token's do."""


class Uniform:
    """Every token is as likely as the others: what a text costs if nothing is known of it. Immutable.

    Example:
        >>> even = Uniform(50000)
        >>> even.token_at(even.interval(49999).start)
        49999
    """

    def __init__(self, vocabulary: int) -> None:
        """Raises `ValueError` for a vocabulary that is not of 1 to 2**22 tokens."""
        if not 1 <= vocabulary <= MOST_VOCABULARY:
            raise ValueError(f"vocabulary: expected 1 to {MOST_VOCABULARY} tokens, found {vocabulary}")
        self._vocabulary = vocabulary
        self._each = _TOTAL // vocabulary

    def interval(self, token: int) -> Interval:
        return Interval(token * self._each, self._each)

    def token_at(self, slot: int) -> int:
        token = slot // self._each
        if token >= self._vocabulary:
            raise CodecError(f"tokens: the text names token {token} of a vocabulary of {self._vocabulary}")
        return token


class Likely:
    """Tokens by the probabilities of a model. Immutable.

    Example:
        >>> likely = Likely(np.log([0.7, 0.2, 0.1]))
        >>> round(likely.interval(0).count / 2**24, 3), likely.token_at(2**24 - 3)
        (0.7, 2)
    """

    def __init__(self, logprobs: npt.NDArray[np.floating[Any]]) -> None:
        """logprobs: natural logarithms, `[vocabulary]`. Every token gets a slot, also one that cannot be.

        Raises:
            ValueError: they are not as many as a vocabulary may have, or not numbers.
        """
        scores = np.asarray(logprobs, np.float64)
        if scores.ndim != 1 or not 1 <= len(scores) <= MOST_VOCABULARY or np.isnan(scores).any():
            raise ValueError(f"logprobs: expected 1 to {MOST_VOCABULARY} numbers, found {scores.shape}")
        weights = np.exp(scores - scores.max())
        counts = np.floor(weights / weights.sum() * (_TOTAL - len(scores))).astype(np.int64) + 1
        counts[counts.argmax()] += _TOTAL - counts.sum()
        self._ends = counts.cumsum()

    def interval(self, token: int) -> Interval:
        start = int(self._ends[token - 1]) if token else 0
        return Interval(start, int(self._ends[token]) - start)

    def token_at(self, slot: int) -> int:
        return int(np.searchsorted(self._ends, slot, "right"))


def encode(intervals: Sequence[Interval]) -> bytes:
    """Return the text of tokens, given what each is coded as. No tokens give no bytes.

    Example:
        >>> even = Uniform(256)
        >>> len(encode([even.interval(token) for token in b"a text of bytes"]))  # one each, and the state
        19
    """
    if not intervals:
        return b""
    state, words = _FIRST, list[int]()
    for interval in reversed(intervals):
        # So it stays below 2**48, and is at least _LOW from the first word on.
        while state >= interval.count << (48 - BITS):
            words.append(state & 0xFFFF)
            state >>= _WORD
        state = (state // interval.count << BITS) + state % interval.count + interval.start
    return state.to_bytes(_STATE_BYTES, "little") + np.array(words[::-1], "<u2").tobytes()


class Reader:
    """Takes the tokens of a text in order. For one thread.

    Example:
        >>> even = Uniform(256)
        >>> reader = Reader(encode([even.interval(token) for token in b"hi"]))
        >>> [reader.take(even), reader.take(even)] == list(b"hi")
        True
        >>> reader.finish()
    """

    def __init__(self, text: bytes) -> None:
        """Raises `CodecError` if no text has this length or begins so."""
        if text and (len(text) < _STATE_BYTES or not len(text) % 2):
            raise CodecError(f"tokens: no text has {len(text)} bytes")
        self._state = int.from_bytes(text[:_STATE_BYTES], "little") if text else _FIRST
        self._words = np.frombuffer(text[_STATE_BYTES:], "<u2").tolist()
        self._at = 0

    def take(self, likely: Distribution) -> int:
        """Return the next token.

        Raises:
            CodecError: the text has ended, or it was not coded with this distribution.
        """
        if not self._state:
            raise CodecError("tokens: the text has ended")
        slot = self._state & (_TOTAL - 1)
        token = likely.token_at(slot)
        found = likely.interval(token)
        state = found.count * (self._state >> BITS) + slot - found.start
        while state < _LOW and self._at < len(self._words):
            state = state << _WORD | self._words[self._at]
            self._at += 1
        self._state = state
        return token

    def finish(self) -> None:
        """Check that the text ends here. Raises `CodecError` if it does not."""
        if self._state != _FIRST or self._at != len(self._words):
            raise CodecError("tokens: the text does not end with its last token")
