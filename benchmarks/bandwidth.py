"""Which codec on the disk gives the first token soonest? `python -m benchmarks.bandwidth [--codecs NAME ...]`

Codec x bandwidth x prefix; the levels of `predictive` are codecs, too. A cold store is opened, `get` restores the
prefix, the model makes one token. A bandwidth is emulated: the store reads through a file system that sleeps so that no
more bytes a second come through; "disk" is the machine's own, page cache dropped. Rows: `ttft_s` and `get_s` of every
codec and bandwidth, peer `recompute`; the case of `wins` names the codec with the best median. Every restored cache of
an exact codec is compared bit for bit with the one that was put; a difference ends the run with status 1. `predictive`
and lossy codecs (`predictive@0.9`) take the benchmarks' own profile, or `--profile FILE`.

Making the stores of a long prefix takes minutes, measuring them seconds: `--stores DIR --bandwidths` makes them alone,
and another run with the same folder measures. One whose time is short takes the time of recomputation from an earlier
one, `--recompute SECONDS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import load_model, measured_text
from benchmarks.profile import needs_profile, profile_path
from benchmarks.resume import first_token, same
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB
from kvstore.tiers.disk.fs import FileSystem

CODECS = ("raw", "splitzip", "entropy", *(f"predictive:{level}" for level in (1, 2, 3)))
BANDWIDTHS = (0, 1000, 100)  # MB/s; 0: the disk itself
ROUNDS = 3


class Slow(FileSystem):
    """Lets `rate` bytes a second of large reads through, to all threads together; a read waits until its turn ends, and
    `latency` seconds before."""

    def __init__(self, rate: float, latency: float = 0.0) -> None:
        self._rate, self._latency, self._free, self._lock = rate, latency, 0.0, threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(self._latency)
        got = super().preadv(fd, buffers, offset)
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + got / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))
        return got


def main() -> None:
    parser = arguments("Time to first token by codec, bandwidth and prefix.")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prefix lengths (512 2048 8000)")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="codecs of the disk tier")
    parser.add_argument("--bandwidths", type=int, nargs="*", default=list(BANDWIDTHS), help="MB/s; 0 is the disk")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: build/scratch)")
    parser.add_argument("--stores", type=Path, metavar="DIR", help="where stores are kept, or were by an earlier run")
    parser.add_argument("--rounds", type=int, help=f"({ROUNDS}; with --quick 1)")
    parser.add_argument("--recompute", type=float, metavar="SECONDS", help="what recomputing takes (default: measured)")
    args = parser.parse_args()
    lengths = args.lengths or ([512] if args.quick else [512, 2048, 8000])
    rows = Rows("bandwidth", args.json)
    model, tokenizer = load_model(args.model)
    profile = profile_path(model, tokenizer, args.profile) if any(map(needs_profile, args.codecs)) else None
    identity = ModelIdentity.from_transformers(model, tokenizer)
    text = measured_text(args.text, 8 * (max(lengths) + 1))
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : max(lengths) + 1]
    first_token(model, ids[:, :64], None, 0)
    ok = True
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    with contextlib.nullcontext(args.stores) if args.stores else scratch("bandwidth", args.dir) as folder:
        for length in lengths:
            prompt = ids[:, : length + 1]
            cache = prefix_cache(model, prompt[:, :length], args.stores and folder / f"{length}.pairs")
            stores = {}
            for name in args.codecs:
                path = folder / f"{length}-{name}"
                stores[name] = Stored(path, identity, name, profile, prompt, cache)
                rows.add(f"{name}/{length}", "ratio", stores[name].ratio, "raw bytes / stored bytes")
            if args.bandwidths:
                ok &= measure(rows, stores, model, prompt, args.bandwidths, rounds, args.recompute)
    rows.main_exit(ok)


def prefix_cache(model: Any, ids: Any, path: Path | None) -> Any:
    """The cache of a prefix; with a path, what an earlier run left there, or is left there now."""
    if path and path.exists():
        found = DynamicCache()
        for number, pair in enumerate(torch.load(path, weights_only=True)):
            found.update(*pair, number)
        return found
    with torch.inference_mode():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers], path)
    return cache


class Stored:
    """One prefix in a store of its own, with one codec on the disk; put anew where it is stored, nothing is written."""

    def __init__(
        self, path: Path, identity: ModelIdentity, codec: str, profile: Path | None, prompt: Any, cache: Any
    ) -> None:
        self.path, self.exact = path, "@" not in codec
        self.identity = identity if self.exact else dataclasses.replace(identity, codec_family="lossy")
        self.config = StoreConfig(disk=TierConfig(8 * GIB, codec), profile=profile if needs_profile(codec) else None)
        self.tokens = prompt[0, :-1].numpy()
        self.want = [(layer.keys, layer.values) for layer in cache.layers]
        with KVStore(path, self.identity, self.config) as store:
            store.put(self.tokens, cache)
            store.flush()
            disk = store.stats()["disk"]
        self.ratio = disk["raw_bytes"] / disk["bytes"]
        self.equal = True

    def resume(self, model: Any, prompt: Any, rate: int, spent: list[float]) -> float:
        """Seconds to the first token; those of `get` are appended to `spent`. rate: MB/s, 0 for the disk's own."""
        gc.collect()
        if rate == 0:
            drop_page_cache(self.path)
        with KVStore(self.path, self.identity, self.config, fs=Slow(rate * 1e6) if rate else None) as store:
            begin = time.perf_counter()
            hit = store.get(self.tokens)
            spent.append(time.perf_counter() - begin)
            first_token(model, prompt, None if hit is None else hit.cache(), 0 if hit is None else hit.tokens)
            seconds = time.perf_counter() - begin
            self.equal &= hit is not None and hit.tokens == len(self.tokens)
            self.equal &= not self.exact or (hit is not None and same(hit.layers, self.want))
        return seconds


def measure(
    rows: Rows,
    stores: dict[str, Stored],
    model: Any,
    prompt: Any,
    bandwidths: Sequence[int],
    rounds: int,
    recompute: float | None,
) -> bool:
    """Rows of one length; whether all that was restored was as it must be. recompute: seconds; None: measured."""
    length = prompt.shape[1] - 1
    spent: dict[tuple[int, str], list[float]] = {(rate, name): [] for rate in bandwidths for name in stores}
    functions: dict[str, Any] = {} if recompute else {"recompute": lambda: first_token(model, prompt, None, 0)}
    for rate, name in spent:
        functions[f"{rate} {name}"] = lambda rate=rate, name=name: stores[name].resume(
            model, prompt, rate, spent[rate, name]
        )
    medians = interleave(functions, rounds)
    whole = recompute or medians["recompute"]
    rows.add(f"recompute/{length}", "ttft_s", whole, "s")
    for rate in bandwidths:
        where = f"{rate}MBps" if rate else "disk"
        for name in stores:
            ttft = medians[f"{rate} {name}"]
            rows.add(f"{name}/{length}/{where}", "ttft_s", ttft, "s", "recompute", ttft / whole)
            rows.add(f"{name}/{length}/{where}", "get_s", statistics.median(spent[rate, name]), "s")
        best = min(stores, key=lambda name: medians[f"{rate} {name}"])
        exact = min((x for x in stores if stores[x].exact), key=lambda name: medians[f"{rate} {name}"], default=best)
        for kind, name in (("best", best), ("best exact", exact)):
            rows.add(f"{kind}/{length}/{where}/{name}", "wins", 1, "codec")
    return all(stored.equal for stored in stores.values())


if __name__ == "__main__":
    main()
