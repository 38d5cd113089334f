"""Speculative coding: `python -m benchmarks.speculative [--weights int8 ...] [--calibration-windows 4] [--model NAME]`

Windows of held-out text are prefilled at once in bf16; predictors made of the model run the same tokens in passes of
256. Rows for each predictor: `ratio` of raw bytes to all bytes of the body (its peer is `entropy` on the same caches);
`bits_per_value` (its peer is the ideal code length of the published mixture: 0.95 of a normal distribution, 0.03 of one
three times as wide, 0.02 of the window's own histogram, with a scale for every channel of the window, given away);
`bit_identical`, the share of windows whose body decodes to every bit. `/e4m3`: the same of the caches in fp8, and
`ratio_to_bf16`. `/linear`: with the profile that `Predictor.fitted` makes of windows for calibration; its peer is the
same predictor without.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.archives import BLOCK
from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import LENGTH, Pairs, calibration_text, cut, prefill, test_text
from kvstore.codecs import codec_by_name
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.speculative.codec import SpeculativeCodec
from kvstore.codecs.speculative.mixture import edges_of_codes, ranks_of
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.integrations.transformers import Predictor, layout_from_config
from kvstore.integrations.transformers.predictor import WEIGHTS

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


def main() -> None:
    parser = arguments("Speculative coding: bytes against raw, entropy, and the mixture's ideal.")
    parser.add_argument("--windows", type=int, help="of held-out text (2)")
    parser.add_argument("--tokens", type=int, default=512, help="of each window (512)")
    parser.add_argument("--weights", nargs="*", default=list(WEIGHTS), choices=WEIGHTS, help="of predictors (all)")
    parser.add_argument("--calibration-windows", type=int, default=0, help="to fit /linear to (0: none)")
    args = parser.parse_args()
    count, windows = min(args.tokens, LENGTH), args.windows or (1 if args.quick else 2)
    rows = Rows("speculative", args.json)
    model, tokenizer = load_model(args.model)
    layout = layout_from_config(model.config, model.dtype)
    ids = cut(tokenizer, test_text(args.text, None, windows), windows)[:, :count]
    caches = [prefill(model, window) for window in ids]
    raw = sum(x.nbytes for cache in caches for pair in cache for x in pair)
    plain = sum(entropy_bytes(layout, cache) for cache in caches)
    rows.add("entropy", "ratio", raw / plain, "x")
    for weights in args.weights:
        predictor = Predictor.of(model, weights)
        found = [list(predictor.predictions(window.tolist(), layout)) for window in ids]
        size = measure(rows, weights, predictor, layout, ids, caches, found)
        rows.add(weights, "ratio", raw / size, "x", "entropy", plain / size)
        add_bits(rows, weights, size, caches, found)
        small = [[(k.to(FP8), v.to(FP8)) for k, v in cache] for cache in caches]
        size8 = measure(rows, f"{weights}/e4m3", predictor, replace(layout, dtype="float8_e4m3fn"), ids, small, found)
        rows.add(f"{weights}/e4m3", "ratio", raw / 2 / size8, "x", "fp8 as it is", raw / 2 / size8)
        rows.add(f"{weights}/e4m3", "ratio_to_bf16", raw / size8, "x", "bf16 as it is", raw / size8)
        add_bits(rows, f"{weights}/e4m3", size8, small, found)
        if args.calibration_windows:
            text = calibration_text(args.text, None, args.calibration_windows)
            fitted = predictor.fitted(model, cut(tokenizer, text, args.calibration_windows)[:, :count].tolist())
            less = measure(rows, f"{weights}/linear", fitted, layout, ids, caches, found)
            rows.add(f"{weights}/linear", "ratio", raw / less, "x", weights, size / less)
    rows.main_exit()


def add_bits(rows: Rows, case: str, size: int, caches: list[Pairs], found: list[Any]) -> None:
    bits = 8 * size / sum(x.numel() for cache in caches for pair in cache for x in pair)
    ideal = float(np.mean([ideal_bits(cache, joined(chunks)) for cache, chunks in zip(caches, found, strict=True)]))
    rows.add(case, "bits_per_value", bits, "bits", "mixture", bits / ideal)


def measure(
    rows: Rows, case: str, predictor: Predictor, layout: KVLayout, ids: Tensor, caches: list[Pairs], found: list[Any]
) -> int:
    """Bytes of all windows' bodies; adds whether they come back."""
    codec, size, same = SpeculativeCodec(layout, predictor.fingerprint, predictor.profile), 0, 0
    for window, cache, chunks in zip(ids, caches, found, strict=True):
        tokens, counts = window.numpy().astype(np.uint32), predictor.counts(len(window))
        body = codec.encode(tokens, cache, counts, chunks, [True] * len(counts))
        out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in cache]
        codec.decode(tokens, body, counts, chunks, out)
        same += all(
            torch.equal(codes_of(a), codes_of(b))
            for x, y in zip(out, cache, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        size += len(body)
    rows.add(case, "bit_identical", same / len(ids), "share of windows")
    return size


def joined(chunks: list[Pairs]) -> Pairs:
    """The predictions of a whole window."""
    return [(torch.cat([x[0] for x in one], 1), torch.cat([x[1] for x in one], 1)) for one in zip(*chunks, strict=True)]


def entropy_bytes(layout: KVLayout, cache: Pairs) -> int:
    view, codec, size = KVView.of_layers(layout, cache), codec_by_name("entropy"), 0
    for begin in range(0, view.tokens, BLOCK):
        part = view.narrow(begin, min(BLOCK, view.tokens - begin))
        info = BlockInfo(layout, np.zeros(part.tokens, np.uint32), begin)
        sizes = codec.encode(info, part, memoryview(bytearray(codec.bound(info))))
        assert sizes is not None  # it fits by the meaning of bound
        size += sum(sizes)
    return size


def ideal_bits(cache: Pairs, predicted: Pairs) -> float:
    """Bits a value of the mixture, over all layers. Scales: of the window's own differences."""
    spent, values = 0.0, 0
    for which in range(2):
        histogram = torch.bincount(torch.cat([codes_of(pair[which]).flatten() for pair in cache]), minlength=1 << 16)
        share = (histogram.double() + 0.01) / (histogram.sum() + 0.01 * (1 << 16))
        for own, near in zip(cache, predicted, strict=True):
            x, mean = own[which], near[which].double()
            low, high = bins_of(x)
            scale = (x.double() - mean).pow(2).mean(1, keepdim=True).sqrt() + 1e-9
            likely = 0.95 * mass(low, high, mean, scale) + 0.03 * mass(low, high, mean, 3 * scale)
            spent -= float((likely + 0.02 * share[codes_of(x)]).log2().sum())
            values += x.numel()
    return spent / values


def codes_of(x: Tensor) -> Tensor:
    """Of e4m3 in the order of numbers."""
    if x.dtype == FP8:
        return torch.from_numpy(ranks_of(x.contiguous().view(torch.uint8).numpy()))
    return x.contiguous().view(torch.int16).long() & 0xFFFF


def bins_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that are rounded to each value: from, to."""
    if x.dtype == FP8:
        edges, ranks = torch.from_numpy(edges_of_codes()).double(), codes_of(x)
        return edges[ranks], edges[ranks + 1]
    codes = codes_of(x) & 0x7FFF
    up, down = ((codes + step).clamp_min(0).to(torch.int16).view(torch.bfloat16).double() for step in (1, -1))
    size = x.double().abs()
    outer, inner = (size + up) / 2, torch.where(codes > 0, (size + down) / 2, 0.0)
    return torch.where(x < 0, -outer, inner), torch.where(x < 0, -inner, outer)


def mass(low: Tensor, high: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """How likely a normal distribution is between two numbers."""
    a, b = (low - mean) / scale, (high - mean) / scale
    flip = a > 0
    a, b = torch.where(flip, -b, a), torch.where(flip, -a, b)
    below_a, below_b = (0.5 * torch.erfc(-x * math.sqrt(0.5)) for x in (a, b))
    return (below_b - below_a).clamp_min(0)


if __name__ == "__main__":
    main()
