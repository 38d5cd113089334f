"""The predictive codec's lossy mode as a plain program: what is not predicted is coded at the price of its error.

The residual of a part (K before the rotary embedding, or V, of one layer) is rotated and scaled so that an error of one
in any component costs the same, quantised in steps of the block's own, and coded by rANS with tables that follow from
the step, the component's standard deviation and how well the parts before fitted the row. Those are decoded symbols
and integers, so that a decoder whose floating point rounds otherwise still reads the same symbols. Nothing depends on
other blocks. docs/codecs/predictive.md has the reasons and figures, FORMAT.md the bytes.

It codes many blocks at once, for calibration and tests; the store codes with csrc/lossy, which writes the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.predictive.lossy_model import CLASSES, ESCAPE, LARGEST, MAX_SCALE, PLAIN
from kvstore.codecs.predictive.lossy_quantiser import MAX_STEP, Steps, row_steps, values_of
from kvstore.codecs.predictive.lossy_rows import Engine, Rows, Tensor, Walk, quantise
from kvstore.codecs.rans.coder import RansDecoder
from kvstore.core.layout import SINKS
from kvstore.errors import CodecError

MODE = 5
HEADER = struct.Struct("<IHhh5f")  # mode, exact rows, quarter octaves and steps of K and V, errors of K and V, largest

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Block:
    """tokens: int64 [n]; start: position of the first; layers: bf16 bits of K and V of each layer, int64 [n, C]."""

    tokens: Tensor
    start: int
    layers: Pairs


def encode_blocks(engine: Engine, steps: Steps, blocks: Sequence[Block]) -> list[list[bytes]]:
    """The layers of each block. All values must be finite, all positions known to the model."""
    counts = [len(block.tokens) for block in blocks]
    positions = torch.cat([torch.arange(b.start, b.start + n) for b, n in zip(blocks, counts, strict=True)])
    layers = [[torch.cat([b.layers[i][w] for b in blocks]) for w in (0, 1)] for i in range(len(engine.parts))]
    exact = positions < SINKS
    rows = quantise(engine, steps, torch.cat([b.tokens for b in blocks]), positions, exact, layers)
    ends = list(accumulate(counts))
    return [
        sections_of(engine, steps, rows, slice(end - n, end), int(exact[end - n : end].sum()), block)
        for block, n, end in zip(blocks, counts, ends, strict=True)
    ]


def sections_of(engine: Engine, steps: Steps, rows: Rows, at: slice, exact: int, block: Block) -> list[bytes]:
    """The layers of a block whose rows are at `at`, the first `exact` of them kept as they are."""
    symbols, classes, escapes = [], [], []
    coded_rows, before = slice(at.start + exact, at.stop), np.full(at.stop - at.start - exact, PLAIN, np.int64)
    for number, (s, c, e) in enumerate(zip(rows.symbols, rows.classes, rows.escapes, strict=True)):
        shifts = rows.shifts[number][coded_rows]
        symbols.append(shifts.astype(np.uint8))
        classes.append((before + 2 * CLASSES).astype(np.uint8))
        before = shifts
        coded = c[at] >= 0
        symbols.append(s[at][coded])
        classes.append((c[at][coded] + CLASSES * (number % 2)).astype(np.uint8))
        escapes.append(e[at][coded][symbols[-1] == ESCAPE].astype("<i2"))
    stream, ends = engine.coder.encode_parts(symbols, [c if len(c) else np.zeros(1, np.uint8) for c in classes])
    errors = rows.errors[at].sum(0) / max(1, len(block.tokens) - exact)
    head = HEADER.pack(MODE, exact, *steps.quarters, steps.k, steps.v, *errors.tolist(), float(rows.largest[at].max()))
    sections, begin = [], 0
    for number, pair in enumerate(block.layers):
        end = ends[4 * number + 3]
        kept = b"".join(x[:exact].numpy().astype("<u2").tobytes() for x in pair)
        listed = escapes[2 * number].tobytes() + escapes[2 * number + 1].tobytes()
        sections.append(head + varint(len(listed) // 2) + kept + listed + stream[begin:end])
        head, begin = b"", end
    return sections


def decode_blocks(
    engine: Engine, blocks: Sequence[tuple[Tensor, int]], layers: Sequence[Sequence[memoryview | bytes]]
) -> list[Pairs]:
    """The inverse. blocks: tokens and start of each, layers: what `encode_blocks` gave, all with the same steps.

    Returns bf16 bits, int64 [n, C]. Raises `CodecError` for anything else.
    """
    readers = [_Reader.of(engine, len(b[0]), b[1], x) for b, x in zip(blocks, layers, strict=True)]
    steps = readers[0].steps
    if any(reader.steps != steps for reader in readers):
        raise CodecError("predictive: lossy blocks with different steps cannot be decoded at once")
    counts = [len(tokens) for tokens, _ in blocks]
    spans = [(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]
    positions = torch.cat([torch.arange(start, start + len(tokens)) for tokens, start in blocks])
    exact = torch.cat([torch.arange(n) < reader.exact for n, reader in zip(counts, readers, strict=True)])
    walk = Walk(engine, steps, torch.cat([tokens for tokens, _ in blocks]), positions, exact)
    found: list[list[Tensor]] = [[] for _ in blocks]
    for number in range(len(engine.parts)):
        for which in range(2):
            shifts = torch.full((len(positions),), PLAIN)
            shifts[~exact] = torch.from_numpy(np.concatenate([reader.shifts() for reader in readers]))
            mu, classes = walk.predict(number, which), walk.classes(number, which, shifts)
            pieces = [
                reader.part(number, which, classes[begin:end].numpy())
                for reader, (begin, end) in zip(readers, spans, strict=True)
            ]
            signed = torch.from_numpy(np.concatenate([p[0] for p in pieces])).long()
            escaped = torch.from_numpy(np.concatenate([p[1] for p in pieces]))
            y = values_of(engine.tables, signed, escaped, classes, which)
            bits = walk.decoded(number, which, mu, y * row_steps(steps[which], shifts))
            bits[exact] = torch.cat([reader.kept(number, which) for reader in readers])
            walk.take(number, which, bits)
            walk.follow(number, which, signed, classes)
            for rows, (begin, end) in zip(found, spans, strict=True):
                rows.append(bits[begin:end])
    for reader in readers:
        reader.coder.finish()
    return [list(zip(rows[::2], rows[1::2], strict=True)) for rows in found]


@dataclass
class _Reader:
    """A block's sections, taken apart."""

    steps: Steps
    exact: int
    exact_rows: list[list[Tensor]]
    escapes: list[npt.NDArray[np.int16]]
    coder: RansDecoder
    before: npt.NDArray[np.int64]
    _used: int = 0

    @classmethod
    def of(cls, engine: Engine, count: int, start: int, layers: Sequence[memoryview | bytes]) -> _Reader:
        steps, exact, _ = header(layers[0])
        if exact > count or start + count > engine.model.base.positions:
            raise CodecError(f"predictive: a lossy block has {exact} exact rows of {count}, at position {start}")
        kept, escapes, words = [], [], []
        before = np.full(max(0, count - exact), PLAIN, np.int64)
        for number, data in enumerate(layers):
            listed, at = read_varint(data, 0 if number else HEADER.size)
            pair = []
            for part in engine.model.base.parts[number]:
                end = at + 2 * exact * part.width
                if end > len(data):
                    raise CodecError("predictive: a lossy layer ends within its exact rows")
                rows = np.frombuffer(data[at:end], "<u2").astype(np.int64)
                pair.append(torch.from_numpy(rows).view(exact, part.width))
                at = end
            if at + 2 * listed > len(data):
                raise CodecError("predictive: a lossy layer ends within its escapes")
            kept.append(pair)
            escapes.append(np.frombuffer(data[at : at + 2 * listed], "<i2"))
            words.append(data[at + 2 * listed :])
        return cls(steps, exact, kept, escapes, engine.coder.decoder(b"".join(words)), before)

    def kept(self, number: int, which: int) -> Tensor:
        return self.exact_rows[number][which]

    def shifts(self) -> npt.NDArray[np.int64]:
        """Of the next part's rows that are coded."""
        by = (self.before + 2 * CLASSES).astype(np.uint8)
        self.before = self.coder.part(by if len(by) else np.zeros(1, np.uint8), len(by)).astype(np.int64)
        return self.before

    def part(
        self, number: int, which: int, classes: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(signed numbers, whether they are escapes), both like `classes`."""
        coded = classes >= 0
        numbers, escaped = np.zeros(classes.shape, np.int64), np.zeros(classes.shape, bool)
        by = (classes[coded] + CLASSES * which).astype(np.uint8)
        symbols = self.coder.part(by if len(by) else np.zeros(1, np.uint8), len(by)).astype(np.int64)
        marked, listed = symbols == ESCAPE, self.escapes[number]
        begin = self._used if which else 0
        self._used = begin + int(marked.sum())
        if self._used > len(listed) or (which and self._used != len(listed)):
            raise CodecError("predictive: a lossy layer has too few or too many escapes")
        symbols -= LARGEST
        symbols[marked] = listed[begin : self._used]
        numbers[coded], escaped[coded] = symbols, marked
        return numbers, escaped


def header(layer: memoryview | bytes) -> tuple[Steps, int, tuple[float, float, float]]:
    """(steps, exact rows, (error of K, error of V, largest error of a value)) of a block, from its first layer.

    Errors of K and V: mean squares in units of cost, of what was coded. `CodecError` if it is not one.
    """
    if len(layer) < HEADER.size:
        raise CodecError("predictive: a lossy layer is too short for its header")
    mode, exact, q_k, q_v, k, v, *errors = HEADER.unpack_from(layer)
    if mode != MODE:
        raise CodecError(f"predictive: expected a lossy layer (mode {MODE}), found mode {mode}")
    if not (0 < k < MAX_STEP and 0 < v < MAX_STEP and max(abs(q_k), abs(q_v)) <= MAX_SCALE):
        raise CodecError(f"predictive: the step sizes {k!r} and {v!r} of a lossy block are out of range")
    return Steps(k, v, (q_k, q_v)), exact, (errors[0], errors[1], errors[2])


def varint(n: int) -> bytes:
    """LEB128: 7 bits a byte, lowest first."""
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def read_varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    """(number, where it ends)."""
    found = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
    raise CodecError("predictive: a lossy layer ends within its number of escapes")
