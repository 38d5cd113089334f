"""A batch of eight prompts, padded on the left, of which four are stored but for their last tokens.

`python -m benchmarks.batch [--rounds 5] [--codec splitzip] [--only ttft plans pass]`. The rows are conversations that
no calibration sees, cut to eight different lengths.

- ttft: `generate` with a store that was just opened (nothing in memory, the page cache is dropped), until the first
  token of every row is there and the prompts are put; against `model.generate` without a store, over the whole padded
  batch. And against the same split without a store: the same caches in memory, continued in the same groups. Then more
  tokens: the texts must equal those of the same split; a difference ends the run with status 1. How many rows also
  equal the text of one padded pass is a row of its own: in bf16 it need not be all.
- plans: three ways to compute what rows lack, hits in memory: row by row, together where rows lack about as many
  tokens, all in one pass; and from the shortest, which leaves it to `model.generate` from the first column that some
  row lacks. Of four hits; and of a next turn, where every row has a hit and lacks a few tokens.
- pass: how many tokens take as long as a pass by itself.

Beside every time stands the processor time of the process, which other programs on the machine do not change.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import held_out_text, load_model
from kvstore import Hit, KVStore, ModelIdentity, PutResult, StoreConfig, TierConfig
from kvstore.config import GIB
from kvstore.gate.gate import Gate
from kvstore.gate.load import LoadCost
from kvstore.integrations.transformers import cache_layers, generate
from kvstore.integrations.transformers import prefill as prefill_module
from kvstore.integrations.transformers.padding import LeftPadded, row_of
from kvstore.metrics import Metrics

LENGTHS = (768, 672, 576, 480, 384, 288, 192, 96)
NEW = (40, 0, 24, 0, 32, 0, 16, 0)  # tokens that a row with a hit lacks; 0 for rows without a hit
NEXT_TURN = (40, 12, 24, 48, 32, 20, 16, 28)
PLANS = {"row by row": -1, "groups": None, "one pass": 1 << 30}
PROMPT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 1}
Layers = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def main() -> None:
    parser = arguments("A left-padded batch with and without a store.")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each measurement (5)")
    parser.add_argument("--codec", default="splitzip", help="codec of the disk tier (splitzip)")
    parser.add_argument("--only", nargs="+", choices=("ttft", "plans", "pass"), default=("ttft", "plans", "pass"))
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    args = parser.parse_args()
    rows = Rows("batch", args.json)
    rounds = args.rounds or (2 if args.quick else 5)
    model, tokenizer = load_model(args.model)
    batch = Batch(model, tokenizer, 4 if args.quick else 1, args.text)
    ok = True
    if "ttft" in args.only:
        with scratch("batch", args.dir) as folder:
            ok = first_tokens(rows, batch, folder, args.codec, rounds, 8 if args.quick else 32)
    if "plans" in args.only:
        plans(rows, batch, "four hits", NEW, rounds)
        plans(rows, batch, "next turn", NEXT_TURN, rounds)
    if "pass" in args.only:
        passes(rows, model, rounds)
    rows.main_exit(ok)


class Batch:
    """Eight prompts: of each its tokens, and all of them padded on the left."""

    def __init__(self, model: Any, tokenizer: Any, shrink: int, text: Path | None) -> None:
        self.model = model
        self.identity = ModelIdentity.from_transformers(model, tokenizer)
        lengths = [length // shrink for length in LENGTHS]
        words = text.read_text(errors="replace") if text else held_out_text(8 * sum(lengths))
        ids = tokenizer(words, return_tensors="pt", verbose=False).input_ids[0]
        if len(ids) < sum(lengths):
            raise SystemExit(f"--text: {len(ids)} tokens are fewer than {sum(lengths)}")
        self.prompts = [row.tolist() for row in ids[: sum(lengths)].split(lengths)]
        self.columns = lengths[0]
        pad = tokenizer.pad_token_id or 0
        padded = [[pad] * (self.columns - len(row)) + row for row in self.prompts]
        mask = [[0] * (self.columns - len(row)) + [1] * len(row) for row in self.prompts]
        self.inputs = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}

    def hits(self, new: tuple[int, ...]) -> dict[tuple[int, ...], Layers]:
        """The caches of the first tokens of rows: all but `new` of them, and the last one."""
        found = {}
        for prompt, count in zip(self.prompts, new, strict=True):
            if count:
                head = prompt[: -min(count, len(prompt) // 2) - 1]
                with torch.inference_mode(False), torch.no_grad():
                    cache = self.model(torch.tensor([head]), use_cache=True, logits_to_keep=1).past_key_values
                found[tuple(head)] = cache_layers(cache)
        return found


class Memory:
    """What `generate` asks of a store, as a dictionary: the same split without any store."""

    read_only = False

    def __init__(self, identity: ModelIdentity, held: dict[tuple[int, ...], Layers]) -> None:
        self.identity, self.held, self.metrics, self.config = identity, held, Metrics(), StoreConfig()
        self.gate = Gate(False, LoadCost(bytes_per_token=1, threads=1))  # told of passes, never asked

    def contains(self, tokens: list[int], namespace: bytes = b"") -> int:
        return max((len(head) for head in self.held if tuple(tokens[: len(head)]) == head), default=0)

    def get(self, tokens: list[int], **_: Any) -> Hit | None:
        count = self.contains(tokens)
        return Hit(count, {}, 0.0, self.held[tuple(tokens[:count])]) if count else None

    def explain(self, *_: Any, **__: Any) -> SimpleNamespace:
        """Says nothing of what is not there."""
        return SimpleNamespace(why="")

    def put(self, *_: Any, **__: Any) -> PutResult:
        """Keeps nothing."""
        return PutResult(0, 0, 0, 0, 0.0)


def timed(functions: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the seconds, and of the processor seconds, that functions take in turns. One that returns a pair of
    numbers reports its own."""
    cpus: dict[str, list[float]] = {name: [] for name in functions}

    def one(name: str) -> float:
        begin = time.perf_counter(), time.process_time()
        own = functions[name]()
        seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
        wall, cpu = own if isinstance(own, tuple) else seconds
        cpus[name].append(cpu)
        return float(wall)

    walls = interleave({name: partial(one, name) for name in functions}, rounds)
    return walls, {name: statistics.median(found) for name, found in cpus.items()}


def first_tokens(rows: Rows, batch: Batch, folder: Path, codec: str, rounds: int, more: int) -> bool:
    """Rows of the acceptance; whether all texts equal those of the same split."""
    model, held = batch.model, batch.hits(NEW)
    memory = Memory(batch.identity, held)
    config = StoreConfig(disk=TierConfig(8 * GIB, codec))
    names = iter(range(1 << 20))
    equal: list[bool] = []

    def stored(new_tokens: int) -> tuple[tuple[float, float], Any]:
        """Every time in a namespace of its own, for afterwards all rows are stored."""
        namespace = str(next(names)).encode()
        with KVStore(folder, batch.identity, config) as store:
            for head, layers in held.items():
                store.put(head, layers, namespace=namespace)
            store.flush()
        gc.collect()
        drop_page_cache(folder)
        with KVStore(folder, batch.identity, config) as store:
            begin = time.perf_counter(), time.process_time()
            out = generate(
                model, store=store, namespace=namespace, **batch.inputs, **PROMPT | {"max_new_tokens": new_tokens}
            )
            seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
            found = store.stats()["counters"]["get_hit_tokens_disk"]
        assert found == sum(map(len, held)), "a hit did not come from the disk"
        return seconds, out

    def same_split(new_tokens: int = 1) -> Any:
        return generate(model, store=memory, **batch.inputs, **PROMPT | {"max_new_tokens": new_tokens})

    want = same_split(1)

    def with_store() -> tuple[float, float]:
        seconds, out = stored(1)
        equal.append(torch.equal(out, want))
        return seconds

    functions = {
        "store": with_store,
        "no store": lambda: model.generate(**batch.inputs, **PROMPT),
        "same split": same_split,
    }
    walls, cpus = timed(functions, rounds)
    for name in functions:
        case = "8 rows/4 hits" + ("" if name == "store" else f"/{name}")
        rows.add(case, "ttft_s", walls[name], "s")
        rows.add(case, "ttft_cpu_s", cpus[name], "s of the processor")
    case = "8 rows/4 hits"
    for peer in ("no store", "same split"):
        rows.add(case, f"speedup/{peer}", walls[peer] / walls["store"], "x", peer, walls[peer] / walls["store"])
        rows.add(case, f"speedup_cpu/{peer}", cpus[peer] / cpus["store"], "x", peer, cpus[peer] / cpus["store"])
    _, got = stored(more)
    equal.append(torch.equal(got, same_split(more)))
    whole = model.generate(**batch.inputs, **PROMPT | {"max_new_tokens": more})
    rows.add(case, "text_equals_same_split", int(all(equal)), f"1 = all rows, {more} tokens")
    width = min(got.shape[1], whole.shape[1])
    alike = (got[:, :width] == whole[:, :width]).all(1).sum()
    rows.add(case, "rows_equal_to_one_padded_pass", int(alike), f"of 8 rows, {more} tokens")
    rows.add(case, "hit_tokens", sum(map(len, held)), f"of {sum(map(len, batch.prompts))} tokens")
    return all(equal)


def plans(rows: Rows, batch: Batch, case: str, new: tuple[int, ...], rounds: int) -> None:
    """Seconds to the first token of each way to compute what rows lack, hits in memory."""
    memory = Memory(batch.identity, batch.hits(new))
    usual = prefill_module.PASS_TOKENS["cpu"]

    def by(pass_tokens: int | None) -> Callable[[], None]:
        def run() -> None:
            prefill_module.PASS_TOKENS["cpu"] = usual if pass_tokens is None else pass_tokens
            try:
                generate(batch.model, store=memory, **batch.inputs, **PROMPT)
            finally:
                prefill_module.PASS_TOKENS["cpu"] = usual

        return run

    found = {name: by(count) for name, count in PLANS.items()} | {"from the shortest": lambda: shortest(batch, memory)}
    walls, cpus = timed(found | {"no store": lambda: batch.model.generate(**batch.inputs, **PROMPT)}, rounds)
    for name in walls:
        rows.add(f"plans/{case}/{name}", "ttft_s", walls[name], "s", "groups", walls[name] / walls["groups"])
        ratio = cpus[name] / cpus["groups"]
        rows.add(f"plans/{case}/{name}", "ttft_cpu_s", cpus[name], "s of the processor", "groups", ratio)


def shortest(batch: Batch, memory: Memory) -> None:
    """All rows go on from the first column that some row lacks."""
    begins = [batch.columns - len(prompt) for prompt in batch.prompts]
    columns = min(begin + memory.contains(prompt) for begin, prompt in zip(begins, batch.prompts, strict=True))
    padded = LeftPadded(batch.identity.layout, len(begins), columns, "cpu", reserve=batch.columns)
    for row, (begin, prompt) in enumerate(zip(begins, batch.prompts, strict=True)):
        hit = memory.get(prompt)
        padded.fill(row, () if hit is None else row_of(hit.layers, 0, 0, max(0, columns - begin)))
    batch.model.generate(**batch.inputs, past_key_values=padded.cache(), **PROMPT)


def passes(rows: Rows, model: Any, rounds: int) -> None:
    """What a pass costs by itself: from passes of few and of many tokens."""

    def run(count: int) -> Callable[[], None]:
        ids = torch.arange(100, 100 + count)[None]

        def one() -> None:
            with torch.no_grad():
                model(ids, use_cache=True, logits_to_keep=1)

        return one

    few, many = 4, 260
    for clock, medians in zip(("", "_cpu"), timed({"few": run(few), "many": run(many)}, 3 * rounds), strict=True):
        token = max(1e-9, (medians["many"] - medians["few"]) / (many - few))
        rows.add("pass", f"token{clock}_s", token, "s")
        rows.add("pass", f"pass_tokens{clock}", max(0.0, medians["few"] / token - few), "tokens that a pass costs")


if __name__ == "__main__":
    main()
