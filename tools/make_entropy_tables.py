"""Fits the tables of the entropy codec: `python -m tools.make_entropy_tables --out codecs/entropy/tables.bin`.

Channels of 64 tokens of real caches, and as many made up ones (a normal distribution around any mean), are clustered:
every class is the distribution that costs the fewest bits for the channels that choose it. The text is far from what
the benchmarks measure on. Takes a few minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import arguments
from benchmarks.conversations import load_model, tables_text
from kvstore.codecs.entropy import tables as spec
from kvstore.codecs.rans.coder import quantise

WINDOWS, WINDOW = 10, 2048
TEXT_OFFSET = 6_000_000  # characters
TOKENS = 64
CHANNELS = 200_000  # of each kind, real ones
MADE_UP = 0.05  # as many of these, by share
ROUNDS = 40
LEAST_SHARE = 0.6  # of a frequency unit: rarer symbols are escaped
Floats = npt.NDArray[np.float64]


def main() -> None:
    parser: argparse.ArgumentParser = arguments("Fit the tables of the entropy codec.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    freqs, costs = [], []
    for kind, values in enumerate(real_values(args)):
        rng = np.random.default_rng(kind)
        made_up = synthetic(rng, int(MADE_UP * CHANNELS), spread=kind == 0)
        symbols = symbols_of(np.concatenate([values[rng.permutation(len(values))[:CHANNELS]], made_up]))
        classes = cluster(histograms(symbols), rng)
        rows = np.stack([frequencies(row) for row in classes])
        freqs.append(rows)
        costs.append(costs_of(rows))
    data = np.stack([np.stack(freqs), np.stack(costs)]).astype("<u2").tobytes()
    args.out.write_bytes(data)
    print(f"{args.out}: {len(data)} bytes")


def real_values(args: argparse.Namespace) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Bits of keys and of values, each `[channels, 64 tokens]`."""
    model, tokenizer = load_model(args.model)
    text = tables_text(args.text, TEXT_OFFSET + 8 * WINDOWS * WINDOW)[TEXT_OFFSET:]
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : WINDOWS * WINDOW]
    kinds: tuple[list[npt.NDArray[np.uint16]], list[npt.NDArray[np.uint16]]] = ([], [])
    with torch.inference_mode():
        for begin in range(0, ids.shape[1], WINDOW):
            cache = model(ids[:, begin : begin + WINDOW], use_cache=True, logits_to_keep=1).past_key_values
            for layer in cache.layers:
                for found, tensor in zip(kinds, (layer.keys, layer.values), strict=True):
                    bits = tensor[0].view(torch.int16).numpy().view(np.uint16)  # [heads, tokens, dim]
                    blocks = bits[:, : WINDOW // TOKENS * TOKENS].reshape(bits.shape[0], -1, TOKENS, bits.shape[2])
                    found.append(blocks.transpose(0, 1, 3, 2).reshape(-1, TOKENS))
    return np.concatenate(kinds[0]), np.concatenate(kinds[1])


def synthetic(rng: np.random.Generator, count: int, spread: bool) -> npt.NDArray[np.uint16]:
    """Channels of normal values around a mean of 0 to 6 deviations, at any scale."""
    mean = rng.exponential(1.5 if spread else 0.4, count).clip(0, 8)
    scale = np.exp2(rng.uniform(-4, 4, count))
    values = (rng.standard_normal((count, TOKENS)) + mean[:, None]) * scale[:, None]
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def symbols_of(values: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """What the codec codes, for channels that are not clipped to their head's largest mean."""
    wide = values.astype(np.int64)
    exponent, sign, mantissa = (wide >> 7) & 0xFF, wide >> 15, (wide >> (7 - spec.MANTISSA_BITS)) & 3
    anchor = (exponent.sum(axis=1) + TOKENS // 2) // TOKENS
    flip = 2 * sign.sum(axis=1) > TOKENS
    relative = anchor[:, None] + spec.ABOVE - exponent
    symbol = ((sign ^ flip[:, None]) * spec.RELATIVE + relative) << spec.MANTISSA_BITS | mantissa
    outside = (exponent == 0) | (relative < 0) | (relative >= spec.RELATIVE)
    return np.where(outside, spec.ESCAPE, symbol)


def histograms(symbols: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    counts = np.zeros((len(symbols), spec.SYMBOLS), np.float32)
    np.add.at(counts, (np.arange(len(symbols))[:, None], symbols), 1)
    return counts


def cluster(counts: npt.NDArray[np.float32], rng: np.random.Generator) -> Floats:
    """k-means in code length: `[classes, symbols]` distributions."""
    overall = counts.sum(axis=0, dtype=np.float64) + 0.5
    overall /= overall.sum()
    classes = counts[rng.permutation(len(counts))[: spec.CLASSES]] + 8 * overall
    for _ in range(ROUNDS):
        classes /= classes.sum(axis=1, keepdims=True)
        chosen = -(counts @ np.log2(classes).T.astype(np.float32))
        best = chosen.argmin(axis=1)
        for number in range(spec.CLASSES):
            own = counts[best == number]
            some = own.sum(axis=0, dtype=np.float64) if len(own) else counts[rng.integers(len(counts))]
            classes[number] = some + 2 * overall
    order: Floats = classes / classes.sum(axis=1, keepdims=True)
    return order


def frequencies(row: Floats) -> npt.NDArray[np.uint16]:
    """Of each sign one range of exponents is known, with all mantissas: such a set is quick to test for."""
    total = 1 << spec.PROB_BITS
    cells = row[: spec.ESCAPE].reshape(2, spec.RELATIVE, -1)
    known = np.zeros(cells.shape[:2], bool)
    for sign in range(2):
        often = np.flatnonzero((cells[sign] * total >= LEAST_SHARE).any(axis=1))
        if len(often):
            known[sign, often[0] : often[-1] + 1] = True
    kept = np.where(known[:, :, None], np.maximum(cells, 1 / total), 0.0).ravel()
    escape = max(1.0 - cells[known].sum(), 1 / total)
    counts = (np.append(kept, escape) * (1 << 30)).astype(np.int64)
    return quantise(counts, spec.PROB_BITS)


def costs_of(freqs: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    used = np.log2((1 << spec.PROB_BITS) / np.maximum(freqs, 1).astype(np.float64))
    escape = used[:, spec.ESCAPE :] + 16
    bits = np.where(freqs > 0, used, escape)
    bits[:, spec.ESCAPE] = escape[:, 0]
    return np.rint(bits * spec.COST_UNIT).astype(np.uint16)


if __name__ == "__main__":
    main()
