"""Fits the profile's section "donor": how a difference from a donor goes on from layer to layer.

The second half of a window is run once more, behind the beginning or the middle of another window. What then differs
from the dump, keys before the rotary embedding, is predicted in each layer from what differs in the layer before (and
V also from its own K), by ridge regression, every token counting the same, whatever the size of its differences. This
is what AQUA-KV (arXiv:2501.19392) does with values, done with differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.calibration.dump import SINKS, KVDump, Progress, silent
from kvstore.calibration.lossless import angles
from kvstore.calibration.rows import target, unrotated
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor import DonorCodec
from kvstore.codecs.donor_model import DonorModel
from kvstore.codecs.donor_spans import Span
from kvstore.codecs.entropy import EntropyCodec
from kvstore.codecs.linear_model import RANGE, rotates
from kvstore.codecs.view import KVView

Tensor = torch.Tensor
Arrays = dict[str, Any]

WINDOWS = 24  # more of them than this improve little
CONTEXTS = (16, 384)  # tokens before the passage: another prompt, another document
_RIDGE = 0.01
# Differences are told in 127 steps of which this many are their standard deviation: few are cut off, few are lost.
_STEPS = 16.0
_HEADROOM = 4.0


@dataclass(frozen=True)
class Alike:
    """The same tokens behind two beginnings. window: of the dump, where the passage begins at `start`; layers: of the
    other run, per layer (K, V), bfloat16 [heads, tokens, dim], which begins at `position` there."""

    window: int
    start: int
    position: int
    layers: list[tuple[Tensor, Tensor]]

    def numbers(self, dump: KVDump, layer: int, which: int) -> tuple[Tensor, Tensor]:
        """(the donor's, the other run's) values of a part before the rotary embedding, float32 [tokens, C]."""
        rows = slice(self.start, dump.length)
        own = self.layers[layer][which].transpose(0, 1).flatten(1).float().numpy()
        if which == 0 and rotates(dump.layout):
            positions = np.arange(self.position, self.position + len(own))
            own = unrotated(own, dump.layout, dump.layout.layers[layer].key_dim, positions)
        return torch.from_numpy(target(dump, layer, which, self.window, rows)), torch.from_numpy(own)


def alike(model: Any, dump: KVDump, windows: Sequence[int]) -> Iterator[Alike]:
    """The second half of each of these windows behind some of the next one: a few tokens or many, by turns."""
    start = dump.length // 2
    for number, window in enumerate(windows):
        context = min(CONTEXTS[number % len(CONTEXTS)], start - SINKS)
        other = dump.tokens(windows[(number + 1) % len(windows)])
        ids = torch.from_numpy(np.concatenate([other[:context], dump.tokens(window)[start:]]))
        with torch.inference_mode():
            cache = model(ids[None].to(model.device), use_cache=True, logits_to_keep=1).past_key_values
        layers = [(x.keys[0, :, context:].cpu().clone(), x.values[0, :, context:].cpu().clone()) for x in cache.layers]
        yield Alike(window, start, context, layers)


def fit(model: Any, dump: KVDump, progress: Progress = silent) -> Arrays:
    """The arrays of the section (see `DonorModel`)."""
    shapes = dump.layout.layers
    widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in shapes]
    sizes = [sum(widths[max(0, number - 1)]) + sum(widths[number]) for number in range(len(shapes))]
    products = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]
    power = [[torch.zeros(width, dtype=torch.float64) for width in pair] for pair in widths]
    most = [torch.zeros(pair[0]) for pair in widths]
    windows = dump.some(WINDOWS)
    tokens = 0
    for done, pair in enumerate(alike(model, dump, windows)):
        progress("donor: running the model", done, len(windows))
        before: list[Tensor] = []
        for layer in range(len(shapes)):
            now = [_difference(pair, dump, layer, which) for which in range(2)]
            for which in range(2):
                power[layer][which] += now[which].double().pow(2).sum(0)
            most[layer] = torch.maximum(most[layer], now[0].abs().amax(0))
            if layer:
                rows = torch.cat([*before, *now], 1)
                size = rows[:, : len(products[layer]) - sum(widths[layer])].pow(2).mean(1, keepdim=True).sqrt()
                rows = rows / size.clamp_min(1e-6)
                products[layer] += (rows.T @ rows).double()
            before = now
        tokens += len(now[0])
    progress("donor: running the model", len(windows), len(windows))
    deviation = [[(x / tokens).sqrt().clamp_min(1e-6) for x in pair] for pair in power]
    arrays: Arrays = dict(angles(dump.layout)) if rotates(dump.layout) else {}
    for layer in range(len(shapes)):
        for which in range(2):
            _part(arrays, layer, which, products[layer], deviation, widths, most[layer], shapes[layer].key_dim // 2)
    return arrays


def _difference(pair: Alike, dump: KVDump, layer: int, which: int) -> Tensor:
    donor, own = pair.numbers(dump, layer, which)
    return own - donor


def _part(
    arrays: Arrays,
    layer: int,
    which: int,
    product: Tensor,
    deviation: list[list[Tensor]],
    widths: list[tuple[int, int]],
    most: Tensor,
    half: int,
) -> None:
    prefix = f"{layer}.{'kv'[which]}."
    places = torch.zeros(widths[layer][which])
    rotated = which == 0 and "rope_fine" in arrays
    if rotated:
        pairs = most.view(-1, 2, half).amax(1, keepdim=True).expand(-1, 2, half).reshape(-1)
        places = torch.log2(RANGE / (_HEADROOM * pairs.clamp_min(1e-6))).floor().clamp(-14, 30)
        arrays[prefix + "fix"] = places.to(torch.int8).numpy()
    power = torch.exp2(places.double())
    steps = _STEPS / deviation[layer][which]
    arrays[prefix + "in_scale"] = (steps / (power * 2**14 if rotated else 1)).float().numpy()
    if layer == 0:
        arrays[prefix + "out_scale"] = np.ones(widths[0][which], np.float32)
        return
    inputs = sum(widths[layer - 1]) + (widths[layer][0] if which else 0)
    outputs = slice(inputs, inputs + widths[layer][which])
    known, wanted = product[:inputs, :inputs], product[:inputs, outputs]
    ridge = _RIDGE * known.diagonal().mean() * torch.eye(inputs, dtype=torch.float64)
    weight = torch.linalg.solve(known + ridge, wanted)
    taken = torch.cat([*deviation[layer - 1], *deviation[layer][:which]]) / _STEPS
    weight = weight * taken[:, None]
    scale = (weight.abs().amax(0) / 127).clamp_min(1e-12)
    arrays[prefix + "weight"] = (weight / scale).round().to(torch.int8).numpy()
    arrays[prefix + "out_scale"] = (scale * power).float().numpy()


def report(model: Any, dump: KVDump, arrays: Arrays, block: int = 64) -> dict[str, Any]:
    """Of the held-out windows, whole payloads: "bits_per_value" with the fit, "without" by the donor alone."""
    codecs = (DonorCodec(EntropyCodec(), DonorModel.from_arrays(dump.layout, arrays)), DonorCodec(EntropyCodec()))
    spent, values = [0, 0], 0
    for pair in alike(model, dump, list(dump.held_out)):
        stored = [(k[:, pair.start :], v[:, pair.start :]) for k, v in dump.tensors(pair.window)]
        donor = KVView.of_layers(dump.layout, stored)
        view = KVView.of_layers(dump.layout, [(k.contiguous(), v.contiguous()) for k, v in pair.layers])
        tokens = dump.tokens(pair.window)[pair.start :].astype(np.uint32)
        values += view.nbytes // dump.layout.item_bytes
        for begin in range(0, len(tokens), block):
            info = BlockInfo(dump.layout, tokens[begin : begin + block], pair.position + begin)
            span = Span(0, info.count, 0, 0, pair.position - pair.start)
            rows = [DonorRows.of(span, donor.narrow(begin, info.count))]
            for number, codec in enumerate(codecs):
                room = memoryview(bytearray(codec.bound(info)))
                sizes = codec.encode(info, view.narrow(begin, info.count), rows, room)
                assert sizes is not None  # it fits by the meaning of bound
                spent[number] += 8 * sum(sizes)
    return {"bits_per_value": spent[0] / values, "without": spent[1] / values}
