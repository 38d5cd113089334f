"""Should bits follow surprisal? `python -m benchmarks.surprisal [--profile FILE] [--windows 8] [--recent N]`

The sequential KV paper (Definition 7) gives a token bits by its surprisal. Here the lossy predictive codec codes the
same text at several steps four ways: `uniform` (all rows alike), `surprisal` (a row's step is smaller by up to two
octaves the more bits its token was worth), `focus` (by what the calibrated map says of the row, the codec's own way),
and both. Rows: bits a value and both KLs, as in protocol A of `benchmarks.quality`, and `bits_at_equal_kl`: what each
takes for the KL (the larger of both, relative to those of `focus` at its middle step) that `focus` has there; its peer
is `focus`. With `--recent N` the last N tokens are exact, as `StoreConfig.exact_recent_tokens` keeps them; bits a value
are of the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import cut, prefill, test_text
from benchmarks.peers.quality.frontier import bits_at
from benchmarks.profile import profile_path
from kvstore.calibration.lossy.quality import NEAR, as_cached, divergences, ideal_bits, log_probabilities
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_rows import Engine, quantise
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.profile import Profile
from kvstore.core.layout import SINKS

PREFIX = 512
STEPS = (2.2, 3.2, 4.6)
WAYS = {"uniform": (False, False), "surprisal": (False, True), "focus": (True, False), "both": (True, True)}
"""By what steps follow: the calibrated map of the row, the token's surprisal."""
OCTAVES = 0.35  # a bit of surprisal above the mean, at most 2 octaves either way


def main() -> None:
    parser = arguments("Bits by surprisal against bits by calibrated cost.")
    parser.add_argument("--windows", type=int, help="test windows of 1,024 tokens (8)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="ways (all)")
    parser.add_argument("--recent", type=int, default=0, help="tokens at the end that stay exact (0)")
    args = parser.parse_args()
    windows = args.windows or (2 if args.quick else 8)
    rows = Rows("surprisal", args.json)
    model, tokenizer = load_model(args.model)
    profile = Profile.load(profile_path(model, tokenizer, args.profile))
    base = PredictiveModel.from_arrays(profile.layout, profile.section("lossless"))
    arrays = dict(profile.section("lossy"))
    plain = {name: np.zeros_like(x) if name.endswith(".focus") else x for name, x in arrays.items()}
    engines = {True: Engine(LossyModel.from_arrays(base, arrays)), False: Engine(LossyModel.from_arrays(base, plain))}
    found = {(name, step): np.zeros(3) for name in args.only for step in STEPS}
    for ids in cut(tokenizer, test_text(args.text, None, windows), windows):
        window = Window(model, ids, args.recent)
        for (name, step), sums in found.items():
            focus, surprisal = WAYS[name]
            sums += np.array(window.code(engines[focus], step, surprisal)) / windows
    middle = found.get(("focus", STEPS[1]))
    for name in args.only:
        points = [found[name, step] for step in STEPS]
        for step, (bits, kl, near) in zip(STEPS, points, strict=True):
            for metric, value, unit in (
                ("bits_per_value", bits, "bits"),
                ("kl", kl, "nats"),
                ("kl_first64", near, "nats"),
            ):
                rows.add(f"predictive/lossy/{name}/{step:g}", metric, value, unit)
        if middle is None:
            continue
        curve = [(bits, max(kl / middle[1], near / middle[2])) for bits, kl, near in points]
        needed = bits_at(curve, 1.0)
        if needed is not None:
            rows.add(f"predictive/lossy/{name}", "bits_at_equal_kl", needed, "bits", "focus", needed / middle[0])
    rows.main_exit()


class Window:
    """One window: its exact cache, what the model says after it, and the surprisal of its tokens."""

    @torch.inference_mode()
    def __init__(self, model: Any, ids: torch.Tensor, recent: int) -> None:
        self._model, self._ids = model, ids
        positions = torch.arange(PREFIX)
        self._exact = (positions < SINKS) | (positions >= PREFIX - recent)
        pairs = prefill(model, ids[:PREFIX])
        self._bits = [
            [x.transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF for x in pair]
            for pair in pairs
        ]
        self._want = log_probabilities(model, ids[None, PREFIX:], [x[None] for pair in pairs for x in pair])
        logits = model(ids[None, :PREFIX]).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[1:PREFIX], reduction="none") / np.log(2)
        surprisal = torch.cat([loss.mean()[None], loss])
        self._favour = ((surprisal - surprisal.mean()) * OCTAVES).clamp(-2, 2)

    @torch.inference_mode()
    def code(self, engine: Engine, step: float, surprisal: bool) -> tuple[float, float, float]:
        """(bits a value, KL, KL of the first 64 tokens)."""
        rows = quantise(
            engine,
            Steps.of(step, step),
            self._ids[:PREFIX],
            torch.arange(PREFIX),
            self._exact,
            self._bits,
            self._favour if surprisal else None,
        )
        cached = as_cached(rows.decoded, engine.model.layout)
        got = log_probabilities(self._model, self._ids[None, PREFIX:], cached)
        each = divergences(self._want, got)
        values = int((~self._exact).sum()) * sum(x.shape[1] for pair in self._bits for x in pair)
        return ideal_bits(engine, rows) / values, each.mean().item(), each[:NEAR].mean().item()


if __name__ == "__main__":
    main()
