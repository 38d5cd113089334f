"""Does coding with loss get worse along a long prefix? `python -m benchmarks.long_context [--only NAME ...]`

Of each window of 8,192 tokens the first 8,000 are coded (but for 4 sinks) and decoded, and the others are scored on the
decoded cache against the same on the exact one: `kl`, and `kl_first64` over those next to what was coded. `error/N`:
squares of errors over squares of values, a mean over K and V of all layers, of 1,024 tokens from token N on, and
`bits/N` what they take; `error_spread`, the largest `error/N` over their mean, is 1 where position does not matter.
`rate/N`: what the first N tokens take, and its ratio to the rate that was asked for. Everything was fitted to windows
of 1,024 tokens, AQUA-KV to those of the profile. Text as in `benchmarks.quality`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import Pairs, prefill, test_text
from benchmarks.peers.quality.frontier import frontier
from benchmarks.peers.quality.methods import CASES, LOSSY, Context, Method
from benchmarks.quality import AT_KL, NEAR, SINKS, make
from kvstore.calibration.lossy.quality import divergences, log_probabilities
from kvstore.integrations.transformers import layout_from_config

LENGTH, PREFIX, PIECE = 8192, 8000, 1024
STEP = 512  # tokens that are coded at once
RATES = (512, 2048, PREFIX)
DEFAULT = ("predictive/lossy@0.32", "predictive/lossy@0.55", "predictive/lossy@0.95", "aqua/2bit", "higgs/4bit")


@dataclass
class Score:
    """Of one method: a number a window, and sums a step."""

    kl: list[float] = field(default_factory=list)
    near: list[float] = field(default_factory=list)
    coded: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((-(-PREFIX // STEP), 2)))
    """[steps, (bytes, values)]"""
    errors: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(-(-PREFIX // STEP)))

    def bits(self, begin: int, end: int) -> float:
        """Bits a value of tokens, whole steps but at the end."""
        found = self.coded[begin // STEP : -(-end // STEP)].sum(0)
        return float(8 * found[0] / found[1])


def main() -> None:
    parser = arguments("Loss of quality by position, and after a long prefix.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(DEFAULT), help="methods to run")
    parser.add_argument("--windows", type=int, help="test windows of 8,192 tokens (4)")
    parser.add_argument("--calibration-windows", type=int, help="windows of 1,024 tokens to fit to (64)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    args = parser.parse_args()
    windows = args.windows or (1 if args.quick else 4)
    calibration_windows = args.calibration_windows or (8 if args.quick else 64)
    rows = Rows("long_context", args.json)
    model, tokenizer = load_model(args.model)
    layout = layout_from_config(model.config, model.dtype)
    context = Context(model, tokenizer, layout, args.text, None, calibration_windows, args.profile)
    text = test_text(args.text, None, windows * LENGTH // 1024)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = min(windows, len(ids) // LENGTH)
    if not windows:
        raise SystemExit(f"--text: {len(ids)} tokens are fewer than a window of {LENGTH}")
    methods = make(rows, args.only, context)
    scores = {name: Score() for name in methods}
    for number in range(windows):
        measure(model, ids[number * LENGTH : (number + 1) * LENGTH], methods, scores)
    report(rows, scores, windows)
    rows.main_exit()


@torch.inference_mode()
def measure(model: Any, ids: torch.Tensor, methods: Mapping[str, Method], scores: Mapping[str, Score]) -> None:
    """Scores all methods on one window."""
    exact = prefill(model, ids[:PREFIX])
    reference = log_probabilities(model, ids[None, PREFIX:], [x[None] for pair in exact for x in pair])
    for name, method in methods.items():
        score, decoded = scores[name], [(k.clone(), v.clone()) for k, v in exact]
        for step, begin in enumerate(range(0, PREFIX, STEP)):
            at = slice(max(begin, SINKS), min(begin + STEP, PREFIX))
            given = [(k[:, at], v[:, at]) for k, v in exact]
            found, size = method.code(ids[at], given, at.start)
            score.coded[step] += size, sum(x.numel() for pair in given for x in pair)
            score.errors[step] += relative_error(given, found)
            for pair, parts in zip(decoded, found, strict=True):
                for x, part in zip(pair, parts, strict=True):
                    x[:, at] = part
        each = divergences(
            reference, log_probabilities(model, ids[None, PREFIX:], [x[None] for pair in decoded for x in pair])
        )
        score.kl.append(each.mean().item())
        score.near.append(each[:NEAR].mean().item())


def relative_error(want: Pairs, found: Pairs) -> float:
    """Squares of errors over squares of values, a mean over K and V of all layers."""
    both = [pair for one, other in zip(want, found, strict=True) for pair in zip(one, other, strict=True)]
    return float(np.mean([((x.float() - y.float()).square().sum() / x.float().square().sum()).item() for x, y in both]))


def report(rows: Rows, scores: Mapping[str, Score], windows: int) -> None:
    """All rows, and at how many bits predictive coding loses as little as peers do."""
    losses: dict[str, dict[str, float]] = {}
    for name, score in scores.items():
        losses[name] = {"kl": float(np.mean(score.kl)), "kl_first64": float(np.mean(score.near))}
        losses[name]["bits"] = score.bits(0, PREFIX)
        rows.add(name, "bits_per_value", losses[name]["bits"], "bits")
        if name.startswith(LOSSY):
            asked = float(name.removeprefix(LOSSY))
            for tokens in RATES:
                rows.add(name, f"rate/{tokens}", given := score.bits(0, tokens), "bits", "asked", given / asked)
        for metric in ("kl", "kl_first64"):
            rows.add(name, metric, losses[name][metric], "nats")
        errors = score.errors.reshape(-1, PIECE // STEP).mean(1) / windows
        for begin, error in zip(range(0, PREFIX, PIECE), errors.tolist(), strict=True):
            rows.add(name, f"error/{begin}", error, "of the values'")
            rows.add(name, f"bits/{begin}", score.bits(begin, min(begin + PIECE, PREFIX)), "bits")
        rows.add(name, "error_spread", float(errors.max() / errors.mean()), "largest over mean")
    ladder = [x for name, x in losses.items() if name.startswith(LOSSY)]
    if ladder:
        curves = {metric: [(x["bits"], x[metric]) for x in ladder] for metric in ("kl", "kl_first64")}
        for case, (needed, peer) in frontier(curves, losses, AT_KL).items():
            if needed is not None:
                ratio = needed / losses[peer]["bits"]
                rows.add(f"predictive/lossy/{case}", "bits_per_value", needed, "bits", peer, ratio)


if __name__ == "__main__":
    main()
