"""KVTC (arXiv:2511.01815), from the paper: principal components of all layers and heads at once, keys without their
rotary embedding; bits shared out by dynamic programming; an entropy coder behind.

Fitted to the same windows as the other methods: the components to seven eighths of them, the bits and the tables to
the rest. The paper's entropy coder is DEFLATE. Here each cache takes whichever is less, that (zlib, level 9) or the
code length under tables that were fitted beforehand, one for 16 components, as an arithmetic coder would have it.
Means, components and tables are not counted, like what others fit beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers.quality.clock import Clock
from benchmarks.peers.quality.code_length import Tables
from benchmarks.peers.quality.data import Pairs
from benchmarks.peers.quality.kvtc_plan import (
    BITS,
    FLOAT,
    SIDE,
    UNIT,
    Group,
    Quantised,
    errors_of,
    plan,
    quantise,
    restore,
)
from kvstore.calibration.aqua.fit import Windows
from kvstore.core.layout import KVLayout
from kvstore.core.rope import rotate

Floats = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[Any]]
SINKS = 4  # never coded, so not fitted to
MEASURED = 8  # one window of so many to fit to is for bits and tables
SAMPLED = 4  # one token of so many of those
KINDS = tuple(BITS)


def rows_of(layout: KVLayout, pairs: Pairs, start: int, part: int) -> Floats:
    """Keys (part 0) or values of all layers beside each other, `[n, layers * heads * dim]`, keys without rotation."""
    n = pairs[0][0].shape[1]
    return _beside(layout, [pair[part].float().transpose(0, 1).reshape(n, -1).numpy() for pair in pairs], start, part)


def _beside(layout: KVLayout, rows: Sequence[Floats], start: int, part: int) -> Floats:
    positions = np.arange(start, start + len(rows[0]), dtype=np.int64)
    if part == 0:
        rows = [rotate(x, of.heads, positions, layout.rope, -1) for of, x in zip(layout.layers, rows, strict=True)]
    return np.concatenate(rows, axis=1)


def _window(dump: Windows, window: int, part: int) -> Floats:
    layers = range(len(dump.layout.layers))
    rows = [np.asarray(dump.layer(layer, window)[part], np.float32)[SINKS:] for layer in layers]
    return _beside(dump.layout, rows, SINKS, part)


def pairs_of(layout: KVLayout, keys: Floats, values: Floats, start: int) -> Pairs:
    """The inverse of `rows_of`, bfloat16."""
    n, at, found = len(keys), 0, []
    positions = np.arange(start, start + n, dtype=np.int64)
    for layer in layout.layers:
        width = layer.heads * layer.key_dim  # a value has as many: see `fit`
        k = rotate(np.ascontiguousarray(keys[:, at : at + width]), layer.heads, positions, layout.rope, 1)
        v = np.ascontiguousarray(values[:, at : at + width])
        k, v = (torch.from_numpy(x).view(n, layer.heads, -1).transpose(0, 1).bfloat16() for x in (k, v))
        found.append((k, v))
        at += width
    return found


def fit(dump: Windows) -> dict[str, npt.NDArray[Any]]:
    """Of keys "k" and values "v": `.mean`, `.vectors` `[width, width]`, greatest variance first, `.sample`, the
    components of tokens that these were not fitted to, and what groups of components lose there: `.groups` (start,
    size, kind) and `.errors`. ValueError for layers that are not alike."""
    if not dump.layout.is_uniform:
        raise ValueError("KVTC puts all layers beside each other: they must be alike")
    found: dict[str, npt.NDArray[Any]] = {}
    fitted = dump.windows - max(1, dump.windows // MEASURED)
    for part, name in enumerate("kv"):
        mean, vectors = _components(dump, fitted, part)
        rows = [_window(dump, window, part)[::SAMPLED] for window in range(fitted, dump.windows)]
        found[f"{name}.mean"], found[f"{name}.vectors"] = mean, vectors
        sample = ((np.concatenate(rows) - mean) @ vectors)[:, : len(mean) // UNIT * UNIT]
        errors = errors_of(sample)
        found[f"{name}.sample"], found[f"{name}.errors"] = sample, np.array(list(errors.values()))
        found[f"{name}.groups"] = np.array([(start, size, KINDS.index(kind)) for start, size, kind in errors])
    return found


def _components(dump: Windows, windows: int, part: int) -> tuple[Floats, Floats]:
    """The mean, and the principal components as columns."""
    width = sum(x.heads * x.key_dim for x in dump.layout.layers)
    total, gram, count = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width), 0
    for window in range(windows):
        x = torch.from_numpy(_window(dump, window, part))
        total, count = total + x.double().sum(0), count + len(x)
        gram.addmm_(x.T, x)
    mean = total / count
    covariance = (gram / count).double() - mean[:, None] * mean
    vectors = torch.linalg.eigh(covariance.float())[1].flip(1)
    return mean.float().numpy(), vectors.contiguous().numpy()


@dataclass(frozen=True)
class _Coded:
    """Keys, or values. table_bytes: the code length, instead of `deflated`."""

    tokens: int
    deflated: bytes
    table_bytes: int


class _Part:
    """The coder of keys, or of values. bits: of a value, before the entropy coder."""

    def __init__(self, arrays: Arrays, name: str, bits: float) -> None:
        self._mean, sample = arrays[f"{name}.mean"], arrays[f"{name}.sample"]
        groups = [(start, size, KINDS[kind]) for start, size, kind in arrays[f"{name}.groups"].tolist()]
        errors = dict(zip(groups, arrays[f"{name}.errors"].tolist(), strict=True))
        energy = np.square(sample, dtype=np.float64).sum(0)
        self.groups = plan(errors, energy, int(bits * len(self._mean)))
        kept = self.groups[-1].start + self.groups[-1].size if self.groups else 0
        self._vectors = np.ascontiguousarray(arrays[f"{name}.vectors"][:, :kept])
        self._tables = [_tables(quantise(_of(sample, group), group.kind), group) for group in self.groups]

    def encode(self, rows: Floats) -> _Coded:
        components = (rows - self._mean) @ self._vectors
        found = [quantise(_of(components, group), group.kind) for group in self.groups]
        bits, stream = 0.0, []
        for group, tables, coded in zip(self.groups, self._tables, found, strict=True):
            bits += sum(table.bits(x) for table, x in zip(tables, _symbols(coded, group), strict=True))
            stream += [packed(coded.values.T, BITS[group.kind]), coded.side.T.tobytes()]
        return _Coded(len(rows), zlib.compress(b"".join(stream), 9), int(bits / 8) + 1)

    def decode(self, coded: _Coded) -> Floats:
        stream, at, n = zlib.decompress(coded.deflated), 0, coded.tokens
        components = np.empty((n, self._vectors.shape[1]), np.float32)
        for group in self.groups:
            size, sides = (n * group.size * BITS[group.kind] + 7) // 8, SIDE[group.kind] // 16
            values = unpacked(stream[at : at + size], BITS[group.kind])[: n * group.size].reshape(group.size, n).T
            side = np.frombuffer(stream, np.float16, n * sides, at + size).reshape(sides, n).T
            components[:, group.start : group.start + group.size] = restore(Quantised(values, side), group.kind)
            at += size + 2 * n * sides
        return components @ self._vectors.T + self._mean


def _of(components: Floats, group: Group) -> Floats:
    return np.ascontiguousarray(components[:, group.start : group.start + group.size])


def _symbols(coded: Quantised, group: Group) -> list[npt.NDArray[Any]]:
    """The symbols of a group by table: values in rows of 16 components; low and high bytes of floats by themselves."""
    n = len(coded.values)
    by_unit = coded.values.T.reshape(group.size // UNIT, UNIT * n)
    found = [by_unit & 255, by_unit >> 8] if group.kind == FLOAT else [by_unit]
    side = np.ascontiguousarray(coded.side.T).view(np.uint16)
    return [*found, side & 255, side >> 8]


def _tables(coded: Quantised, group: Group) -> list[Tables]:
    values = 1 << min(BITS[group.kind], 8)
    symbols = _symbols(coded, group)
    return [Tables.of(x, values if at < len(symbols) - 2 else 256) for at, x in enumerate(symbols)]


def packed(values: npt.NDArray[Any], bits: int) -> bytes:
    """Numbers of 2, 4, 8 or 16 bits one after the other, the first in the highest bits of a byte."""
    flat = np.ascontiguousarray(values).ravel()
    if bits >= 8:
        return flat.tobytes()
    lanes = np.concatenate([flat, np.zeros(-len(flat) % (8 // bits), flat.dtype)]).reshape(-1, 8 // bits)
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    return bytes((lanes << shifts).sum(1).astype(np.uint8))


def unpacked(data: bytes, bits: int) -> npt.NDArray[Any]:
    """The inverse of `packed`, with what fills the last byte."""
    if bits >= 8:
        return np.frombuffer(data, np.uint16 if bits == 16 else np.uint8)
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    return ((np.frombuffer(data, np.uint8)[:, None] >> shifts) & ((1 << bits) - 1)).ravel()


class Kvtc:
    """bits: of a value, before the entropy coder."""

    def __init__(self, arrays: Arrays, layout: KVLayout, bits: float) -> None:
        self._layout = layout
        self.parts = [_Part(arrays, name, bits) for name in "kv"]
        self.decoding = Clock()
        self.deflate_bytes = self.taken_bytes = 0  # of all that was coded

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        found = [part.encode(rows_of(self._layout, pairs, start, number)) for number, part in enumerate(self.parts)]
        with self.decoding:
            keys, values = (part.decode(coded) for part, coded in zip(self.parts, found, strict=True))
            decoded = pairs_of(self._layout, keys, values, start)
        deflate, tables = sum(len(x.deflated) for x in found), sum(x.table_bytes for x in found)
        self.deflate_bytes += deflate
        self.taken_bytes += min(deflate, tables)
        return decoded, min(deflate, tables)
