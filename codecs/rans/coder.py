"""Entropy coding of bytes, each with one of up to 256 frequency tables: interleaved rANS (Duda, arXiv:1311.2540).

A codec calibrates `freqs = quantise(histograms, bits)` once, keeps one `RansTables`, and codes every block with it.
Which table a symbol is coded with is given by `classes`, one byte a symbol, or fewer: they repeat, so for rows of
`dim` symbols with a table per column, `dim` bytes are enough. A stream may consist of parts with classes of their own,
which a decoder may derive from the parts before. The format of the stream is in csrc/rans/rans.h, and in
reference.py as a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvstore.codecs.rans._rans as _rans
from kvstore.errors import CodecError

U8 = npt.NDArray[np.uint8]
PROB_BITS = (11, 12)
SYMBOLS = 256
MAX_TABLES = 256
_MAX_TOTAL = 1 << 40  # of a histogram: what the comparison of losses leaves room for in 64 bits


def quantise(counts: npt.ArrayLike, prob_bits: int, *, floor: bool = False) -> npt.NDArray[np.uint16]:
    """Make frequencies that sum to 2**prob_bits out of histograms.

    The arithmetic is in integers, so the result is the same on every machine.

    Args:
        counts: integers `[..., symbols]`, not negative, at most 256 symbols; each row's sum below 2**40.
        prob_bits: 11 or 12.
        floor: give every symbol at least 1, so that anything can be coded. Otherwise only symbols that were counted
            get at least 1. A row of zeros becomes uniform.

    Returns:
        uint16 of the same shape.

    Raises:
        ValueError: names the argument that does not fit.

    Example:
        >>> quantise([3, 1, 0], 11)
        array([1536,  512,    0], dtype=uint16)
    """
    rows = np.asarray(counts)
    if rows.dtype.kind not in "iu" or rows.ndim < 1 or not 1 <= rows.shape[-1] <= SYMBOLS:
        raise ValueError(f"counts: expected integers [..., symbols <= {SYMBOLS}], found {rows.dtype} {rows.shape}")
    _check_bits(prob_bits)
    if rows.size and (rows.min() < 0 or rows.max() >= _MAX_TOTAL):
        raise ValueError(f"counts: expected 0 <= count < 2**40, found {rows.min()} to {rows.max()}")
    shape, rows = rows.shape, rows.reshape(-1, rows.shape[-1]).astype(np.int64)
    rows = np.where(rows.any(axis=1, keepdims=True), rows, 1)
    total = rows.sum(axis=1, keepdims=True)
    if rows.size and total.max() >= _MAX_TOTAL:
        raise ValueError("counts: expected sums below 2**40")
    every = 1 << prob_bits
    freqs = np.maximum(rows * every // total, (rows > 0) | floor)
    # What is missing or too much is at most one a symbol. It goes where it gains most, or comes from where it costs
    # least: one more than f saves count * log((f + 1) / f), about count / (f + 1/2).
    lines = np.arange(len(rows))
    while (missing := every - freqs.sum(axis=1)).any():
        more, less = missing > 0, missing < 0
        best = ((rows << 20) // (2 * freqs + 1)).argmax(axis=1)
        cost = np.where(freqs > 1, (rows << 20) // (2 * freqs - 1).clip(1), np.iinfo(np.int64).max).argmin(axis=1)
        freqs[lines[more], best[more]] += 1
        freqs[lines[less], cost[less]] -= 1
    done: npt.NDArray[np.uint16] = freqs.astype(np.uint16).reshape(shape)
    return done


class RansTables:
    """Frequency tables made ready for coding. Immutable and thread-safe.

    Coding releases the GIL; the arrays given must not be changed meanwhile.

    Attributes:
        freqs: uint16 `[tables, 256]`, read-only.
        prob_bits: 11 or 12.
        count: how many tables there are.

    Example:
        >>> tables = RansTables(quantise([[90, 9, 1]], 12), prob_bits=12)
        >>> symbols, classes = np.zeros(1000, np.uint8), np.zeros(1, np.uint8)
        >>> stream = tables.encode(symbols, classes)
        >>> len(stream) < 200, np.array_equal(tables.decode(stream, 1000, classes), symbols)
        (True, True)
    """

    def __init__(self, freqs: npt.NDArray[np.uint16], prob_bits: int) -> None:
        """Make tables. Each takes 9 KiB (11 bits) or 17 KiB (12 bits); decoding is fastest while those in use fit the
        second-level cache.

        Args:
            freqs: uint16 `[tables, symbols]`, both at most 256; each row sums to 2**prob_bits.
            prob_bits: 11 or 12.

        Raises:
            ValueError: names the argument that does not fit.
        """
        _check_bits(prob_bits)
        if not isinstance(freqs, np.ndarray) or freqs.dtype != np.uint16 or freqs.ndim != 2:
            raise ValueError("freqs: expected a uint16 array [tables, symbols]")
        if not (1 <= freqs.shape[0] <= MAX_TABLES and 1 <= freqs.shape[1] <= SYMBOLS):
            raise ValueError(f"freqs: expected at most {MAX_TABLES} tables of {SYMBOLS} symbols, found {freqs.shape}")
        wide = np.zeros((len(freqs), SYMBOLS), dtype=np.uint16)
        wide[:, : freqs.shape[1]] = freqs
        self._tables = _rans.Tables(wide, prob_bits)
        wide.flags.writeable = False
        self.freqs = wide  # [tables, 256]
        self.prob_bits = prob_bits
        self.count = len(freqs)

    @staticmethod
    def bound(count: int) -> int:
        """Return the most bytes that a stream of `count` symbols takes."""
        return _rans.bound(count)

    def encode(self, symbols: U8, classes: U8) -> bytes:
        """Return the stream of symbols.

        Args:
            symbols: uint8 `[n]`.
            classes: uint8 `[m]`; symbol i is coded with table `classes[i % m]`.

        Raises:
            ValueError: a class has no table, or a symbol has the frequency 0 in its table.
        """
        out = np.empty(self.bound(len(symbols)), dtype=np.uint8)
        size = self.encode_into(symbols, classes, out)
        assert size is not None  # it fits by the meaning of bound
        return out[:size].tobytes()

    def encode_into(self, symbols: U8, classes: U8, out: U8 | memoryview, *, level: str | None = None) -> int | None:
        """Write the stream into the beginning of `out`, as `encode` returns it.

        Args:
            symbols, classes: as for `encode`.
            out: writable memory; all of it may be overwritten.
            level: "scalar", "avx2", "avx512", "amx" or "neon", all of which write the same bytes; default is the best
                that the machine has and KVSTORE_CPU allows.

        Returns:
            The stream's length. None if `out` is too small.
        """
        size = _rans.encode(self._tables, symbols, classes, np.frombuffer(out, dtype=np.uint8), level)
        return self._length(size)

    def encode_parts(
        self, symbols: Sequence[U8], classes: Sequence[U8], *, level: str | None = None
    ) -> tuple[bytes, list[int]]:
        """Return one stream of several parts, and the bytes up to the end of each part's words.

        Args:
            symbols, classes: of each part, as for `encode`.
            level: as for `encode_into`.

        Raises:
            ValueError: as `encode`.
        """
        out = np.empty(self.bound(sum(map(len, symbols))), dtype=np.uint8)
        size, ends = _rans.encode_parts(self._tables, list(symbols), list(classes), out, level)
        length = self._length(size)
        assert length is not None  # as in encode
        return out[:length].tobytes(), ends

    def decoder(self, stream: U8 | bytes | memoryview) -> RansDecoder:
        """Return a decoder for a stream of parts, which must not be changed while the decoder is in use."""
        return RansDecoder(self._tables, self.count, np.frombuffer(stream, dtype=np.uint8))

    def decode(self, stream: U8 | bytes | memoryview, count: int, classes: U8) -> U8:
        """Return the symbols of a stream, uint8 `[count]`.

        Raises:
            CodecError: the bytes are not a stream of `count` symbols. See `decode_into`.
            ValueError: a class has no table.
        """
        out = np.empty(count, dtype=np.uint8)
        self.decode_into(stream, classes, out)
        return out

    def decode_into(
        self, stream: U8 | bytes | memoryview, classes: U8, out: U8 | memoryview, *, level: str | None = None
    ) -> None:
        """Decode as many symbols as `out` is long into it.

        Raises:
            CodecError: the bytes are not such a stream. `out` then holds undefined values. Most damage is noticed, but
                not all: a damaged stream can end in the right states by chance. Keep a checksum if it matters.
            ValueError: a class has no table.
        """
        data = np.frombuffer(stream, dtype=np.uint8)
        status = _rans.decode(self._tables, data, classes, np.frombuffer(out, dtype=np.uint8), level)
        if status == _rans.DAMAGED:
            raise CodecError(f"rans: {len(data)} bytes are not a stream of {len(out)} symbols coded with these tables")
        if status < 0:
            raise _unknown_class(self.count)

    def _length(self, size: int) -> int | None:
        if size == _rans.NO_ROOM:
            return None
        if size == _rans.UNUSED_SYMBOL:
            raise ValueError(
                "symbols: a symbol has the frequency 0 in its table; make tables with quantise(floor=True)"
            )
        if size < 0:
            raise _unknown_class(self.count)
        return size


class RansDecoder:
    """Decodes the parts of one stream in their order. `RansTables.decoder` makes it. For one thread at a time.

    Example:
        >>> tables = RansTables(quantise([[3, 1]], 11), prob_bits=11)
        >>> classes = np.zeros(1, np.uint8)
        >>> stream, ends = tables.encode_parts([np.array([0, 1], np.uint8), np.array([0], np.uint8)], [classes] * 2)
        >>> decoder = tables.decoder(stream)
        >>> decoder.part(classes, 2), decoder.part(classes, 1)
        (array([0, 1], dtype=uint8), array([0], dtype=uint8))
        >>> decoder.finish()
    """

    def __init__(self, tables: _rans.Tables, count: int, stream: U8) -> None:
        self._decoder = _rans.Decoder(tables, stream)
        self._count = count
        self._bytes = len(stream)

    def part(self, classes: U8, count: int) -> U8:
        """Return the symbols of the next part, uint8 `[count]`.

        Raises:
            CodecError: the stream is damaged. Every later call raises, too.
            ValueError: a class has no table. Nothing was decoded.
        """
        out = np.empty(count, dtype=np.uint8)
        self.part_into(classes, out)
        return out

    def part_into(self, classes: U8, out: U8 | memoryview, *, level: str | None = None) -> None:
        """Decode the next part into `out`, as many symbols as it is long. Raises as `part`; `out` is then undefined."""
        status = self._decoder.part(classes, np.frombuffer(out, dtype=np.uint8), level)
        if status == _rans.DAMAGED:
            raise CodecError(f"rans: {self._bytes} bytes are not a stream of these parts coded with these tables")
        if status < 0:
            raise _unknown_class(self._count)

    @property
    def position(self) -> int:
        """Bytes of the stream taken so far: the end of the last part."""
        return self._decoder.position

    def finish(self) -> None:
        """Check that the stream ends here. Most damage shows only now. Raises `CodecError` if it does not end."""
        if self._decoder.finish() != 0:
            raise CodecError(f"rans: {self._bytes} bytes are not a stream of these parts coded with these tables")


def _check_bits(prob_bits: int) -> None:
    if prob_bits not in PROB_BITS:
        raise ValueError(f"prob_bits: expected one of {PROB_BITS}, found {prob_bits}")


def _unknown_class(tables: int) -> ValueError:
    return ValueError(f"classes: expected at least one, each below {tables}, the number of tables")
