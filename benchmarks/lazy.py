"""How much longer the first token takes from disk than from a cache in memory: all layers at once, or one by one.

`python -m benchmarks.lazy [--lengths 512 2048 8000] [--threads 1 2] [--codec predictive:3] [--dir FOLDER]`. The prompt
is a prefix of held-out conversations and one token. In memory: a pass of that token behind a `DynamicCache` that is
there. From disk: the store is opened (nothing in memory, the page cache is dropped), `get` without and with lazy=True,
and the same pass behind what it gives; opening counts. `--threads`: how many torch computes with; what it leaves of the
processors can decode meanwhile. Stores stay in `--dir`, if that is given, and are not made again.

The next tokens must be equal, and every cache bit for bit; a difference ends the run with status 1.
"""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import load_model, measured_text
from benchmarks.profile import needs_profile, profile_path
from benchmarks.resume import same
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB
from kvstore.integrations.transformers.cache import cache_layers

ROUNDS = 7


def main() -> None:
    parser = arguments("Time to the first token from disk, layers at once or one after another, against memory.")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prefix lengths (512 2048 8000)")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="of torch (1, and as many as it takes)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of each case ({ROUNDS})")
    parser.add_argument("--dir", type=Path, help="where the stores are made, and stay (default: build/scratch)")
    parser.add_argument("--codec", metavar="NAME", help="codec of the disk tier (default: that of a store)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    args = parser.parse_args()
    lengths = args.lengths or ([512] if args.quick else [512, 2048, 8000])
    threads = args.threads or sorted({1, torch.get_num_threads()})
    rows = Rows("lazy", args.json)
    model, tokenizer = load_model(args.model)
    text = measured_text(args.text, 8 * (max(lengths) + 1))
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : max(lengths) + 1]
    identity, ok = ModelIdentity.from_transformers(model, tokenizer), True
    config = StoreConfig()
    if args.codec is not None:
        profile = profile_path(model, tokenizer, args.profile) if needs_profile(args.codec) else None
        config = StoreConfig(disk=TierConfig(8 * GIB, args.codec), profile=profile)
    with scratch("lazy") if args.dir is None else contextlib.nullcontext(args.dir) as folder:
        for length in lengths:
            path = folder / f"lazy-{length}"
            if not path.exists():
                fill(path, identity, config, model, ids[:, :length])
            for count in threads:
                torch.set_num_threads(count)
                rounds = 2 if args.quick else args.rounds
                ok &= measure(rows, path, identity, config, model, ids[:, : length + 1], count, rounds)
    rows.main_exit(ok)


def fill(path: Path, identity: ModelIdentity, config: StoreConfig, model: Any, ids: torch.Tensor) -> None:
    """Makes a store with the cache of a prompt."""
    with torch.inference_mode():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    with KVStore(path, identity, config) as store:
        store.put(ids[0].numpy(), cache)


def measure(
    rows: Rows,
    path: Path,
    identity: ModelIdentity,
    config: StoreConfig,
    model: Any,
    prompt: torch.Tensor,
    threads: int,
    rounds: int,
) -> bool:
    """Rows of one length; whether all tokens and caches were equal."""
    tokens = prompt[0, :-1].numpy()
    with KVStore(path, identity, config) as store:
        found = store.get(tokens)
        assert found is not None
        want = [(k.clone(), v.clone()) for k, v in found.layers]
    answers: set[int] = set()
    equal: list[bool] = []

    def step(cache: Any) -> None:
        with torch.inference_mode():
            output = model(prompt[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1)
            answers.add(int(output.logits[0, -1].argmax()))

    def memory() -> float:
        cache = DynamicCache(config=model.config)
        for number, (k, v) in enumerate(want):
            cache.update(k, v, number)
        begin = time.perf_counter()
        step(cache)
        return time.perf_counter() - begin

    def resume(lazy: bool) -> float:
        gc.collect()
        drop_page_cache(path)
        begin = time.perf_counter()
        with KVStore(path, identity, config) as store:
            hit = store.get(tokens, lazy=lazy)
            cache = None if hit is None else hit.cache()
            step(cache)
            seconds = time.perf_counter() - begin
            kept = [(k[:, :, :-1], v[:, :, :-1]) for k, v in cache_layers(cache)]
            equal.append(same(kept, want))
        return seconds

    cases = {"memory": memory, "at-once": lambda: resume(False), "lazily": lambda: resume(True)}
    medians, name = interleave(cases, rounds), f"{len(tokens)}/{threads}-threads"
    rows.add(f"memory/{name}", "ttft_s", medians["memory"], "s")
    for case in ("at-once", "lazily"):
        rows.add(f"{case}/{name}", "ttft_s", medians[case], "s", "memory", medians[case] / medians["memory"])
    rows.add(f"lazily/{name}", "equal", int(all(equal) and len(answers) == 1), "1 = yes")
    return all(equal) and len(answers) == 1


if __name__ == "__main__":
    main()
