"""What does a store learn from its own blocks? `python -m benchmarks.learning [--only PART ...] [--dump DIR]`

A store with default settings holds conversations; nothing else is given to it.

- ratio: `ratio/TOKENS`: so many tokens were put before the store learned. `before`, `after`: raw / payload bytes of the
  blocks that it kept back. `later`: raw bytes / bytes of live records of sequences that were put afterwards. `all`: of
  everything, once cold records are recoded. `profile_bytes`, `cpu_s`, and `memory_bytes`: how much the process grew.
- slower: `slower/put`, `slower/get`: seconds of a call that comes while the learner works, against the same while it is
  held still (`peer`), interleaved, medians.
- dedup: `dedup/WORKLOAD`: the workloads of `benchmarks.dedup` with the most to find, at a store that has learned from
  as many tokens of other text (that for calibration). `members/WORKLOAD`: at that store when it has also held, and
  learned from, members (`members/held`): passages of other text behind two beginnings, of which no workload has one.

Every sequence is compared bit for bit at the end; the program ends with status 1 if one differed.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Rows, arguments, scratch
from benchmarks.conversations import calibration_text, load_model, measured_text
from benchmarks.dedup import WORKLOADS
from benchmarks.workloads.caches import computed, digest, digest_of, held, put
from benchmarks.workloads.ledger import Ledger
from benchmarks.workloads.text import Text
from kvstore import KVStore, ModelIdentity, StoreConfig
from kvstore.calibration.dump import KVDump
from kvstore.integrations.transformers import cache_layers

PARTS = ("ratio", "slower", "dedup")
DUPLICATES = ("near-synonym", "other-instruction", "retrieval")
TEXT = 16_384  # tokens of running text, more than any workload takes
WINDOW = 1024
WINDOWS, LATER = 40, 4  # put before it learns, and afterwards
PASSAGES, PASSAGES_QUICK = 28, 8  # windows that are put behind two beginnings
CONTEXT = 384  # tokens of another text before every third of them
FIRST, *OTHERS = (
    "You answer letters for a small school.",
    "You answer mail for a small school.",
    "List what is promised, and to whom, one promise a line.",
)
ROUNDS, ROUNDS_QUICK = 100, 20
BEGIN_S = 35.0  # until a store that was opened begins to learn
PAUSE_S = 0.4  # before each timed call, so that the learner has begun a step
CHARACTERS = 8  # more than a token has, on average
Sequences = Iterator[tuple[Any, Any]]


@dataclass
class Bench:
    """What all parts work with. sequences: gives tokens and caches, the same each time. folder: of the stores."""

    rows: Rows
    model: Any
    tokenizer: Any
    text: Path | None
    quick: bool
    identity: ModelIdentity
    sequences: Callable[[], Sequences]
    folder: Path
    windows: int
    later: int
    rounds: int


def main() -> None:
    parser = arguments("What a store learns from its own blocks.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (all)")
    parser.add_argument("--dump", type=Path, help="take the caches from this work folder of `kvstore calibrate --work`")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="sequences of 1,024 tokens to learn from (40)")
    parser.add_argument("--dir", type=Path, help="where stores are made (default: build/scratch)")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    identity = ModelIdentity.from_transformers(model, tokenizer)
    windows, later, rounds = (10, 1, ROUNDS_QUICK) if args.quick else (args.windows, LATER, ROUNDS)

    def sequences() -> Sequences:
        if args.dump is not None:
            return _dumped(KVDump.open(args.dump))
        return _computed(model, tokenizer, args.text, windows + later)

    exact = True
    with scratch("learning", args.dir) as folder:
        rows = Rows("learning", args.json)
        bench = Bench(
            rows, model, tokenizer, args.text, args.quick, identity, sequences, folder, windows, later, rounds
        )
        for part in args.only:
            exact &= {"ratio": ratio, "slower": slower, "dedup": dedup}[part](bench)
    bench.rows.main_exit(exact)


def _dumped(dump: KVDump) -> Sequences:
    for window in range(dump.windows):
        yield dump.tokens(window).astype("uint32"), dump.tensors(window)


def _computed(model: Any, tokenizer: Any, text: Path | None, count: int) -> Sequences:
    ids = tokenizer(measured_text(text, count * WINDOW * CHARACTERS), return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < count * WINDOW:
        raise SystemExit(f"the text has {ids.shape[1]} tokens: too few, {count * WINDOW} are needed")
    for window in ids[:, : count * WINDOW].split(WINDOW, dim=1):
        with torch.inference_mode():
            cache = model(window, use_cache=True, logits_to_keep=1).past_key_values
        yield window[0].numpy().astype("uint32"), cache_layers(cache)


def ratio(bench: Bench) -> bool:
    """Rows of what is learned; whether every sequence came back bit for bit."""
    path, case, known = bench.folder / "ratio", f"ratio/{bench.windows * WINDOW}", []
    sequences = bench.sequences()
    with KVStore(path, bench.identity, StoreConfig(learn="off")) as store:
        for _ in range(bench.windows):
            tokens, layers = next(sequences)
            known.append((tokens, digest(layers)))
            put(store, tokens, layers)
    with KVStore(path, bench.identity, StoreConfig(learn="off")) as store:
        cpu, grown = time.process_time(), _most_memory()
        status = store.learn()
        bench.rows.add(case, "cpu_s", time.process_time() - cpu, "s")
        bench.rows.add(
            case, "memory_bytes", 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown), "bytes"
        )
        bench.rows.add(case, "adopted", int(status.state == "adopted"), "1 = yes")
        bench.rows.add(case, "before", status.before, "raw / payload bytes, kept back")
        bench.rows.add(
            case, "after", status.after, "raw / payload bytes, kept back", "before", status.after / status.before
        )
        bench.rows.add(case, "profile_bytes", status.profile_bytes, "bytes")
        stored, raw = held(store)
        bench.rows.add(case, "all", raw / stored, "raw bytes / bytes of records and catalog")
        more = []
        for (tokens, layers), _ in zip(sequences, range(bench.later), strict=False):
            known.append((tokens, digest(layers)))
            more.append(put(store, tokens, layers))
        bench.rows.add(case, "later", sum(raw for _, raw in more) / sum(new for new, _ in more), "raw / stored bytes")
    with KVStore(path, bench.identity, StoreConfig()) as store:
        exact = all(digest_of(store, tokens) == want for tokens, want in known)
    bench.rows.add(case, "exact", int(exact), "1 = yes")
    return exact


def _most_memory() -> int:
    """KiB that the process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def slower(bench: Bench) -> bool:
    """Rows of calls beside a learner; whether every get was what was put."""
    path = _filled(bench, "slower")
    tokens, layers = next(bench.sequences())
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    equal, want = True, digest(layers)
    with KVStore(path, bench.identity, StoreConfig()) as store:
        time.sleep(BEGIN_S)
        learner = store._engine.learner
        assert learner is not None
        idle_s, busy = learner._pace._idle_s, 0.0
        for turn in range(bench.rounds):
            for works in sorted((True, False), reverse=bool(turn % 2)):
                learner._pace._idle_s = idle_s if works else (lambda: busy)  # held still by calls that nobody makes
                for what, call in _calls(store, tokens, layers, 2 * turn + works).items():
                    time.sleep(PAUSE_S)
                    begin = time.perf_counter()
                    call()
                    times[what, works].append(time.perf_counter() - begin)
            equal &= digest_of(store, tokens) == want
        bench.rows.add("slower", "learned", int(learner.status.held_out > 0), "1 = it was done before the part ended")
    for what in ("put", "get"):
        ours, peer = (statistics.median(times[what, works]) for works in (True, False))
        bench.rows.add(f"slower/{what}", "seconds", ours, "s", "the learner held still", ours / peer)
    return equal


def _calls(store: KVStore, tokens: Any, layers: Any, turn: int) -> dict[str, Callable[[], Any]]:
    count = len(tokens) // 4
    fresh = tokens[:count].copy()
    fresh[0] = 100_000 + turn  # a sequence that is stored nowhere
    short = [(k[..., :count, :], v[..., :count, :]) for k, v in layers]
    return {"get": lambda: store.get(tokens), "put": lambda: (store.put(fresh, short), store.flush())}


def dedup(bench: Bench) -> bool:
    """Rows of workloads of `benchmarks.dedup` at a store that has learned, before and after it held members; whether
    every sequence came back."""
    base = bench.folder / "dedup"
    exact = fill(bench, base) and workloads(bench, base, "dedup")
    exact &= hold_members(bench, base) and workloads(bench, base, "members")
    bench.rows.add("dedup", "exact", int(exact), "1 = yes")
    return exact


def fill(bench: Bench, base: Path) -> bool:
    """Makes a store that has learned from other text than workloads are of; whether it adopted what it learned."""
    text = _other_text(bench, bench.windows * WINDOW)
    with KVStore(base, bench.identity, StoreConfig(learn="off")) as store:
        for tokens in text.reshape(-1, WINDOW):
            put(store, tokens, computed(bench.model, store, tokens))
        return store.learn().state == "adopted"


def hold_members(bench: Bench, base: Path) -> bool:
    """Puts passages behind two beginnings each, and learns again; whether every row of theirs counts."""
    passages = PASSAGES_QUICK if bench.quick else PASSAGES
    text, prompts = Text(bench.tokenizer, bench.text, 0), [FIRST, *OTHERS]
    windows = _other_text(bench, (bench.windows + passages) * WINDOW)[-passages * WINDOW :].reshape(-1, WINDOW)
    with KVStore(base, bench.identity, StoreConfig(learn="off")) as store:
        for number, window in enumerate(windows):
            heads = [text.system(prompts[0]), text.system(prompts[1 + number % 2])]
            if number % 3 == 2:
                heads[1] = windows[number - 1, :CONTEXT].tolist()
            for head in heads:
                tokens = np.array(head + window.tolist(), np.uint32)
                put(store, tokens, computed(bench.model, store, tokens))
        held_members = store.stats()["counters"]["member_records"]
        learned = store.learn().state == "adopted"
        profile = store.learning.profile_bytes
    bench.rows.add("members", "held", held_members, "records")
    bench.rows.add("members", "profile_bytes", profile, "bytes")
    return learned and held_members > 0


def workloads(bench: Bench, base: Path, case: str) -> bool:
    """Rows of workloads at copies of a store; whether every sequence came back."""
    width, exact = bench.identity.layout.bytes_per_token, True
    for name in DUPLICATES[:1] if bench.quick else DUPLICATES:
        text, ledger, arrived = Text(bench.tokenizer, bench.text, TEXT), Ledger(), list[tuple[Any, bytes]]()
        folder = bench.folder / f"{case}-{name}"
        shutil.copytree(base, folder)
        with KVStore(folder, bench.identity, StoreConfig(learn="off")) as store:
            for arrival in WORKLOADS[name](text, bench.quick):
                layers = computed(bench.model, store, arrival.tokens)
                size, new = put(store, arrival.tokens, layers)
                ledger.arrive(len(arrival.tokens) * width, new, arrival.counterpart, {"learned": size, "prefix": new})
                arrived.append((arrival.tokens, digest(layers)))
        with KVStore(folder, bench.identity, StoreConfig(learn="off")) as store:
            exact &= all(digest_of(store, tokens) == want for tokens, want in arrived)
        shutil.rmtree(folder)
        for metric, value in ledger.ratios("learned").items():
            bench.rows.add(f"{case}/{name}", metric, value, "raw bytes / stored bytes")
    return exact


def _other_text(bench: Bench, count: int) -> npt.NDArray[np.uint32]:
    """So many tokens of text that no workload is of: that for calibration, or of the file what follows theirs."""
    words, begin = calibration_text(count * CHARACTERS), 0
    if bench.text is not None:
        words, begin = bench.text.read_text(errors="replace"), TEXT
    ids = np.array(bench.tokenizer(words, verbose=False).input_ids[begin : begin + count], np.uint32)
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens besides those of the workloads: too few, {count} are needed")
    return ids


def _filled(bench: Bench, name: str) -> Path:
    """A store that holds what is to be learned from, and has learned nothing."""
    path = bench.folder / name
    with KVStore(path, bench.identity, StoreConfig(learn="off")) as store:
        for (tokens, layers), _ in zip(bench.sequences(), range(bench.windows), strict=False):
            put(store, tokens, layers)
    return path


if __name__ == "__main__":
    main()
