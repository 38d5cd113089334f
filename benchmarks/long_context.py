"""Does coding with loss get worse along a long prefix? `python -m benchmarks.long_context [--only NAME ...]`

Of each window of 8,192 tokens the first 8,000 are coded (but for 4 sinks) and decoded, and the others are scored on the
decoded cache against the same on the exact one: `kl`, and `kl_first64` over those next to what was coded. `error/N`:
squares of errors over squares of values, a mean over K and V of all layers, of 1,024 tokens from token N on, and
`bits/N` what they take; `error_spread`, the largest `error/N` over their mean, is 1 where position does not matter.
Everything was fitted to windows of 1,024 tokens. Text as in `benchmarks.quality`.
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
DEFAULT = ("predictive/lossy@0.32", "predictive/lossy@0.55", "predictive/lossy@0.95", "aqua/2bit", "higgs/4bit")


@dataclass
class Score:
    """Of one method: a number a window, and sums a piece."""

    kl: list[float] = field(default_factory=list)
    near: list[float] = field(default_factory=list)
    coded: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((-(-PREFIX // PIECE), 2)))
    """[pieces, (bytes, values)]"""
    errors: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(-(-PREFIX // PIECE)))


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
        for piece, begin in enumerate(range(0, PREFIX, PIECE)):
            at = slice(max(begin, SINKS), min(begin + PIECE, PREFIX))
            given = [(k[:, at], v[:, at]) for k, v in exact]
            found, size = method.code(ids[at], given, at.start)
            score.coded[piece] += size, sum(x.numel() for pair in given for x in pair)
            score.errors[piece] += relative_error(given, found)
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
        bits = 8 * score.coded[:, 0] / score.coded[:, 1]
        losses[name] = {"kl": float(np.mean(score.kl)), "kl_first64": float(np.mean(score.near))}
        losses[name]["bits"] = float(8 * score.coded[:, 0].sum() / score.coded[:, 1].sum())
        rows.add(name, "bits_per_value", losses[name]["bits"], "bits")
        for metric in ("kl", "kl_first64"):
            rows.add(name, metric, losses[name][metric], "nats")
        for piece, error in enumerate(score.errors / windows):
            rows.add(name, f"error/{piece * PIECE}", float(error), "of the values'")
            rows.add(name, f"bits/{piece * PIECE}", float(bits[piece]), "bits")
        rows.add(name, "error_spread", float(score.errors.max() / score.errors.mean()), "largest over mean")
    ladder = [x for name, x in losses.items() if name.startswith(LOSSY)]
    if ladder:
        curves = {metric: [(x["bits"], x[metric]) for x in ladder] for metric in ("kl", "kl_first64")}
        for case, (needed, peer) in frontier(curves, losses, AT_KL).items():
            if needed is not None:
                ratio = needed / losses[peer]["bits"]
                rows.add(f"predictive/lossy/{case}", "bits_per_value", needed, "bits", peer, ratio)


if __name__ == "__main__":
    main()
