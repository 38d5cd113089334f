"""Fits the lossless predictor: 8-bit weights, scales and tables, from what the decoder will have.

Lossless inputs are exact, so the loop is closed by itself: what a part is predicted from is the cache, rounded to the
8-bit inputs. One pass over the windows sums the products of every layer's inputs with its own and those of the two
layers before; every ridge regression (as in AQUA-KV, arXiv:2501.19392, with more inputs) is solved from these sums.
Then a sample of rows gives the spread of what is left, how that follows the row, and the tables. One window is in
memory at a time; the sums take `layers * 3 * C * C` float64, C the values of K and V of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import KVDump, Progress, floats, silent
from kvstore.calibration.rows import NO_SINKS, reach, target
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs import predictive_reference as reference
from kvstore.codecs.linear_model import FINE, RANGE
from kvstore.codecs.predictive import PredictiveCodec
from kvstore.codecs.predictive_model import (
    CLASSES,
    MAX_ADAPT,
    MAX_BIAS,
    MAX_SCALE,
    SYMBOLS,
    Part,
    PredictiveModel,
)
from kvstore.codecs.rans import quantise
from kvstore.layout import KVLayout
from kvstore.rope import fixed_point, frequencies

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor

DAMP = 1e-3  # of the mean diagonal of the Gram matrix, as in AQUA-KV
SIGMAS = 5.0  # an input's 8 bits reach this far beyond its mean
HEADROOM = 2.0  # of K's fixed point above the largest pair that was seen
SCALE_WINDOWS = 4  # from so many windows
SAMPLE = 2_048  # rows of each part, about, that the spread and the tables are taken from
COARSE = 1024  # entries of the coarse table of angles: 131,072 positions


@dataclass(frozen=True)
class Wiring:
    """What is used of what the codec could use; everything, but to measure what each part brings.

    tokens: the table of layer 0. layers: how many layers before. values: of them K's prediction sees V too, V's always
    does (AQUA-KV: one layer, without). own_keys: V's sees K of its layer. adapt: scales follow the row.
    """

    tokens: bool = True
    layers: int = 2
    values: bool = True
    own_keys: bool = True
    adapt: bool = True


def fit(dump: KVDump, progress: Progress = silent, wiring: Wiring | None = None) -> Arrays:
    """The profile's section "lossless". wiring: all, but for experiments."""
    (arrays,) = fits(dump, [len(dump.fit_windows)], progress, wiring)
    return arrays


def fits(
    dump: KVDump, counts: Sequence[int], progress: Progress = silent, wiring: Wiring | None = None
) -> Iterator[Arrays]:
    """What `fit` makes of the first so many windows to fit to, for each of `counts`, in one pass; ascending."""
    wiring = wiring or Wiring()
    first: Arrays = {**angles(dump.layout), **_first_layer(dump, wiring)}
    _scales(dump, first)
    sums = _Sums(dump.layout, first)
    for window in dump.first(counts[-1]).fit_windows:
        sums.add(_inputs(dump, window, NO_SINKS, first))
        progress("lossless: summing windows", window + 1, counts[-1])
        if window + 1 in counts:
            arrays = dict(first)
            for number in range(1, len(dump.layout.layers)):
                for which in range(2):
                    sums.solve(number, which, arrays, wiring)
            _tables(dump.first(window + 1), arrays, progress, wiring)
            yield arrays


def report(dump: KVDump, arrays: Arrays) -> dict[str, Any]:
    """Bits a value, and the ratio to 16, of windows that `fit` did not see."""
    bits = bits_per_value(dump, arrays, dump.held_out)
    return {"bits_per_value": bits, "ratio": 16 / bits}


def bits_per_value(dump: KVDump, arrays: Arrays, windows: Sequence[int], block: int = 64) -> float:
    """What the codec makes of these windows, all-in but for records: payload bits a value."""
    codec = PredictiveCodec(PredictiveModel.from_arrays(dump.layout, arrays))
    spent = values = 0
    for window in windows:
        tokens, pairs = dump.tokens(window).astype(np.uint32), dump.tensors(window)
        values += sum(x.numel() for pair in pairs for x in pair)
        view = KVView.of_layers(dump.layout, pairs)
        for start in range(0, len(tokens), block):
            info = BlockInfo(dump.layout, tokens[start : start + block], start)
            room = memoryview(bytearray(codec.bound(info)))
            sizes = codec.encode(info, view.narrow(start, info.count), room)
            assert sizes is not None  # it fits by the meaning of bound
            spent += 8 * sum(sizes)
    return spent / values


def angles(layout: KVLayout) -> Arrays:
    """The tables of the rotary embedding, in 1/16384; the decoder multiplies them, nobody computes a cosine again."""
    radians = frequencies(layout.rope, layout.layers[0].key_dim)
    tables = {}
    for name, positions in (("rope_fine", np.arange(FINE)), ("rope_coarse", FINE * np.arange(COARSE))):
        tables[name] = fixed_point(positions[:, None] * radians)
    return tables


# -- one part ----------------------------------------------------------------------------------------------------------


def _first_layer(dump: KVDump, wiring: Wiring) -> Arrays:
    """Layer 0 depends on the token alone: its K and V of every token, 8 bits a value around the channel's middle."""
    arrays: Arrays = {}
    vocabulary, width = dump.first_layer.shape
    table = np.empty((vocabulary, width), np.int8)
    middle, step = np.empty(width), np.empty(width)
    for begin in range(0, width, 64):
        part = floats(dump.first_layer[:, begin : begin + 64]).astype(np.float64)
        low, high = part.min(0), part.max(0)
        m, s = (low + high) / 2, np.maximum((high - low) / 254, 1e-12)
        table[:, begin : begin + 64] = np.rint((part - m) / s).clip(-127, 127) * wiring.tokens
        middle[begin : begin + 64], step[begin : begin + 64] = m, s
    arrays["token_kv"] = table
    shape = dump.layout.layers[0]
    split = shape.heads * shape.key_dim
    for name, columns in (("k", slice(0, split)), ("v", slice(split, None))):
        arrays[f"0.{name}.out_scale"] = (step[columns] / 256).astype(np.float32)
        arrays[f"0.{name}.bias"] = (
            np.rint(256 * middle[columns] / step[columns]).clip(-MAX_BIAS, MAX_BIAS).astype(np.int32)
        )
    return arrays


def _scales(dump: KVDump, arrays: Arrays) -> None:
    """How values become 8-bit inputs, and K's fixed point; from the first windows."""
    windows = list(dump.fit_windows)[:SCALE_WINDOWS]
    for number, shape in enumerate(dump.layout.layers):
        for which in range(2):
            prefix = f"{number}.{'kv'[which]}."
            x = np.concatenate([target(dump, number, which, window) for window in windows])
            largest = np.maximum(np.abs(x.mean(0)) + SIGMAS * x.std(0), 1e-6)
            power = np.ones(len(largest), np.float32)
            if which == 0:
                arrays[prefix + "fix"] = _fixed_point(x, shape.key_dim // 2)
                power = np.exp2(arrays[prefix + "fix"].astype(np.float32))
            # A rotation leaves 14 binary places more.
            arrays[prefix + "in_scale"] = (127 / largest / (power * (1 << 14) if which == 0 else 1)).astype(np.float32)
            if number == 0:
                arrays[prefix + "out_scale"] *= power


def _fixed_point(x: np.ndarray[Any, Any], half: int) -> np.ndarray[Any, Any]:
    pairs = x.reshape(len(x), -1, 2, half)
    largest = np.hypot(pairs[:, :, 0], pairs[:, :, 1]).max(0)
    places = np.floor(np.log2(RANGE / (HEADROOM * np.maximum(largest, 1e-6)))).clip(-14, 30).astype(np.int8)
    return np.stack([places, places], 1).reshape(-1)  # places is [heads, half]


def _inputs(dump: KVDump, window: int, rows: slice, arrays: Arrays) -> list[tuple[Tensor, Tensor]]:
    """Per layer the inputs of K and of V of some rows of a window, float32 [rows, C] of whole numbers.

    In floating point, so here and there a step beside `reference.inputs_of`, which is all the same to a fit.
    """
    found = []
    for number in range(len(dump.layout.layers)):
        pair = []
        for which in range(2):
            prefix = f"{number}.{'kv'[which]}."
            scale = reach(arrays[prefix + "in_scale"], arrays.get(prefix + "fix"))
            x = target(dump, number, which, window, rows)
            pair.append(torch.from_numpy(x * scale).round_().clamp_(-127, 127))
        found.append((pair[0], pair[1]))
    return found


def _used(wiring: Wiring, which: int, before: list[tuple[int, int]], own: int) -> Tensor:
    """Which inputs of a part count, bool [inputs]. before: of the layers before, values of K, and of K and V."""
    flags = []
    for number, (keys, width) in enumerate(before):
        near = number < wiring.layers
        # In AQUA-KV K is predicted from K of the layer before, V from V of that and K of its own.
        flags += [near and (wiring.values or which == 0)] * keys
        flags += [near and (wiring.values or which == 1)] * (width - keys)
    return torch.tensor(flags + [wiring.own_keys] * own)


class _Sums:
    """Sums over rows: of the inputs, and of their products with those of the same layer and of the two before."""

    def __init__(self, layout: KVLayout, arrays: Arrays) -> None:
        self._keys = [x.heads * x.key_dim for x in layout.layers]
        width = [x.heads * (x.key_dim + x.value_dim) for x in layout.layers]
        self._sum = [torch.zeros(n, dtype=torch.double) for n in width]
        self._product = {
            (i, j): torch.zeros(width[i], width[j], dtype=torch.double)
            for i in range(len(width))
            for j in range(max(0, i - 2), i + 1)
        }
        self._rows = 0

    def add(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        rows = [torch.cat(pair, 1) for pair in layers]
        self._rows += len(rows[0])
        for number, x in enumerate(rows):
            self._sum[number] += x.sum(0)
            for (i, j), product in self._product.items():
                if i == number:
                    product += x.T @ rows[j]

    def solve(self, number: int, which: int, arrays: Arrays, wiring: Wiring) -> None:
        """Puts `weight`, `bias` and `out_scale` of a part among the arrays."""
        prefix, split = f"{number}.{'kv'[which]}.", self._keys[number]
        before = [number - 1, number - 2][: min(number, 2)]
        own = [(number, slice(0, split))] if which else []
        inputs = [*((i, slice(None)) for i in before), *own]
        shapes = [(self._keys[i], len(self._sum[i])) for i in before]
        used = _used(wiring, which, shapes, len(own) * split)
        target = (number, slice(split, None) if which else slice(0, split))
        gram = torch.cat([torch.cat([self._covariance(a, b) for b in inputs], 1) for a in inputs])
        moment = torch.cat([self._covariance(a, target) for a in inputs])
        gram += torch.eye(len(gram), dtype=torch.double) * DAMP * gram.diagonal().mean()
        weight = torch.zeros_like(moment)
        weight[used] = torch.linalg.solve(gram[used][:, used], moment[used])
        scale = (weight.abs().amax(0) / 127).clamp(min=1e-12)
        whole = (weight / scale).round()
        means = torch.cat([self._sum[i][part] for i, part in inputs]) / self._rows
        middle = self._sum[number][target[1]] / self._rows
        bias = ((middle - means @ (whole * scale)) / scale).round().clamp(-MAX_BIAS, MAX_BIAS)
        fix = arrays.get(prefix + "fix")
        unit = scale.numpy() / reach(arrays[prefix + "in_scale"], fix)
        arrays[prefix + "weight"], arrays[prefix + "bias"] = whole.to(torch.int8).numpy(), bias.to(torch.int32).numpy()
        arrays[prefix + "out_scale"] = (unit if fix is None else unit * np.exp2(fix.astype(float))).astype(np.float32)

    def _covariance(self, a: tuple[int, slice], b: tuple[int, slice]) -> Tensor:
        (i, rows), (j, columns) = a, b
        product = self._product[i, j] if i >= j else self._product[j, i].T
        mean = torch.outer(self._sum[i], self._sum[j]) / self._rows
        return (product - mean)[rows, columns]


# -- spread and tables -------------------------------------------------------------------------------------------------


def _tables(dump: KVDump, arrays: Arrays, progress: Progress, wiring: Wiring) -> None:
    """`scale` and `adapt` of every part, and `freqs`, from every `stride`th row of the windows."""
    stride = max(1, len(dump.fit_windows) * dump.length // SAMPLE)
    windows = [(window, slice(-window % stride, None, stride)) for window in dump.fit_windows]
    layers = len(dump.layout.layers)
    inputs = [
        [torch.cat(x) for x in zip(*pairs, strict=True)]
        for pairs in zip(*(_inputs(dump, *w, arrays) for w in windows), strict=True)
    ]
    tokens = torch.from_numpy(np.concatenate([dump.tokens(window)[rows] for window, rows in windows]))
    positions = torch.cat([torch.arange(dump.length)[rows] for _, rows in windows])
    rotation = reference.angles(arrays["rope_fine"], arrays["rope_coarse"], positions)
    counts = np.zeros((2 * CLASSES, SYMBOLS), np.int64)
    fits: list[Tensor] = []
    for number in range(layers):
        progress("lossless: tables", number, layers)
        for which in range(2):
            prefix = f"{number}.{'kv'[which]}."
            bits = torch.from_numpy(np.concatenate([dump.layer(number, w)[which][rows] for w, rows in windows])).long()
            part = _part(prefix, arrays)
            if number:
                before = [x for i in (number - 1, number - 2)[: min(number, 2)] for x in inputs[i]]
                total = _sums(part, torch.cat(before + inputs[number][:which], 1))
            else:
                split = inputs[0][0].shape[1]
                table = arrays["token_kv"][:, split:] if which else arrays["token_kv"][:, :split]
                total = reference.first_sums(part, table, tokens)
            mu = reference.predict(part, total, rotation)
            arrays[prefix + "scale"] = _spread(bits, mu)
            part = _part(prefix, arrays)
            still = reference.residuals(part, which, bits, mu, torch.zeros(len(bits), dtype=torch.long))
            adapt = _adaptation(still.fits, fits)
            arrays[prefix + "adapt"] = adapt if wiring.adapt else np.zeros_like(adapt)
            part = _part(prefix, arrays)
            coded = reference.residuals(part, which, bits, mu, reference.offsets(part, fits, len(bits)))
            fits.append(coded.fits)
            index = coded.classes * SYMBOLS + coded.symbols
            counts += torch.bincount(index.flatten(), minlength=counts.size).numpy().reshape(counts.shape)
    progress("lossless: tables", layers, layers)
    arrays["freqs"] = quantise(_smooth(counts), 12, floor=True)


def _part(prefix: str, arrays: Arrays) -> Part:
    """A part as far as it is there; without `scale` and `adapt`, as if they were 0."""
    nothing = np.zeros(len(arrays[prefix + "bias"]), np.int16)
    return Part(
        in_scale=arrays[prefix + "in_scale"],
        out_scale=arrays[prefix + "out_scale"],
        scale=arrays.get(prefix + "scale", nothing),
        bias=arrays[prefix + "bias"],
        adapt=arrays.get(prefix + "adapt", nothing[:3]),
        fix=arrays.get(prefix + "fix"),
        weight=arrays.get(prefix + "weight"),
    )


def _sums(part: Part, inputs: Tensor) -> Tensor:
    """As `reference.sums`; in float32, which is exact for less than 1,040 inputs, and good enough for a fit."""
    product = inputs @ torch.from_numpy(part.weight).float()
    return torch.from_numpy(part.bias).long() + product.long()


def _spread(bits: Tensor, mu: Tensor) -> np.ndarray[Any, Any]:
    """`scale`: quarter octaves of the residuals' standard deviation."""
    # The prediction was cut to 16 bits: half of its last place is put back.
    residual = _numbers(bits) - _numbers(mu, 0x8000)
    size = residual.abs().double().mean(0) * 1.2533  # of a normal distribution
    log = torch.log2(size.clamp(min=1e-30)) * 4
    return log.round().clamp(-MAX_SCALE, MAX_SCALE).to(torch.int16).numpy()


def _adaptation(fits: Tensor, before: list[Tensor]) -> np.ndarray[Any, Any]:
    """A, B and O of the least squares of `fits` on the fits of the two parts before."""
    zeros = torch.zeros_like(fits)
    one, two = ([zeros, zeros, *before])[-1], ([zeros, zeros, *before])[-2]
    x = torch.stack([one, two, torch.ones_like(fits)], 1).double()
    gram = x.T @ x + torch.diag(torch.tensor([1.0, 1.0, 1e-6], dtype=torch.double))
    found = torch.linalg.solve(gram, x.T @ fits.double()) * 256
    adapt: np.ndarray[Any, Any] = found.round().clamp(-MAX_ADAPT, MAX_ADAPT).to(torch.int32).numpy()
    return adapt


def _smooth(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Classes that were hardly seen borrow from all classes of their part with more."""
    out = counts.copy()
    for first in (0, CLASSES):
        part = counts[first : first + CLASSES]
        for i in range(CLASSES):
            if part[i].sum() < 20 * SYMBOLS:
                out[first + i] += part.sum(0) * 20 * SYMBOLS // max(1, part.sum())
    return out


def _numbers(bits: Tensor, below: int = 0) -> Tensor:
    finite = ((bits >> 7) & 0xFF) != 0xFF
    return torch.where(finite, (bits << 16) + below, 0).to(torch.int32).view(torch.float32)
