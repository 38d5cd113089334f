"""Does the gate choose the faster way? `python -m benchmarks.gate [--lengths N ...] [--bandwidths MBPS ...]`

Prefix length x bandwidth of the disk: time to the first token with the gate, when everything that is stored is loaded
(`gate=False`), and when nothing is (recompute), in turns. Every get is the first of a store that was just opened, so
the gate knows what the process before kept, and a short read; recomputing begins behind such an opening, too, and asks
the store nothing: both find the caches of the processor as an opening leaves them. The bandwidth of the process before
was another.

Rows: `ttft_s`, peer `recompute`; of the gate also `load_share`, the share of gets that loaded, and `decided_s`: what
its decisions take by the medians of the two ways, and a get that is refused. That is the same as `ttft_s` on a machine
that does nothing else, and does not mix what others do with what the gate decides. At the end `worst_ratio`, the
largest `ttft_s` of the gate by that of recompute, and `worst_decided`, the same of `decided_s`.

Storage of a bandwidth is the disk behind a file system that lets no more through (`benchmarks.bandwidth`); 0 is the
disk itself, page cache dropped, and `--latency` a delay before each read. Every cache that is loaded is compared bit
for bit; a difference ends the run with status 1.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bandwidth import Slow
from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import load_model, measured_text
from benchmarks.resume import first_token, same
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB
from kvstore.integrations.transformers.observed import observed

LENGTHS = (4, 16, 64, 256, 1024, 2048, 8000)
BANDWIDTHS = (10, 30, 100, 300, 1000, 0)
LONG = 4096  # fewer rounds from here on
SHORT = 512  # more rounds up to here


def main() -> None:
    parser = arguments("Time to first token: the gate, loading everything, recomputing everything.")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prefix lengths (4 to 8000)")
    parser.add_argument("--bandwidths", type=int, nargs="+", default=list(BANDWIDTHS), help="MB/s; 0 is the disk")
    parser.add_argument("--latency", type=float, default=0.0, metavar="S", help="seconds before each read (0)")
    parser.add_argument("--codec", default="entropy", help="codec of the disk (entropy)")
    parser.add_argument("--rounds", type=int, metavar="N", help="(3 from 4,096 tokens on, 11 up to 512, else 5)")
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    args = parser.parse_args()
    lengths = args.lengths or ([4, 64, 512] if args.quick else list(LENGTHS))
    rows = Rows("gate", args.json)
    model, tokenizer = load_model(args.model)
    text = measured_text(args.text, 8 * (sum(lengths) + len(lengths)))
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    first_token(model, ids[:, :64], None, 0)
    with scratch("gate", args.dir) as folder:
        bench = Bench(folder / "store", ModelIdentity.from_transformers(model, tokenizer), model, args.codec)
        begin = 0
        for length in lengths:
            bench.put(ids[:, begin : begin + length + 1])
            begin += length + 1
        bench.inform()
        for number, length in enumerate(lengths):
            rounds = args.rounds or (3 if length >= LONG else 11 if length <= SHORT else 5)
            bench.measure(rows, number, args.bandwidths, args.latency, 2 if args.quick else rounds)
    rows.add("all", "worst_ratio", max(bench.ratios), "x", "recompute", max(bench.ratios))
    rows.add("all", "worst_decided", max(bench.decided), "x", "recompute", max(bench.decided))
    rows.main_exit(bench.equal)


class Bench:
    """A store of prefixes, each of which was computed once, as the gate has seen.

    Attributes:
        equal: whether every cache that was loaded was the one that was put.
        ratios, decided: what the gate took, and what its decisions take, by recompute.
    """

    def __init__(self, path: Path, identity: ModelIdentity, model: Any, codec: str) -> None:
        self._open = partial(KVStore, path, identity, StoreConfig(disk=TierConfig(8 * GIB, codec), learn="off"))
        self._path, self._model = path, model
        self._prompts: list[Any] = []
        self._caches: list[Any] = []
        self.equal = True
        self.ratios: list[float] = []
        self.decided: list[float] = []

    def put(self, prompt: Any) -> None:
        """Compute and store all of a prompt but its last token."""
        length = prompt.shape[1] - 1
        with self._open() as store:
            for _ in range(2 if length < LONG else 1):
                with torch.inference_mode(), observed(store.gate, self._model, 0, length):
                    cache = self._model(prompt[:, :length], use_cache=True, logits_to_keep=1).past_key_values
            store.put(prompt[0, :length].numpy(), cache)
        self._prompts.append(prompt)
        self._caches.append([(layer.keys, layer.values) for layer in cache.layers])

    def inform(self) -> None:
        """Compute the longest prompt until the gate has seen enough."""
        prompt = max(self._prompts, key=lambda one: int(one.shape[1]))
        with self._open() as store:
            while not store.gate.is_informed:
                with observed(store.gate, self._model, 0, prompt.shape[1]):
                    first_token(self._model, prompt, None, 0)

    def measure(self, rows: Rows, number: int, bandwidths: list[int], latency: float, rounds: int) -> None:
        """Rows of one length."""
        length = self._prompts[number].shape[1] - 1
        ways: dict[str, Any] = {"recompute": partial(self._recomputed, number)}
        loaded: dict[int, list[tuple[int, float]]] = {rate: [] for rate in bandwidths}
        for rate in bandwidths:
            ways[f"gate {rate}"] = partial(self._first_token, number, rate, latency, None, loaded[rate])
            ways[f"load {rate}"] = partial(self._first_token, number, rate, latency, False, [])
        medians = interleave(ways, rounds)
        compute = medians["recompute"]
        rows.add(f"recompute/{length}", "ttft_s", compute, "s")
        for rate in bandwidths:
            where = f"{length}/{f'{rate}MBps' if rate else 'disk'}" + (f"/{latency:g}s" if latency else "")
            gate, load = medians[f"gate {rate}"], medians[f"load {rate}"]
            rows.add(f"gate/{where}", "ttft_s", gate, "s", "recompute", gate / compute)
            share = sum(held > 0 for held, _ in loaded[rate]) / len(loaded[rate])
            refused = statistics.median([seconds for held, seconds in loaded[rate] if not held] or [0.0])
            decided = share * load + (1 - share) * (compute + refused)
            rows.add(f"gate/{where}", "load_share", share, "of gets")
            rows.add(f"gate/{where}", "decided_s", decided, "s", "recompute", decided / compute)
            rows.add(f"load/{where}", "ttft_s", load, "s", "recompute", load / compute)
            self.ratios.append(gate / compute)
            self.decided.append(decided / compute)

    def _recomputed(self, number: int) -> float:
        """Seconds to the first token without a get, behind an opening."""
        gc.collect()
        with self._open():
            begin = time.perf_counter()
            first_token(self._model, self._prompts[number], None, 0)
            return time.perf_counter() - begin

    def _first_token(
        self, number: int, rate: int, latency: float, gate: bool | None, loaded: list[tuple[int, float]]
    ) -> float:
        """Seconds from the get to the first token, of a store that was just opened."""
        prompt = self._prompts[number]
        gc.collect()
        if not rate:
            drop_page_cache(self._path)
        with self._open(fs=Slow(rate * 1e6 if rate else 1e12, latency) if rate or latency else None) as store:
            begin = time.perf_counter()
            hit = store.get(prompt[0].numpy(), max_tokens=prompt.shape[1] - 1, gate=gate)
            got = time.perf_counter() - begin
            held = 0 if hit is None else hit.tokens
            with observed(store.gate, self._model, held, prompt.shape[1] - held):
                first_token(self._model, prompt, None if hit is None else hit.cache(), held)
            seconds = time.perf_counter() - begin
        want = [(keys[:, :, :held], values[:, :, :held]) for keys, values in self._caches[number]]
        self.equal &= hit is None or same(hit.layers, want)
        loaded.append((held, got))
        return seconds


if __name__ == "__main__":
    main()
