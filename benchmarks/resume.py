"""How soon the first token comes: prefix restored from disk, against recomputing it.

`python -m benchmarks.resume [--lengths 512 2048 8000] [--new-tokens 1] [--codec predictive]`. The prompt is a prefix of
held-out conversations plus `--new-tokens` tokens. Resume: `get` from a store that was just opened (nothing in memory;
the page cache is dropped, and segments are read with O_DIRECT anyway), then a forward pass of the new tokens.
Recompute: a forward pass of the whole prompt. Opening the store happens once a process, so it is a row of its own.

Every restored cache is compared bit for bit with the one that was put; a difference ends the run with status 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import load_model, measured_text
from benchmarks.profile import needs_profile, profile_path
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB

RECOMPUTE_ROUNDS = 5
LONG = 4096  # prompts from here on take many seconds to recompute: fewer rounds, several resumes in each
LONG_ROUNDS = 3


def main() -> None:
    parser = resume_arguments("Time to first token: resume from disk against recompute.")
    parser.add_argument("--new-tokens", type=int, default=1, metavar="N", help="tokens after the prefix (1)")
    parser.add_argument("--codec", default="splitzip", help="codec of the disk tier (splitzip)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    args = parser.parse_args()
    rows = Rows("resume", args.json)
    model, tokenizer = load_model(args.model)
    identity = ModelIdentity.from_transformers(model, tokenizer)
    lengths, ids = measured_ids(args, tokenizer, args.new_tokens)
    profile = profile_path(model, tokenizer, args.profile) if needs_profile(args.codec) else None
    config = StoreConfig(disk=TierConfig(8 * GIB, args.codec), profile=profile)
    first_token(model, ids[:, :64], None, 0)  # the libraries' own warm-up is nobody's first token
    ok = True
    with scratch("resume", args.dir) as folder:
        for length in lengths:
            prompt = ids[:, : length + args.new_tokens]
            ok &= measure(rows, folder / str(length), identity, config, model, prompt, length, args.quick)
    rows.main_exit(ok)


def resume_arguments(description: str) -> argparse.ArgumentParser:
    """A parser that takes the lengths of prefixes and a folder, too."""
    parser = arguments(description)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prefix lengths (512 2048 8000)")
    parser.add_argument("--dir", type=Path, help="where stores are made (default: build/scratch)")
    return parser


def measured_ids(args: argparse.Namespace, tokenizer: Any, more: int) -> tuple[list[int], Any]:
    """The lengths that are asked for, and the text's token ids `[1, n]`: the longest length of them, and `more`."""
    lengths = args.lengths or ([512, 2048] if args.quick else [512, 2048, 8000])
    text = measured_text(args.text, 8 * (max(lengths) + more))
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : max(lengths) + more]
    if ids.shape[1] < max(lengths) + more:
        raise SystemExit(f"--text: {ids.shape[1]} tokens are fewer than {max(lengths)} + {more}")
    return lengths, ids


def measure(
    rows: Rows,
    path: Path,
    identity: ModelIdentity,
    config: StoreConfig,
    model: Any,
    prompt: Any,
    length: int,
    quick: bool,
) -> bool:
    """Rows of one length; whether every restored cache was the one that was put."""
    tokens = prompt[0, :length].numpy()
    with torch.inference_mode():
        cache = model(prompt[:, :length], use_cache=True, logits_to_keep=1).past_key_values
    with KVStore(path, identity, config) as store:
        store.put(tokens, cache)
        store.flush()
        disk = store.stats()["disk"]
    want = [(layer.keys, layer.values) for layer in cache.layers]
    equal: list[bool] = []
    opened: list[float] = []
    restored: list[float] = []

    def resume() -> float:
        gc.collect()
        drop_page_cache(path)
        begin = time.perf_counter()
        with KVStore(path, identity, config) as store:
            opened.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            hit = store.get(tokens)
            restored.append(time.perf_counter() - begin)
            first_token(model, prompt, None if hit is None else hit.cache(), 0 if hit is None else hit.tokens)
            seconds = time.perf_counter() - begin
            equal.append(hit is not None and hit.tokens == length and same(hit.layers, want))
        return seconds

    def recompute() -> None:
        first_token(model, prompt, None, 0)

    long = length >= LONG
    rounds = 2 if quick else LONG_ROUNDS if long else RECOMPUTE_ROUNDS
    resumes = 3 if long or quick else 1
    medians = interleave(
        {"resume": lambda: statistics.median(resume() for _ in range(resumes)), "recompute": recompute}, rounds
    )
    case = add_times(rows, length, medians, restored)
    rows.add(case, "open_s", statistics.median(opened), "s")
    rows.add(case, "ratio", disk["raw_bytes"] / disk["bytes"], "raw bytes / stored bytes")
    rows.add(case, "bit_identical", int(all(equal)), "1 = yes")
    return all(equal)


def add_times(rows: Rows, length: int, medians: Mapping[str, float], restored: Sequence[float]) -> str:
    """Rows of the seconds of "resume" and "recompute", and of gets; returns their case."""
    case, speedup = f"resume/{length}", medians["recompute"] / medians["resume"]
    rows.add(case, "ttft_s", medians["resume"], "s", "recompute", medians["resume"] / medians["recompute"])
    rows.add(f"recompute/{length}", "ttft_s", medians["recompute"], "s")
    rows.add(case, "speedup", speedup, "x", "recompute", speedup)
    rows.add(case, "get_s", statistics.median(restored), "s")
    return case


def first_token(model: Any, prompt: Any, cache: Any, known: int) -> int:
    """The greedy next token of `prompt`, whose first `known` tokens are in `cache`."""
    with torch.inference_mode():
        output = model(prompt[:, known:], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


def same(layers: Any, want: Any) -> bool:
    """Bit for bit: as integers, so that a NaN equals itself."""
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for pair, expected in zip(layers, want, strict=True)
        for a, b in zip(pair, expected, strict=True)
    )


if __name__ == "__main__":
    main()
