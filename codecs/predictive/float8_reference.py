"""The lossless mode for float8 as a plain program: what csrc/predictive/float8/float8.h must equal.

Values are predicted as numbers, by reference.py; what is coded is how many codes of the dtype they lie from the
prediction. How likely a distance is follows from how far codes are apart there, in the scale of the residuals, and from
where between two codes the prediction lies. FORMAT.md says it in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.model import CLASSES, ESCAPE, OFFSET, CodingTables, PredictiveModel
from kvstore.codecs.rans.coder import RansDecoder, RansTables
from kvstore.codecs.words import FLOAT8, float8_words
from kvstore.errors import CodecError

MODES = {"float8_e5m2": 14, "float8_e4m3fn": 15}
_RATIOS = (64, 76, 91, 108)  # 64 * 2**(i / 4)

Tensor = torch.Tensor


@dataclass(frozen=True)
class Axis:
    """The codes of a dtype without sign, 0 to 127, and numbers among them."""

    dtype: str

    @property
    def below(self) -> int:
        """Bits of a bf16's mantissa that a code lacks."""
        return 7 - FLOAT8[self.dtype].mantissa

    @property
    def least(self) -> int:
        """The exponent of the least normal number, as a bf16's."""
        return FLOAT8[self.dtype].least

    def place(self, bits: Tensor) -> Tensor:
        """Where the magnitudes of bf16 bits lie among the codes, in parts of 2**-below."""
        found = reference.warp(bits & 0x7FFF, torch.full_like(bits, self.least))
        return found.clamp(max=(128 << self.below) - 1)

    def code(self, words: Tensor) -> Tensor:
        """The code of words (codecs/words.py), without sign."""
        return self.place(words) >> self.below

    def rise(self, mu: Tensor, scale: Tensor) -> Tensor:
        """Quarter octaves that the distance of two codes at the predictions is above `scale`."""
        return 4 * (((mu >> 7) & 0xFF).clamp(min=self.least) + self.below - 134) - scale

    def classes(self, mu: Tensor, rise: Tensor) -> Tensor:
        fine = ((rise + 28) >> 1).clamp(0, 11)
        coarse = 12 + 4 * ((rise + 4) >> 1).clamp(0, 5) + ((self.place(mu) >> (self.below - 2)) & 3)
        return torch.where(rise < -4, fine, coarse)

    def sizes(self, index: Tensor, mu: Tensor, rise: Tensor) -> Tensor:
        """How far codes lie from predictions, in eighths of the scale, at most 255."""
        away = ((index + (index < 0).long()) << self.below) - self.place(mu)
        size, up = away.abs() * torch.tensor(_RATIOS)[rise & 3], (rise >> 2) - self.below - 3
        return torch.where(up > 0, size << up.clamp(0, 8), size >> (-up).clamp(0, 24)).clamp(max=255)


def scales(part: CodingTables, offset: Tensor) -> Tensor:
    """Quarter octaves of the residuals' size, [n, C]."""
    return (reference.tensor(part.scale).long() + offset[:, None]).clamp(-440, 440)


def residuals(axis: Axis, part: CodingTables, which: int, bits: Tensor, mu: Tensor, offset: Tensor) -> reference.Coded:
    """As `reference.residuals`. bits: words of values."""
    rise = axis.rise(mu, scales(part, offset))
    index = axis.code(bits) ^ -(((bits ^ mu) >> 15) & 1)  # below 0 on the other side of 0
    distance = index - (axis.place(mu) >> axis.below)
    escaped = (distance < -OFFSET) | (distance >= OFFSET)
    sizes = torch.where(escaped, 255, axis.sizes(index, mu, rise))
    symbols = torch.where(escaped, ESCAPE, distance + OFFSET)
    return reference.Coded(symbols, axis.classes(mu, rise) + CLASSES * which, reference.fits_from(offset, sizes))


def encode(
    model: PredictiveModel, dtype: str, tokens: Tensor, start: int, block: Sequence[tuple[Tensor, Tensor]]
) -> list[bytes]:
    """The coded layers. block: codes, K and V of each layer, int64 [n, C]."""
    axis, walk = Axis(dtype), reference.Predictor(model, tokens, start)
    words = [tuple(float8_words(dtype)[codes] for codes in pair) for pair in block]
    coded: list[reference.Coded] = []
    for layer, pair in enumerate(words):
        for which, bits in enumerate(pair):
            part, mu = model.parts[layer][which], walk.predict(layer)
            offset = reference.offsets(part, [c.fits for c in coded], len(tokens))
            coded.append(residuals(axis, part, which, bits, mu, offset))
            walk.take(layer, bits)
    stream, ends = RansTables(model.freqs, 12).encode_parts(
        [reference.byte_array(c.symbols) for c in coded], [reference.byte_array(c.classes) for c in coded]
    )
    layers, begin = [], 0
    for layer, pair in enumerate(words):
        escapes = [x[c.symbols == ESCAPE] for x, c in zip(pair, coded[2 * layer :], strict=False)]
        header = reference.HEADER.pack(MODES[dtype], 0, 0, *map(len, escapes), *reference.checksums(pair))
        end = ends[2 * layer + 1]
        layers.append(header + b"".join(e.numpy().astype("<u2").tobytes() for e in escapes) + stream[begin:end])
        begin = end
    return layers


def decode(
    model: PredictiveModel, dtype: str, tokens: Tensor, start: int, layers: Sequence[bytes]
) -> list[tuple[Tensor, Tensor]]:
    """The inverse; `CodecError` unless the layers are what `encode` wrote."""
    axis, walk = Axis(dtype), reference.Predictor(model, tokens, start)

    def next_part(
        coder: RansDecoder, section: reference.Section, layer: int, which: int, fits: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        part, mu = model.parts[layer][which], walk.predict(layer)
        offset = reference.offsets(part, fits, len(tokens))
        rise = axis.rise(mu, scales(part, offset))
        classes = reference.byte_array(axis.classes(mu, rise) + CLASSES * which)
        symbols = torch.from_numpy(coder.part(classes, mu.numel())).long().view_as(mu)
        bits, sizes = _values(axis, symbols, mu, rise, section.escapes[which])
        walk.take(layer, bits)
        return bits, reference.fits_from(offset, sizes)

    words = reference.unpack_layers(model.freqs, [_section(data, MODES[dtype]) for data in layers], next_part)
    return [(_codes(axis, k), _codes(axis, v)) for k, v in words]


def _codes(axis: Axis, words: Tensor) -> Tensor:
    return axis.code(words) | (words >> 8 & 128)


def _values(axis: Axis, symbols: Tensor, mu: Tensor, rise: Tensor, escapes: list[int]) -> tuple[Tensor, Tensor]:
    """(words, sizes) of the next part."""
    escaped, words = symbols == ESCAPE, float8_words(axis.dtype)
    index = (axis.place(mu) >> axis.below) + symbols - OFFSET
    other = (index < 0).long()
    code = torch.where(escaped, 0, index ^ -other)
    if int(code.max()) > 127 or int(escaped.sum()) != len(escapes):
        raise CodecError(f"predictive: a symbol stands for no {axis.dtype}, or escapes are left over")
    whole = torch.tensor(escapes, dtype=torch.long)
    if not torch.equal(words[axis.code(whole)], whole & 0x7FFF):
        raise CodecError(f"predictive: an escape is no {axis.dtype}")
    bits = words[code] | ((mu >> 15) ^ other) << 15
    bits[escaped] = whole
    return bits, torch.where(escaped, 255, axis.sizes(index, mu, rise))


def _section(data: bytes, wanted: int) -> reference.Section:
    if len(data) < reference.HEADER.size:
        raise CodecError("predictive: a layer is too short for its header")
    mode, *counts, a, b = reference.HEADER.unpack_from(data)
    if mode != wanted:
        raise CodecError(f"predictive: expected a layer of mode {wanted}, found mode {mode}")
    if counts[0] or counts[1]:
        raise CodecError("predictive: a layer has raw bits or escapes left over")
    return reference.Section.cut("predictive", data, reference.HEADER.size, counts, (a, b))
