"""Fits how differences go on from layer to layer, for a `DonorModel`.

What differs, keys before the rotary embedding, is predicted in each layer from what differs in the layer before (and V
also from its own K), by ridge regression, every token counting the same, whatever the size of its differences. This is
what AQUA-KV (arXiv:2501.19392) does with values, done with differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from kvstore.calibration.targets import angles
from kvstore.codecs.predictive.linear_model import RANGE
from kvstore.core.layout import KVLayout

Tensor = torch.Tensor
Arrays = dict[str, Any]
Difference = Callable[[int, int], Tensor]
"""What a passage differs in, by layer and whether it is of V: float32 [tokens, C], keys before the rotary embedding."""
_RIDGE = 0.01
# Differences are told in 127 steps of which this many are their standard deviation: few are cut off, few are lost.
_STEPS = 16.0
_HEADROOM = 4.0


def fit_differences(layout: KVLayout, found: Iterable[Difference]) -> Arrays:
    """The arrays of a `DonorModel` for what passages differ in from what they are coded against; they are asked for in
    the order of layers."""
    shapes = layout.layers
    widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in shapes]
    sizes = [sum(widths[max(0, number - 1)]) + sum(widths[number]) for number in range(len(shapes))]
    products = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]
    power = [[torch.zeros(width, dtype=torch.float64) for width in pair] for pair in widths]
    most = [torch.zeros(pair[0]) for pair in widths]
    tokens = 0
    for difference in found:
        before: list[Tensor] = []
        for layer in range(len(shapes)):
            now = [difference(layer, which) for which in range(2)]
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
    deviation = [[(x / tokens).sqrt().clamp_min(1e-6) for x in pair] for pair in power]
    arrays: Arrays = dict(angles(layout))
    for layer in range(len(shapes)):
        for which in range(2):
            _fit_part(arrays, layer, which, products[layer], deviation, widths, most[layer], shapes[layer].key_dim // 2)
    return arrays


def _fit_part(
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
