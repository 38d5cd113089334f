"""Fits the tables of the donor codec: `python -m tools.make_donor_tables --profile FILE --out codecs/donor/tables.bin`.

Passages are run behind a prompt, a like one, a longer one, and behind other text; what one run's caches differ in from
another's, with what the profile's section "donor" says of it and without, gives the histograms. They are made alike for
both signs, for no model has a reason to prefer one, and smoothed: every table gets its share of one distribution,
that of all distances in units of their scale, so that what this model never does costs another one little. The text
is far from what the benchmarks measure on. Takes some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import arguments
from benchmarks.conversations import load_model, tables_text
from kvstore.codecs.donor import reference as donor_reference
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.predictive.model import CLASSES, ESCAPE, OFFSET, SYMBOLS
from kvstore.codecs.profile import Profile
from kvstore.codecs.rans.coder import quantise
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.rope import angles_of

TEXT_OFFSET = 6_000_000  # characters
WINDOWS, WINDOW_CHARACTERS = 6, 40_000
PASSAGE, BLOCK, STEP = 512, 64, 192  # tokens; every third block is coded
PROMPTS = (
    "You are a helpful assistant.",
    "You are an AI assistant.",
    "You are an AI assistant that answers questions about the following document concisely and politely.",
)
CONTEXT = (400, 380)  # tokens of other text before the passage
SMOOTHING = 0.01  # of a table's counts, and at least this many
LEAST = 500.0
Floats = npt.NDArray[np.float64]
Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Run:
    """A passage's keys and values, bits [tokens, C] of every layer, whose first token is at `position`."""

    position: int
    layers: Layers


def main() -> None:
    parser: argparse.ArgumentParser = arguments("Fit the tables of the donor codec.")
    parser.add_argument("--profile", type=Path, help='with a section "donor", for blocks coded with one too')
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    profile = None if args.profile is None else Profile.load(args.profile)
    models = [None] if profile is None else [None, DonorModel.from_profile(profile)]
    layout = ModelIdentity.from_transformers(model).layout if profile is None else profile.layout
    text = tables_text(args.text, TEXT_OFFSET + WINDOWS * WINDOW_CHARACTERS)[-WINDOWS * WINDOW_CHARACTERS :]
    counts = np.zeros((2 * CLASSES, SYMBOLS))
    for window in range(WINDOWS):
        part = text[window * WINDOW_CHARACTERS : (window + 1) * WINDOW_CHARACTERS]
        for donor, here in pairs(model, tokenizer, part):
            for propagated in models:
                counts += histograms(layout, donor, here, propagated)
        print(f"window {window + 1} of {WINDOWS}", flush=True)
    data = tables(counts).astype("<u2").tobytes()
    args.out.write_bytes(data)
    print(f"{args.out}: {len(data)} bytes")


def pairs(model: Any, tokenizer: Any, text: str) -> Iterator[tuple[Run, Run]]:
    """(donor, the same passage behind something else)."""

    def ids(part: str) -> torch.Tensor:
        found: torch.Tensor = tokenizer(part, return_tensors="pt", verbose=False).input_ids[0]
        return found

    heads = [ids(f"<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n") for prompt in PROMPTS]
    quarter = len(text) // 4
    passage = ids(text[3 * quarter :])[:PASSAGE]
    others = [torch.cat([heads[0], ids(text[i * quarter :])[:n]]) for i, n in enumerate(CONTEXT)]
    runs = [run(model, head, passage) for head in (*heads, *others)]
    yield from ((runs[0], runs[1]), (runs[0], runs[2]), (runs[3], runs[4]))


def run(model: Any, head: torch.Tensor, passage: torch.Tensor) -> Run:
    with torch.inference_mode():
        cache = model(torch.cat([head, passage])[None], use_cache=True, logits_to_keep=1).past_key_values
    start = len(head)
    bits = [tuple(_bits(x[0, :, start:]) for x in (layer.keys, layer.values)) for layer in cache.layers]
    return Run(start, bits)  # type: ignore[arg-type]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim] -> int64 [tokens, C]"""
    return values.transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF


def histograms(layout: KVLayout, donor: Run, here: Run, model: DonorModel | None) -> Floats:
    """Of the symbols of every class, in some blocks of a passage."""
    angles = None
    if here.position != donor.position and layout.rope != "none":
        angles = torch.from_numpy(angles_of(layout, here.position - donor.position)).long()
    counts = np.zeros(2 * CLASSES * SYMBOLS)
    heads = [x.heads for x in layout.layers]
    for start in range(0, len(here.layers[0][0]) - BLOCK + 1, STEP):
        rows = slice(start, start + BLOCK)
        block, theirs = ([(k[rows], v[rows]) for k, v in side.layers] for side in (here, donor))
        positions = here.position + torch.arange(start, start + BLOCK)
        cos, sin = (None, None) if angles is None else (x.expand(BLOCK, -1) for x in angles)
        rotated = torch.full((BLOCK,), angles is not None)
        given = donor_reference.Rows(heads, theirs, cos, sin, rotated, positions, model)
        for coded in donor_reference.parts_of(given, block)[1]:
            found = (coded.classes * SYMBOLS + coded.symbols).flatten()
            counts += np.bincount(found.numpy(), minlength=len(counts))
    return counts.reshape(2 * CLASSES, SYMBOLS)


def tables(counts: Floats) -> npt.NDArray[np.uint16]:
    """Frequencies that sum to 4096 a row, the same for both signs, none of them 0."""
    even = counts.copy()
    even[:, 1:ESCAPE] = (counts[:, 1:ESCAPE] + counts[:, ESCAPE - 1 : 0 : -1]) / 2
    share = np.maximum(SMOOTHING * even.sum(1, keepdims=True), LEAST)
    smooth = even + share * common(even)
    freqs = quantise(np.rint(smooth * 1000).astype(np.int64), 12, floor=True)
    both = np.minimum(freqs[:, 1:ESCAPE], freqs[:, ESCAPE - 1 : 0 : -1])
    freqs[:, OFFSET] += (freqs[:, 1:ESCAPE] - both).sum(1).astype(np.uint16)  # both halves of it are at most 1 apart
    side = np.arange(1, ESCAPE) != OFFSET
    freqs[:, 1:ESCAPE][:, side] = both[:, side]
    return freqs


def common(counts: Floats) -> Floats:
    """For every table, the distribution of all distances by the scale that its quarter and octave say; rows add up
    to 1. A distance counts where the axis is linear, octave 0, as any number within its bin."""
    rng = np.random.default_rng(0)
    distance = np.arange(SYMBOLS - 1) - OFFSET
    found = np.zeros((2 * CLASSES, SYMBOLS))
    for first in (0, CLASSES):
        sizes = np.concatenate(
            [
                (rng.choice(distance, 100_000, p=_share(counts[first + quarter])) + rng.random(100_000) - 0.5)
                * 2 ** (-quarter / 4)
                for quarter in range(4)
            ]
        )
        for number in range(CLASSES):
            octave, quarter = divmod(number, 4)
            bins = np.rint(sizes * 2 ** (quarter / 4 - octave)).astype(int)
            inside = (bins >= -OFFSET) & (bins < OFFSET)
            found[first + number] = np.bincount(np.where(inside, bins + OFFSET, ESCAPE), minlength=SYMBOLS)
    mirrored = found.copy()
    mirrored[:, 1:ESCAPE] = (found[:, 1:ESCAPE] + found[:, ESCAPE - 1 : 0 : -1]) / 2
    normal: Floats = mirrored / mirrored.sum(1, keepdims=True)
    return normal


def _share(row: Floats) -> Floats:
    known: Floats = row[:-1] + 1e-3
    return known / known.sum()


if __name__ == "__main__":
    main()
