"""What does coding a cache with loss do to the model? `python -m benchmarks.quality [--only NAME ...]`

Protocol A: of each test window of 1,024 tokens the first 512 are coded (but for 4 sinks) and decoded, and the next 512
are scored on the decoded cache against the same on the exact one: `kl` over all of them, `kl_first64` over those next
to what was coded, `nll_delta` with its standard error over windows, `top1` (share of equal best tokens).
Protocol B, AQUA-KV's: windows are fed in steps of 32 tokens through a cache in which 4 sinks and at least 128 recent
tokens are exact and all others decoded: whenever 256 have gathered, the older 128 are coded. `perplexity`, its ratio to
that of the exact cache, which goes through the same calls, and `steps_bits_per_value`.

`predictive/recent@BITS` keeps the last 128 tokens exact, as a store does with `exact_recent_tokens=128`; protocol B
does so with all methods; `kvtc-recent/BITS` does so with KVTC, whose own rule it is. AQUA-KV, KVTC and CacheGen are
fitted to the windows that the profile was fitted to; fits of the last two are kept in build/. `deflate_share`: what
KVTC takes with DEFLATE, of what is counted, the smaller of that and of an arithmetic coder's tables. `decode_GBps`: raw
bytes by processor time; ours is C++ in blocks of 64 tokens, peers are numpy and torch on all tokens at once.

`bits_per_value` is what a decoder needs for the coded tokens, all bytes, but what was fitted beforehand. Text: of
ShareGPT's conversations every fourth is for tests, the others for calibration; or `--text FILE`, its first half for
calibration, the second for tests. Peers are those of `benchmarks/requirements-peers.txt`; one that is not installed is
a row `missing`, what refuses the model one `refused`, with the reason on stderr. `--onto FILE`: of a kept run with the
same windows only what `--only` names is measured anew; its other rows stay, and are what is compared with.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.quality.cachegen import LEVELS
from benchmarks.peers.quality.data import LENGTH, Pairs, cut, prefill, test_text
from benchmarks.peers.quality.frontier import frontier
from benchmarks.peers.quality.kept import Values, kept_rows, merged, values_of
from benchmarks.peers.quality.kvtc import Kvtc
from benchmarks.peers.quality.methods import CASES, KVTC_BITS, LOSSY, Context, Method
from kvstore import KVLayout
from kvstore.calibration.lossy.quality import divergences
from kvstore.errors import KVStoreError
from kvstore.integrations.transformers import layout_from_config

SINKS = 4
PREFIX = 512  # of protocol A
NEAR = 64
STEP, RECENT, FULL = 32, 128, 256  # of protocol B, tokens
AT_KL = {
    "at-4bit-kl": ("higgs/4bit", 1.0),
    "at-half-4bit-kl": ("higgs/4bit", 0.5),
    "at-aqua2-kl": ("aqua/2bit", 1.0),
    "at-nvfp4-kl": ("nvfp4", 1.0),
    **{f"at-turboquant-{bits}bit-kl": (f"turboquant/{bits}bit", 1.0) for bits in (2, 3, 4)},
    **{f"at-kvtc-{bits}bit-kl": (f"kvtc/{bits}bit", 1.0) for bits in KVTC_BITS},
    **{f"at-cachegen-{level}-kl": (f"cachegen/{level}", 1.0) for level in LEVELS},
}
AT_PERPLEXITY = {"at-4bit-perplexity": ("higgs/4bit", 1.0), "at-aqua2-perplexity": ("aqua/2bit", 1.0)}
COMPARED: tuple[tuple[str, str, tuple[str, ...], dict[str, tuple[str, float]]], ...] = (
    ("A", "bits_per_value", ("kl", "kl_first64"), AT_KL),
    ("A", "bits_per_value", ("kl",), {f"{case}/all": peer for case, peer in AT_KL.items()}),
    ("B", "steps_bits_per_value", ("perplexity_ratio",), AT_PERPLEXITY),
)
"""(protocol, its rate, what is lost, cases)."""


@dataclass
class Score:
    """Of one method. kl, near, nll, top: a number a window; the others are sums."""

    kl: list[float] = field(default_factory=list)
    near: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    coded: list[int] = field(default_factory=lambda: [0, 0])  # bytes, values: protocol A
    steps: list[int] = field(default_factory=lambda: [0, 0])  # the same, protocol B
    loss: float = 0.0  # protocol B, of all tokens
    seconds: float = 0.0  # spent coding


def main() -> None:
    parser = arguments("What coding with loss does to the model's predictions.")
    families = sorted({name.split("/")[0] for name in CASES})
    parser.add_argument("--only", nargs="+", choices=[*families, *CASES], help="methods to run (all)")
    parser.add_argument("--windows", type=int, help="test windows of 1,024 tokens (32)")
    parser.add_argument("--calibration-windows", type=int, help="windows to fit to (64)")
    parser.add_argument("--calibration-text", type=Path, metavar="FILE", help="text to fit to")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--protocols", nargs="+", choices=("A", "B"), default=("A", "B"), help="(both)")
    parser.add_argument("--onto", type=Path, metavar="FILE", help="a kept run: rows of other methods are taken from it")
    args = parser.parse_args()
    windows = args.windows or (4 if args.quick else 32)
    calibration_windows = args.calibration_windows or (8 if args.quick else 64)
    only = set(args.only or CASES)
    names = [name for name in CASES if name in only or name.split("/")[0] in only]

    rows, kept = Rows("quality", args.json), kept_rows(args.onto) if args.onto else []
    model, tokenizer = load_model(args.model)
    layout = of_all_tokens(layout_from_config(model.config, model.dtype))
    test = cut(tokenizer, test_text(args.text, args.calibration_text, windows), windows)
    context = Context(model, tokenizer, layout, args.text, args.calibration_text, calibration_windows, args.profile)
    methods = make(rows, names, context)
    scores = {name: Score() for name in methods}
    exact = Score()
    for number, ids in enumerate(test):
        begin = time.perf_counter()
        if "A" in args.protocols:
            prefix(model, ids, methods, scores)
        if "B" in args.protocols:
            steps(model, ids, methods, scores, exact)
        note(f"window {number + 1} of {len(test)}: {time.perf_counter() - begin:.0f} s")
        if (number + 1) % 4 == 0 or number + 1 in (1, len(test)):
            note(table(scores, exact, number + 1, args.protocols))
    report(rows, scores, exact, len(test), args.protocols)
    compare_rates(rows, values_of([*kept, *rows.rows]), args.protocols)
    for name, method in methods.items():
        if seconds := method.decoding.seconds:
            coded = scores[name].coded[1] + scores[name].steps[1]
            rows.add(name, "decode_GBps", coded * layout.item_bytes / seconds / 1e9, "GB/s")
        if isinstance(method, Kvtc):
            rows.add(name, "deflate_share", method.deflate_bytes / method.taken_bytes, "of its bytes")
    if kept and args.json:
        args.json.write_text(json.dumps(merged(kept, rows.rows), indent=1) + "\n")
    rows.main_exit()


def of_all_tokens(layout: KVLayout) -> KVLayout:
    """The layout with all tokens in all layers, as the caches here have them: windows are those of attention alone."""
    return replace(layout, layers=tuple(layer.shape for layer in layout.layers))


def make(rows: Rows, names: Sequence[str], context: Context) -> dict[str, Method]:
    """The methods by name; a row for each that is missing, or refuses the model. Fitting takes seconds to minutes."""
    found = {}
    for name in names:
        begin = time.perf_counter()
        try:
            method = CASES[name](context)
        except (KVStoreError, ValueError) as error:
            note(f"{name}: {error}")
            rows.add(name, "refused", 1, "1 = yes")
            continue
        if method is None:
            rows.add(name, "missing", 1, "library")
            continue
        found[name] = method
        if (seconds := time.perf_counter() - begin) > 1:
            note(f"{name}: made in {seconds:.0f} s")
    return found


# -- protocol A --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def prefix(model: Any, ids: torch.Tensor, methods: Mapping[str, Method], scores: Mapping[str, Score]) -> None:
    """Scores all methods on one window."""
    exact = prefill(model, ids[:PREFIX])
    reference = log_probabilities(model, ids, exact)
    for name, method in methods.items():
        score = scores[name]
        given = [(k[:, SINKS:], v[:, SINKS:]) for k, v in exact]
        decoded = code(method, ids[SINKS:PREFIX], given, SINKS, score, score.coded)
        whole = [
            (torch.cat([k[:, :SINKS], dk], dim=1), torch.cat([v[:, :SINKS], dv], dim=1))
            for (k, v), (dk, dv) in zip(exact, decoded, strict=True)
        ]
        compare(reference, log_probabilities(model, ids, whole), ids[PREFIX + 1 :], score)


def log_probabilities(model: Any, ids: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Of the token after each token that follows the prefix, on the cache `pairs`: float32 `[512, vocabulary]`."""
    cache = DynamicCache()
    for layer, (k, v) in enumerate(pairs):
        cache.update(k[None], v[None], layer)
    logits: torch.Tensor = model(ids[None, PREFIX:], past_key_values=cache, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def compare(reference: torch.Tensor, found: torch.Tensor, targets: torch.Tensor, score: Score) -> None:
    """Adds a window to `score`. targets: the tokens that came, of all but the last."""
    each = divergences(reference, found)
    score.kl.append(each.mean().item())
    score.near.append(each[:NEAR].mean().item())
    score.top.append((reference.argmax(-1) == found.argmax(-1)).float().mean().item())
    loss = [-x[:-1].gather(1, targets[:, None]).mean().item() for x in (found, reference)]
    score.nll.append(loss[0] - loss[1])


# -- protocol B --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def steps(
    model: Any, ids: torch.Tensor, methods: Mapping[str, Method], scores: Mapping[str, Score], exact: Score
) -> None:
    """Feeds one window; every method, and the exact cache, is a row of one batch."""
    rows = [exact, *(scores[name] for name in methods)]
    cache, coded = DynamicCache(), SINKS
    loss = torch.zeros(len(rows), dtype=torch.float64)
    for begin in range(0, len(ids), STEP):
        batch = ids[begin : begin + STEP].expand(len(rows), -1)
        logits = model(batch, past_key_values=cache, use_cache=True).logits
        following = ids[begin + 1 : begin + STEP + 1]
        for row in range(len(rows)):
            loss[row] += torch.nn.functional.cross_entropy(
                logits[row, : len(following)].float(), following, reduction="sum"
            ).double()
        have = begin + batch.shape[1]
        while have - coded >= FULL:
            end = coded + FULL - RECENT
            for row, (name, method) in enumerate(methods.items(), 1):
                given = [(layer.keys[row, :, coded:end], layer.values[row, :, coded:end]) for layer in cache.layers]
                score = scores[name]
                decoded = code(method, ids[coded:end], given, coded, score, score.steps)
                for (k, v), (dk, dv) in zip(given, decoded, strict=True):
                    k.copy_(dk)
                    v.copy_(dv)
            coded = end
    for score, value in zip(rows, loss.tolist(), strict=True):
        score.loss += value


def code(method: Method, tokens: torch.Tensor, pairs: Pairs, start: int, score: Score, sums: list[int]) -> Pairs:
    """The decoded pairs; adds bytes and values to `sums`, and the time to `score`."""
    begin = time.perf_counter()
    decoded, size = method.code(tokens, pairs, start)
    score.seconds += time.perf_counter() - begin
    sums[0] += size
    sums[1] += sum(t.numel() for pair in pairs for t in pair)
    return decoded


# -- what is printed ---------------------------------------------------------------------------------------------------


def measured(score: Score, exact: Score, windows: int, protocols: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Values and units by metric."""
    found: dict[str, tuple[float, str]] = {}
    if "A" in protocols:
        nll = np.array(score.nll)
        found["bits_per_value"] = bits(score.coded), "bits"
        found["kl"] = float(np.mean(score.kl)), "nats"
        found["kl_first64"] = float(np.mean(score.near)), "nats"
        found["nll_delta"] = float(nll.mean()), "nats"
        found["nll_stderr"] = float(nll.std(ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else 0.0, "nats"
        found["top1"] = float(np.mean(score.top)), "share"
    if "B" in protocols:
        found["steps_bits_per_value"] = bits(score.steps), "bits"
        found["perplexity"] = math.exp(score.loss / (windows * (LENGTH - 1))), "tokens"
        found["perplexity_ratio"] = math.exp((score.loss - exact.loss) / (windows * (LENGTH - 1))), "x"
    return found


def report(rows: Rows, scores: Mapping[str, Score], exact: Score, windows: int, protocols: Sequence[str]) -> None:
    """All rows."""
    if "B" in protocols:
        rows.add("uncompressed", "perplexity", math.exp(exact.loss / (windows * (LENGTH - 1))), "tokens")
    for name, score in scores.items():
        values = measured(score, exact, windows, protocols)
        ratio = values.pop("perplexity_ratio", (None, ""))[0]
        for metric, (value, unit) in values.items():
            peer = ("uncompressed", ratio) if metric == "perplexity" else (None, None)
            rows.add(name, metric, value, unit, *peer)


def compare_rates(rows: Rows, values: Values, protocols: Sequence[str]) -> None:
    """Rows of the bits at which predictive coding loses as little as peers do; `missing` where no rung does. Of
    protocol A by both divergences and, as `CASE/all`, by that of all scored tokens."""
    ladder = [x for name, x in values.items() if name.startswith(LOSSY)]
    peers = {name: {metric: x for metric, (x, _) in found.items()} for name, found in values.items()}
    for protocol, rate, losses, cases in COMPARED:
        if protocol in protocols and ladder:
            curves = {metric: [(x[rate][0], x[metric][0]) for x in ladder] for metric in losses}
            for case, (found, peer) in frontier(curves, peers, cases).items():
                name = f"predictive/lossy/{case}"
                if found is None:
                    rows.add(name, "missing", 1, "rung that loses so little")
                else:
                    rows.add(name, rate, found, "bits", peer, found / peers[peer][rate])


def table(scores: Mapping[str, Score], exact: Score, windows: int, protocols: Sequence[str]) -> str:
    """The same to read, after any number of windows."""
    lines = []
    for name, score in scores.items():
        values = measured(score, exact, windows, protocols)
        if not lines:
            lines.append(" " * 16 + "".join(f"{metric.replace('_per_value', ''):>17s}" for metric in values))
        cells = "".join(f"{value:17.4f}" for value, _ in values.values())
        lines.append(f"{name:16s}{cells}  coded in {score.seconds / windows:.1f} s a window")
    return "\n".join(lines)


def bits(sums: Sequence[int]) -> float:
    """sums: bytes, values."""
    return 8 * sums[0] / sums[1]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
