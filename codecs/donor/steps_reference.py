"""The donor codec's step mode as a plain program: what csrc/donor/steps/steps.h must equal.

A value is its donor's (reference.py: keys rotated to their new positions) and a number of steps. The step of a
group of channels follows from how large the donor's values are there; which table of frequencies the numbers of a group
are coded with is a class that stands in the record, shifted row by row as far as the row's numbers in the parts before
were larger or smaller than their classes said. All arithmetic is in integers, or exact, or single operations in float32
in a fixed order, so that every machine writes and decodes the same bits. FORMAT.md says it in words. Torch; slow.

What no number of steps can approximate stands in the record as it is: infinities, NaN, distances beyond the largest
number, sums that overflow.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.codecs.donor.reference import GROUP, Block, Predictor, Rows, finite, values_of
from kvstore.codecs.donor.steps_tables import (
    BOUNDS,
    CLASSES,
    ESCAPE,
    EXPECTED,
    LARGEST,
    LEAST_SHIFT,
    QUARTERS,
    SCALES,
    STEPS,
    costs,
    frequencies,
    limits,
)
from kvstore.codecs.rans.coder import RansDecoder, RansTables
from kvstore.errors import CodecError

HEADER = struct.Struct("<hHff")  # quarter octaves of the step, flags, largest error, mean squared error
NOTHING = 0x7FFF  # for quarter octaves: no step, every finite value is the donor's
MOST_QUARTERS = 200
STREAM = 1  # flag: some class is not 0, so that there is a stream
MOST_SIZE, MOST_STEP, REACH = 400, 440, 40
NEARER = 3  # sixteenths of a step that a distance is shortened by on its way down to a number: dead zone 13/16
_PRIOR = 1 << 11  # half a step, in the units of a row's state
_LIMIT = 1e6
_MOST = float(torch.finfo(torch.float32).max)

Tensor = torch.Tensor


def quarters_of(step: float) -> int:
    """A step, relative to the donor's values, as the header has it; infinite: NOTHING. `ValueError` for others than
    2**-50 to 2**50."""
    if step == math.inf:
        return NOTHING
    if not 2.0**-50 <= step <= 2.0**50:
        raise ValueError(f"donor: step: expected 2**-50 to 2**50 or infinity, found {step}")
    return round(4 * math.log2(step))


# -- parts -------------------------------------------------------------------------------------------------------------


def sizes_of(mu: Tensor, heads: int) -> Tensor:
    """floor(4 log2) of the mean of absolute predictions in each group, int64 [groups]; mu: finite bits [n, C].

    In float32: each channel is summed over the rows, then each group over its channels, one after the other.
    """
    n, width = mu.shape
    total = torch.zeros(width)
    for row in values_of(mu).abs():
        total = total + row
    dim = width // heads
    channels = torch.nn.functional.pad(total.view(heads, dim), (0, -dim % GROUP)).view(heads, -1, GROUP)
    group = torch.zeros(channels.shape[:2])
    for i in range(GROUP):
        group = group + channels[:, :, i]
    counts = torch.full(group.shape, float(n * GROUP))
    counts[:, -1] = float(n * (dim - (group.shape[1] - 1) * GROUP))
    bits = (group / counts).flatten().view(torch.int32).long()
    mantissa = ((bits >> 8) & 0x7FFF) | 0x8000
    above = sum((mantissa >= bound).long() for bound in QUARTERS)
    return (4 * ((bits >> 23) - 127) + above).clamp(-MOST_SIZE, MOST_SIZE)


def steps_of(mu: Tensor, heads: int, quarters: int) -> Tensor:
    """The step of each channel, float32 [C]: between the size of its group and the mean (of logarithms) of all."""
    dim = mu.shape[1] // heads
    if quarters == NOTHING:
        return torch.ones(mu.shape[1])
    sizes = sizes_of(mu, heads)
    sizes = sizes.clamp(min=int(sizes.max()) - REACH)
    found = (((sizes + int(sizes.sum()) // len(sizes)) >> 1) + quarters).clamp(-MOST_STEP, MOST_STEP)
    steps = torch.tensor(STEPS)[found & 3].float() * values_of(((found >> 2) - 12 + 127) << 7)
    return spread(steps, heads, dim)


def spread(groups: Tensor, heads: int, dim: int) -> Tensor:
    """Of each channel what is given of its group."""
    return groups.view(heads, -1, 1).expand(-1, -1, GROUP).reshape(heads, -1)[:, :dim].reshape(-1)


def restored(mu: Tensor, numbers: Tensor, steps: Tensor) -> Tensor:
    """bf16 bits of mu + numbers * steps, rounded to nearest, ties to even."""
    bits = (values_of(mu) + numbers.float() * steps).view(torch.int32).long() & 0xFFFFFFFF
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def numbers_of(bits: Tensor, mu: Tensor, steps: Tensor, quarters: int) -> Tensor:
    """The number of steps of each value, int64 [n, C]; LARGEST + 1 where it is an escape."""
    inverse = torch.zeros_like(steps) if quarters == NOTHING else 16 / steps
    distance = values_of(bits) - values_of(mu)
    sixteenths = distance.abs() * inverse
    sixteenths = torch.where(sixteenths < _LIMIT, sixteenths, torch.tensor(_LIMIT)).int().long()
    size = (sixteenths + NEARER) >> 4
    numbers = torch.where(distance < 0, -size, size)
    kept = (size > LARGEST) | (finite(bits) != bits)
    kept |= ~values_of(restored(mu, torch.where(kept, 0, numbers), steps)).isfinite()
    return torch.where(kept, LARGEST + 1, numbers)


# -- rows --------------------------------------------------------------------------------------------------------------


class RowSizes:
    """How large the rows' numbers were in the parts before, and how large their classes said."""

    def __init__(self, count: int) -> None:
        self._found = torch.zeros(count, dtype=torch.long)
        self._expected = 0

    def shifts(self) -> Tensor:
        """Classes that each row is off, int64 [n]."""
        found = (self._found + _PRIOR) << 16
        bounds = torch.from_numpy(BOUNDS) * (self._expected + _PRIOR)
        return LEAST_SHIFT + (found[:, None] >= bounds).sum(1)

    def take(self, symbols: Tensor, classes: Tensor) -> None:
        """symbols: of the coded channels, [n, coded]; classes: of these, [coded]."""
        magnitudes = (symbols - LARGEST).abs().sum(1)
        self._found = self._found - (self._found >> 2) + (magnitudes << 12)
        self._expected = self._expected - (self._expected >> 2) + int(torch.from_numpy(EXPECTED)[classes - 1].sum())


def scales_of(classes: Tensor, shifts: Tensor) -> Tensor:
    """Tables of numbers, int64 [n, coded]. classes: of the coded channels."""
    return (classes - 1 + shifts[:, None]).clamp(0, SCALES - 1)


def classes_of(numbers: Tensor, shifts: Tensor, heads: int) -> Tensor:
    """The class of each group that takes the fewest bits, int64 [groups]; 0 where there is nothing."""
    dim, cost = numbers.shape[1] // heads, torch.from_numpy(costs()).long()
    sizes = numbers.abs()
    found = []
    for head in range(heads):
        for begin in range(head * dim, (head + 1) * dim, GROUP):
            some = sizes[:, begin : min(begin + GROUP, (head + 1) * dim)]
            if not some.any():
                found.append(0)
                continue
            tables = scales_of(torch.arange(1, CLASSES), shifts)  # [n, classes]
            spent = torch.stack([cost[tables[:, c]].gather(1, some).sum() for c in range(CLASSES - 1)])
            found.append(1 + int(spent.argmin()))
    return torch.tensor(found)


def context_of(classes: Sequence[Tensor]) -> int:
    """The table of a part's classes: the mean class two parts before, rounded. classes: of the parts before."""
    if len(classes) < 2:
        return 0
    before = classes[-2]
    return (2 * int(before.sum()) + len(before)) // (2 * len(before))


# -- the payload -------------------------------------------------------------------------------------------------------


def encode(rows: Rows, block: Block, step: float) -> list[bytes]:
    """The coded layers. step: see `quarters_of`; smaller is finer. rows.model must be None."""
    assert rows.model is None
    quarters, walk, state = quarters_of(step), Predictor(rows), RowSizes(len(rows))
    symbols, tables, classes = list[npt.NDArray[np.uint8]](), list[npt.NDArray[np.uint8]](), list[Tensor]()
    listed: list[bytes] = []
    largest, squares, count = 0.0, 0.0, 0
    for layer, pair in enumerate(block):
        heads, escapes = rows.heads[layer], b""
        for bits in pair:
            mu = finite(walk.predict(layer))
            walk.take(layer, bits)
            width = mu.shape[1]
            steps = steps_of(mu, heads, quarters)
            numbers, shifts = numbers_of(bits, mu, steps, quarters), state.shifts()
            part = classes_of(numbers, shifts, heads)
            symbols.append(_bytes(part))
            tables.append(np.array([context_of(classes)], np.uint8))
            classes.append(part)
            each = spread(part, heads, width // heads)
            coded = each > 0
            scales = scales_of(each[coded], shifts)
            some = numbers[:, coded]
            found = torch.where(some.abs() > torch.from_numpy(limits()).long()[scales], ESCAPE, some + LARGEST)
            kept = torch.zeros_like(numbers, dtype=torch.bool)
            kept[:, coded] = found == ESCAPE
            escapes += np.asarray(bits[kept].tolist(), "<u2").tobytes()
            symbols.append(_bytes(found))
            tables.append(_bytes(scales + CLASSES))
            state.take(found, each[coded])
            error = values_of(restored(mu, torch.where(kept, 0, numbers), steps)) - values_of(bits)
            error = torch.where(kept, 0.0, error).abs()
            largest, count = max(largest, float(error.max())), count + error.numel()
            channels = torch.zeros(width, dtype=torch.float64)
            for row in error.double():
                channels = channels + row * row
            for total in channels.tolist():
                squares += total
        listed.append(escapes)
    flags = STREAM if any(bool(part.any()) for part in classes) else 0
    stream, ends = b"", [0] * len(symbols)
    if flags:
        one = [t if len(t) else np.zeros(1, np.uint8) for t in tables]
        stream, ends = RansTables(frequencies(), 12).encode_parts(symbols, one)
    layers, begin = [], 0
    head = HEADER.pack(quarters, flags, min(largest, _MOST), min(squares / count, _MOST))
    for number, escapes in enumerate(listed):
        end = ends[4 * number + 3]
        layers.append(head + varint(len(escapes) // 2) + escapes + stream[begin:end])
        head, begin = b"", end
    return layers


def decode(rows: Rows, layers: Sequence[bytes]) -> list[tuple[Tensor, Tensor]]:
    """The inverse: bits as every decoder finds them. `CodecError` unless the layers are what `encode` wrote."""
    assert rows.model is None
    quarters, flags, _, _ = header(layers[0])
    sections = [_Section.of(data) for data in (layers[0][HEADER.size :], *layers[1:])]
    coder = RansTables(frequencies(), 12).decoder(b"".join(s.words for s in sections))
    walk, state, classes = Predictor(rows), RowSizes(len(rows)), list[Tensor]()
    block, read = [], 0
    for layer, section in enumerate(sections):
        found, left = [], iter(section.escapes)
        for _ in range(2):
            mu = finite(walk.predict(layer))
            walk.take(layer, mu)
            heads = rows.heads[layer]
            numbers, kept = _numbers(coder if flags else None, state, classes, mu.shape, heads)
            bits = restored(mu, torch.where(kept, 0, numbers), steps_of(mu, heads, quarters))
            try:
                bits[kept] = torch.tensor([next(left) for _ in range(int(kept.sum()))], dtype=torch.long)
            except StopIteration:
                raise CodecError("donor: a layer has too few escapes") from None
            found.append(bits)
        read += len(section.words)
        if next(left, None) is not None or (flags and coder.position != read):
            raise CodecError("donor: a layer has more bytes than its values take")
        block.append((found[0], found[1]))
    coder.finish()
    return block


def _numbers(
    coder: RansDecoder | None, state: RowSizes, classes: list[Tensor], shape: Sequence[int], heads: int
) -> tuple[Tensor, Tensor]:
    """The next part's numbers and which values are escapes, [n, C]; goes on with all that is given."""
    n, width = shape
    groups = heads * -(-(width // heads) // GROUP)
    numbers, kept = torch.zeros(n, width, dtype=torch.long), torch.zeros(n, width, dtype=torch.bool)
    if coder is None:
        return numbers, kept
    part = torch.from_numpy(coder.part(np.array([context_of(classes)], np.uint8), groups)).long()
    classes.append(part)
    each = spread(part, heads, width // heads)
    coded = each > 0
    scales = _bytes(scales_of(each[coded], state.shifts()) + CLASSES)
    symbols = torch.zeros(n, 0, dtype=torch.long)
    if len(scales):
        symbols = torch.from_numpy(coder.part(scales, len(scales))).long().view(n, -1)
    numbers[:, coded] = symbols - LARGEST
    kept[:, coded] = symbols == ESCAPE
    state.take(symbols, each[coded])
    return numbers, kept


def header(layer: bytes | memoryview) -> tuple[int, int, float, float]:
    """Quarter octaves, flags, largest error and mean squared error. `CodecError` where they cannot be."""
    if len(layer) < HEADER.size:
        raise CodecError("donor: the payload is too short for its header")
    quarters, flags, largest, mean = HEADER.unpack_from(layer)
    if (abs(quarters) > MOST_QUARTERS and quarters != NOTHING) or flags & ~STREAM:
        raise CodecError("donor: the step or the flags are out of range")
    if not (0 <= largest <= _MOST and 0 <= mean <= _MOST):
        raise CodecError("donor: the errors must be finite and not negative")
    return quarters, flags, largest, mean


@dataclass(frozen=True)
class _Section:
    escapes: list[int]
    words: bytes

    @classmethod
    def of(cls, data: bytes) -> _Section:
        count = shift = at = 0
        while True:
            if at == min(5, len(data)):
                raise CodecError("donor: a layer ends within its number of escapes")
            count |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                break
        if 2 * count > len(data) - at:
            raise CodecError("donor: a layer ends within its escapes")
        end = at + 2 * count
        return cls(np.frombuffer(data[at:end], "<u2").tolist(), data[end:])


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _bytes(x: Tensor) -> npt.NDArray[np.uint8]:
    flat: npt.NDArray[np.uint8] = x.flatten().to(torch.uint8).numpy()
    return flat
