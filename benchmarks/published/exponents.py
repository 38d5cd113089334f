"""SplitZip as the paper has it, and as its ablations change it: exponents of bf16 coded by a table. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.codecs.aqua.higgs import pack, packed_size, unpack
from kvstore.codecs.splitzip.reference import encode_chunk

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
OFFSET_BYTES, BASE_BYTES = 4, 1  # of a chunk: where its escapes end; where its window begins
ESCAPED = 255  # in look-up tables


@dataclass(frozen=True)
class Form:
    """codes: how many there are, a power of two. sentinel: the last of them marks an escape, so that one exponent fewer
    has a code; else escapes have a code like others and are put right afterwards. chunk: values in which an escape's
    position counts; None: it counts in the whole tensor. escape: bytes of one, if not those of position and exponent.
    """

    codes: int = 16
    sentinel: bool = False
    chunk: int | None = 1024
    escape: int | None = None

    @property
    def bits(self) -> int:
        return self.codes.bit_length() - 1

    @property
    def entries(self) -> int:
        """Exponents that have a code."""
        return self.codes - self.sentinel

    def bytes_of(self, values: int, escapes: int) -> int:
        """Of a coded tensor, everything but the table."""
        position = 4 if self.chunk is None else 1 if self.chunk <= 256 else 2
        chunks = 0 if self.chunk is None else -(-values // self.chunk)
        return packed_size(values, self.bits) + values + chunks * OFFSET_BYTES + escapes * (self.escape or position + 1)


@dataclass(frozen=True)
class Coded:
    codes: Bytes
    rest: Bytes
    positions: npt.NDArray[np.int64]
    """Of escapes; in a tensor with a sentinel they follow from the codes and are not kept."""
    exponents: Bytes
    values: int


def exponents(values: Bits) -> Bytes:
    return (values >> 7).astype(np.uint8)


def counts(tensors: Sequence[Bits]) -> Counts:
    """How often each of the 256 exponents comes."""
    found: Counts = sum((np.bincount(exponents(x), minlength=256) for x in tensors), np.zeros(256, np.int64))
    return found


def most_frequent(found: Counts, entries: int) -> Bytes:
    """The exponents of a table, the most frequent first."""
    return np.argsort(-found, kind="stable")[:entries].astype(np.uint8)


def covered(found: Counts, table: Bytes) -> float:
    """Share of values whose exponent is in the table."""
    return float(found[table].sum() / found.sum())


def entropy(found: Counts) -> float:
    """Bits of an exponent."""
    shares = found[found > 0] / found.sum()
    return float(-(shares * np.log2(shares)).sum())


def encode(values: Bits, table: Bytes, form: Form) -> Coded:
    look_up = np.full(256, ESCAPED, np.uint8)
    look_up[table] = np.arange(len(table))
    found = exponents(values)
    codes = look_up[found]
    escapes = np.flatnonzero(codes == ESCAPED)
    codes[escapes] = form.codes - 1 if form.sentinel else 0
    rest = ((values >> 8) & 0x80 | values & 0x7F).astype(np.uint8)
    return Coded(pack(codes, form.bits), rest, escapes, found[escapes], len(values))


def decode(coded: Coded, table: Bytes, form: Form) -> Bits:
    codes = unpack(coded.codes, coded.values, form.bits)
    look_up = np.zeros(form.codes, np.uint8)
    look_up[: len(table)] = table
    found = look_up[codes]
    escapes = np.flatnonzero(codes == form.codes - 1) if form.sentinel else coded.positions
    found[escapes] = coded.exponents
    rest = coded.rest.astype(np.uint16)
    return (rest & 0x80) << 8 | found.astype(np.uint16) << 7 | rest & 0x7F


def sentinel_bytes(form: Form, values: int, escapes: int) -> int:
    """Of a coded tensor whose escapes keep no positions."""
    return packed_size(values, form.bits) + values + escapes


def window_bytes(values: Bits, chunk: int) -> tuple[int, int]:
    """With our windows instead of a table: the bytes of a tensor without its layer's header, and how many values have
    no code (those of chunks that keep all their exponents, too)."""
    found = exponents(values)
    size, escapes = packed_size(len(values), 4) + len(values), 0
    for begin in range(0, len(found), chunk):
        *_, listed, raw = encode_chunk(found[begin : begin + chunk], "bfloat16")
        size += OFFSET_BYTES + BASE_BYTES + len(listed)
        escapes += min(chunk, len(found) - begin) if raw else len(listed) // 3
    return size, escapes
