"""What reuse loses: caches from donors, mended more and more, against exact ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.approximate.plan import changed, listed_rows, reused, sharpened
from kvstore.calibration.approximate.cases import ALIKE, Case, Tokens
from kvstore.calibration.lossy.quality import divergences
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.codecs.view import KVView
from kvstore.core.approximate import Candidate, Estimates, content_of
from kvstore.core.cache_argument import cache_name, cache_of
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.integrations.transformers.cache import cache_from_layers
from kvstore.integrations.transformers.recompute import recompute

Floats = npt.NDArray[np.float64]
LEVELS = (0.3, 0.08, 0.02)  # rows of at least this error are recomputed, by turns
ROUGH = Estimates(0.35, 32.0, 1.5, 0.002, 0.8)  # which rows these are; what is fitted depends little on it


@dataclass(frozen=True)
class Level:
    """A cache whose `positions` were recomputed: the errors found there, and the KL, nats a token."""

    positions: npt.NDArray[np.int64]
    errors: Floats
    kl: float


@dataclass(frozen=True)
class Seen:
    """A case. errors: of the rows' content (`content_of`) as donors have them, [tokens]; spans: rising, with `changed`
    for each."""

    tokens: int
    exact: int
    spans: tuple[Candidate, ...]
    changed: tuple[int, ...]
    errors: Floats
    levels: tuple[Level, ...]


def measured(model: Any, layout: KVLayout, found: Iterator[Case]) -> Iterator[Seen]:
    """Each case, put together as a store does it."""
    for case in found:
        exact, before = prefill(model, case.prompt), [prefill(model, tokens) for tokens in case.before]
        layers = assembled(layout, case, before)
        contents = [(content_of(layout, *x), content_of(layout, *y)) for x, y in zip(layers, exact, strict=True)]
        errors = np.mean([relative(x, y[:, :, : x.shape[2]]) for x, y in contents], 0)
        yield _seen(model, case, exact, layers, errors)


@torch.inference_mode()
def assembled(layout: KVLayout, case: Case, before: Sequence[KVLayers]) -> KVLayers:
    """The rows of donors at their new places, zeros where there are none; the last token of the prompt is not there."""
    tokens = len(case.prompt) - 1
    layers = []
    for number, pair in enumerate(before[0]):
        made = [torch.zeros(1, x.shape[1], tokens, x.shape[3], dtype=x.dtype) for x in pair]
        for which, to in enumerate(made):
            to[:, :, :ALIKE] = pair[which][:, :, :ALIKE]
            for x in case.pieces:
                rows = before[x.donor][number][which][:, :, x.donor_start : x.donor_start + x.count]
                to[:, :, x.start : x.start + x.count] = rows[:, :, : tokens - x.start]
        layers.append((made[0], made[1]))
    view = KVView.of_layers(layout, [(k[0], v[0]) for k, v in layers])
    for x in case.pieces:
        rotate_keys(view.narrow(x.start, min(x.count, tokens - x.start)), x.shift)
    return tuple(layers)


def _seen(model: Any, case: Case, exact: KVLayers, layers: KVLayers, errors: Floats) -> Seen:
    tokens = len(case.prompt) - 1
    spans = tuple(replace(x, count=min(x.count, tokens - x.start)) for x in case.pieces)
    before = tuple(changed(x, ALIKE) for x in spans)
    reference, levels = predictions(model, case.after, exact), []
    for worth in LEVELS:
        listed = np.arange(tokens) >= ALIKE
        for span, count in zip(spans, before, strict=True):
            bad = listed_rows(span, ROUGH.errors(np.arange(span.count), count), worth)
            listed[span.start + bad : span.start + span.count] = False
        positions = np.flatnonzero(listed)
        copies = tuple((k.clone(), v.clone()) for k, v in layers)
        mended = recompute(model, copies, case.prompt, positions.tolist())
        after = predictions(model, case.after, mended.cache)
        levels.append(Level(positions, mended.deviation.errors, divergences(reference, after).mean().item()))
    return Seen(tokens, ALIKE, spans, before, errors, tuple(levels))


@torch.inference_mode()
def prefill(model: Any, tokens: Tokens) -> KVLayers:
    """K and V of every layer, computed at once."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None].to(model.device)
    cache = cache_of(model(ids, use_cache=True, logits_to_keep=1))
    return tuple((layer.keys, layer.values) for layer in cache.layers)


@torch.inference_mode()
def predictions(model: Any, tokens: Tokens, cache: Any) -> torch.Tensor:
    """Log-probabilities after each token, float32 [tokens, vocabulary]. cache: grows, unless it is layers."""
    held = cache if hasattr(cache, "layers") else cache_from_layers(cache)
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None].to(model.device)
    logits: torch.Tensor = model(ids, **{cache_name(model): held}, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def relative(found: torch.Tensor, want: torch.Tensor) -> Floats:
    """|change|^2 / |value|^2 of each position, [tokens] of [1, heads, tokens, dim]."""
    change, value = ((x.float().square().sum((0, 1, 3))) for x in (found - want.float(), want))
    return np.asarray((change / value.clamp_min(1e-30)).double().cpu().numpy())


def left(seen: Seen, level: Level, estimates: Estimates) -> float:
    """The mean error that is left after a level, as far as a program can know it: `sharpened`."""
    whole = Estimates(estimates.seam_error, estimates.reach, estimates.fall, 0.0, 1.0)
    pairs = list(zip(seen.spans, seen.changed, strict=True))
    kept = [(x, whole.errors(x.run + np.arange(x.count), count)) for x, count in pairs]
    listed = np.zeros(seen.tokens, np.bool_)
    listed[level.positions] = True
    return sharpened(reused(kept, seen.exact, listed, whole), level.positions, level.errors, whole)


def all_levels(found: Sequence[Seen], estimates: Estimates) -> Floats:
    """(error left, KL) of every level of every case, float64 [n, 2]."""
    return np.array([(left(x, level, estimates), level.kl) for x in found for level in x.levels])
