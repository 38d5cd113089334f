"""A thousand prompts of shared parts, warmed up; and what is left of a warm-up that is killed again and again.

`python -m benchmarks.warmup [--kills 10] [--only cost kills]`. Prompts are every combination of system prompts, tools
and documents: texts that no calibration sees, cut to tokens.

- cost: `warmup` of all prompts into a store on disk with default settings, until it is durable; against the prefill of
  the distinct tokens alone, in two ways: the same passes from caches in memory, without a store; and the same tokens in
  rows that have nothing before them, which no prefill of these prompts can be. They run in turns, the prompts of one
  system prompt at a time. Beside the time stands the processor time of the process, writing included.
- kills: the same prompts (of a quarter of the length) by a process that is killed with SIGKILL ten times at passes
  spread over the work, and started again each time; against one that is not. Compared are the inventories (tokens,
  blocks, namespaces, pins), `contains` of every prompt, and `check(deep=True)`. Not compared are the last bits of the
  caches: they depend on which rows were computed beside each other. A difference ends the run with status 1.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments, scratch
from benchmarks.conversations import held_out_text, load_model
from kvstore import Hit, KVStore, ModelIdentity, StoreConfig
from kvstore.core.results import FlushResult, PutResult
from kvstore.gate.gate import Gate
from kvstore.gate.load import LoadCost
from kvstore.integrations.transformers import WarmupReport, cache_layers, warmup
from kvstore.integrations.transformers.segments import distinct_tokens, segments_of

COUNTS, LENGTHS = (10, 10, 10), (128, 64, 32)  # system prompts, tools, documents: how many of each, and their tokens
PASS_TOKENS = 4096


def main() -> None:
    parser = arguments("Warm-up of prompts of shared parts.")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="how often the process is killed (10)")
    parser.add_argument("--only", nargs="+", choices=("cost", "kills"), default=("cost", "kills"))
    parser.add_argument("--dir", type=Path, help="where the stores are made (default: build/scratch)")
    parser.add_argument("--child", nargs=2, metavar=("DIR", "PASSES"), help="used by the run itself")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    identity = ModelIdentity.from_transformers(model, tokenizer)
    if args.child:
        warm_until(
            Path(args.child[0]), identity, model, prompts_of(tokenizer, args.text, args.quick, 4), int(args.child[1])
        )
        return
    rows, ok = Rows("warmup", args.json), True
    with scratch("warmup", args.dir) as folder:
        if "cost" in args.only:
            cost(rows, folder, identity, model, prompts_of(tokenizer, args.text, args.quick))
        if "kills" in args.only:
            prompts = prompts_of(tokenizer, args.text, args.quick, 4)
            ok = kills(rows, folder, identity, model, prompts, 2 if args.quick else args.kills, args)
    rows.main_exit(ok)


def prompts_of(tokenizer: Any, text: Path | None, quick: bool, shorter: int = 1) -> list[list[int]]:
    """Every combination of the parts; quick: 64 prompts of 4 x 4 x 4 parts."""
    counts = (4, 4, 4) if quick else COUNTS
    lengths = [length // shorter for length in LENGTHS]
    needed = sum(count * length for count, length in zip(counts, lengths, strict=True))
    words = text.read_text(errors="replace") if text else held_out_text(8 * needed)
    found = tokenizer(words, verbose=False).input_ids[:needed]
    if len(found) < needed:
        raise SystemExit(f"--text: {len(found)} tokens are fewer than {needed}")
    ids = iter(found)
    parts = [
        [list(itertools.islice(ids, length)) for _ in range(count)]
        for count, length in zip(counts, lengths, strict=True)
    ]
    return [list(itertools.chain(*each)) for each in itertools.product(*parts)]


class Memory:
    """What `warmup` asks of a store, as a dictionary of caches: the same passes without any store."""

    def __init__(self, identity: ModelIdentity) -> None:
        self.identity, self.config, self.held = identity, StoreConfig(), dict[tuple[int, ...], Any]()
        self.gate = Gate(False, LoadCost(bytes_per_token=1, threads=1))  # told of passes, never asked

    def contains(self, tokens: Any, namespace: bytes = b"") -> int:
        return 0

    def get(self, tokens: Any, max_tokens: int, **_: Any) -> Hit | None:
        ids = tuple(tokens.tolist())
        count = next((count for count in range(len(ids), 0, -1) if ids[:count] in self.held), 0)
        return Hit(count, {}, 0.0, self.held[ids[:count]]) if count else None

    def put(self, tokens: Any, cache: Any, **_: Any) -> PutResult:
        self.held[tuple(tokens.tolist())] = tuple((k.clone(), v.clone()) for k, v in cache_layers(cache))
        return PutResult(len(tokens), len(tokens), 0, 0, 0.0)

    def flush(self) -> FlushResult:
        return FlushResult(0, 0)


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds of the clock, and of the processor."""
    begin = time.perf_counter(), time.process_time()
    work()
    return [time.perf_counter() - begin[0], time.process_time() - begin[1]]


def plainly(model: Any, prompts: list[list[int]]) -> None:
    """The distinct tokens of prompts, each segment of their tree a row, with nothing before it."""
    for level in segments_of(prompts):
        tails = sorted((segment.tokens[segment.start :].tolist() for segment in level), key=len)
        for length, alike in itertools.groupby(tails, len):
            rows = torch.tensor(list(alike))
            for ids in rows.split(max(1, PASS_TOKENS // length)):
                with torch.inference_mode():
                    model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)


def cost(rows: Rows, folder: Path, identity: ModelIdentity, model: Any, prompts: list[list[int]]) -> None:
    """What a warm-up costs beside the prefill of its distinct tokens alone."""
    given, parts = 0, [list(each) for _, each in itertools.groupby(prompts, lambda prompt: prompt[0])]
    seconds: dict[str, list[list[float]]] = {"store": [], "memory": [], "plain": []}
    reports = []

    def count(_model: Any, args: Any, kwargs: Any) -> None:
        nonlocal given
        given += (args[0] if args else kwargs["input_ids"]).numel()

    def into(store: Any, part: list[list[int]]) -> Any:
        return warmup(store, model, part, batch_tokens=PASS_TOKENS)

    plainly(model, prompts[:2])  # the first passes of a process are slower
    with KVStore(folder / "cost", identity) as store:

        def stored_too(part: list[list[int]]) -> None:
            hook = model.register_forward_pre_hook(count, with_kwargs=True)
            reports.append(into(store, part))
            hook.remove()

        ways: dict[str, Callable[[list[list[int]]], object]] = {
            "store": stored_too,
            "memory": lambda part: into(Memory(identity), part),
            "plain": lambda part: plainly(model, part),
        }
        for number, part in enumerate(parts):
            for way in [*ways][:: 1 if number % 2 == 0 else -1]:
                seconds[way].append(timed(partial(ways[way], part)))
        stored = sum(store.contains(prompt) == len(prompt) for prompt in prompts)
    distinct, computed = distinct_tokens(segments_of(prompts)), sum(report.computed_tokens for report in reports)
    case, every = f"{len(prompts)} prompts", sum(map(len, prompts))
    rows.add(case, "distinct tokens", distinct, "tokens", "all prompts one by one", distinct / every)
    rows.add(case, "tokens computed", computed, "tokens", "distinct tokens", computed / distinct)
    rows.add(case, "tokens given to the model, padding included", given, "tokens", "distinct tokens", given / distinct)
    for which, clock in enumerate(("", ", processor time")):
        total = {way: sum(each[which] for each in found) for way, found in seconds.items()}
        for way, name in (("memory", "the same passes without a store"), ("plain", "with nothing before each row")):
            rows.add(case, f"warm-up{clock}", total["store"], "s", name, total["store"] / total[way])
    ratios = [mine[0] / its[0] for mine, its in zip(seconds["store"], seconds["memory"], strict=True)]
    rows.add(case, "warm-up, median of the turns", statistics.median(ratios), "of the same passes without a store")
    rows.add(case, "prompts stored whole", stored, "prompts", "all prompts", stored / len(prompts))


def warm_until(folder: Path, identity: ModelIdentity, model: Any, prompts: list[list[int]], passes: int) -> None:
    """A warm-up that kills its process after a number of passes; 0: that does not."""

    def kill(report: WarmupReport) -> None:
        if passes and report.passes == passes:
            os.kill(os.getpid(), signal.SIGKILL)

    with KVStore(folder, identity) as store:
        warmup(store, model, prompts, batch_tokens=PASS_TOKENS // 4, progress=kill)


def kills(
    rows: Rows, folder: Path, identity: ModelIdentity, model: Any, prompts: list[list[int]], times: int, args: Any
) -> bool:
    """Whether a warm-up that is killed so often ends with the store of one that is not."""
    command = [sys.executable, "-m", "benchmarks.warmup"]
    for name in ("model", "text"):
        command += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    command += ["--quick"] if args.quick else []
    for number in range(times):
        code = subprocess.run(
            [*command, "--child", str(folder / "killed"), str(number % 3 + 1)], check=False
        ).returncode
        if code not in (-signal.SIGKILL, 0):
            raise SystemExit(f"the process ended with {code}")
        rows.add("kills", f"after kill {number + 1}", 1.0 if code else 0.0, "killed")
    warm_until(folder / "killed", identity, model, prompts, 0)
    warm_until(folder / "whole", identity, model, prompts, 0)
    with KVStore(folder / "killed", identity) as killed, KVStore(folder / "whole", identity) as whole:
        same = facts(killed) == facts(whole)
        found = sum(killed.contains(prompt) == len(prompt) for prompt in prompts)
        report = killed.check(deep=True)
    rows.add("kills", "prompts stored whole", found, "prompts", "all prompts", found / len(prompts))
    rows.add("kills", "same inventory as the run that was not killed", float(same), "")
    rows.add("kills", "problems of check(deep=True)", len(report.problems), "problems")
    return same and found == len(prompts) and report.ok


def facts(store: KVStore) -> list[tuple[Any, ...]]:
    """What two stores of the same prompts have in common."""
    return [(each.tokens.tolist(), each.blocks, each.namespace, each.pinned) for each in store.inventory().sequences]


if __name__ == "__main__":
    main()
