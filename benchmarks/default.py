"""What does a program get with `StoreConfig()` and nothing else? `python -m benchmarks.default [--only PART ...]`

`default` is the store with default settings, `profile` the same with a profile named (`--profile FILE`, else the
benchmarks' own). All text is held out: conversations that no profile is fitted to, and, as text of another kind, the
sources of Python's standard library (`python`) and the pages of the installed packages (`markdown`).

- ratio: `WAY/ratio/TEXT/TOKENS`: so many tokens were put, in sequences of 2,048. `ratio`: raw bytes / bytes of live
  records and the catalog. `ratio_all_in`: the profile counted, too. `disk_bytes`: what all files of the store take on
  the disk, segments whole. `profile/pays/TEXT`, `tokens`: from how many tokens on the profile makes the store smaller,
  by the bytes a token of the largest store.
- dedup: `WAY/dedup/WORKLOAD`: the workloads of `benchmarks.dedup` with the most to find. `ratio`, `ratio_stored` and
  `ratio_put` as there. `exact`: 1 if every sequence came back bit for bit after the store was opened again.
- resume: `WAY/resume/TOKENS`: `ttft_s` from before the store is opened to the first token, against no store at all,
  interleaved (`speedup`); `open_s` and `get_s` are parts of it. `own`: a store that has a profile of its own and is
  opened without naming one. `profile-unread`: a profile is named, and what is resumed was stored without one; it is
  measured after the others. The files of store and profile are taken out of the page cache first. Every cache is
  compared bit for bit with the one that was put.

Where README.md had a figure before, `peer` names it and `ratio` is ours over it. The program ends with status 1 if a
cache differed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows, arguments, drop_page_cache, folder_bytes, interleave, scratch
from benchmarks.conversations import load_model, measured_text
from benchmarks.dedup import WORKLOADS
from benchmarks.other_text import OTHER_TEXTS
from benchmarks.profile import profile_path
from benchmarks.resume import first_token, same
from benchmarks.workloads.arrival import Ids
from benchmarks.workloads.caches import computed, digest, digest_of, held, put
from benchmarks.workloads.ledger import Ledger
from benchmarks.workloads.text import Text
from kvstore import KVStore, ModelIdentity, StoreConfig
from kvstore.integrations.transformers import cache_layers

PARTS = ("ratio", "dedup", "resume")
DEFAULT, PROFILE, OWN, UNREAD, PREFIX = "default", "profile", "own", "profile-unread", "prefix"
WINDOW = 2048
WINDOWS, OTHER_WINDOWS = 8, 2
SIZES = (2048, 4096, 8192, 16384)  # tokens at which a store is looked at
DUPLICATES = ("near-synonym", "other-instruction", "retrieval")
TEXT = 16_384  # tokens of running text, more than any workload takes
ROUNDS, ROUNDS_QUICK = 5, 3
CHARACTERS = 8  # more than a token has, on average

# Figures of README.md before this benchmark, by row: those of `entropy` or `predictive` for want of any of the default.
README = {
    ("default/ratio/conversations/16384", "ratio"): 1.552,
    ("profile/ratio/conversations/16384", "ratio"): 1.92,
    ("default/dedup/near-synonym", "ratio"): 3.65,
    ("default/dedup/other-instruction", "ratio"): 3.11,
    ("default/dedup/retrieval", "ratio"): 2.50,
    ("profile/dedup/near-synonym", "ratio"): 3.65,
    ("profile/dedup/other-instruction", "ratio"): 3.11,
    ("profile/dedup/retrieval", "ratio"): 2.50,
    ("default/resume/512", "speedup"): 7.0,  # opening the store was not in it
    ("default/resume/2048", "speedup"): 19,
    ("default/resume/8000", "speedup"): 61,
    ("profile/resume/512", "speedup"): 6.0,
    ("profile/resume/2048", "speedup"): 15,
    ("profile/resume/8000", "speedup"): 38,
}


@dataclass
class Bench:
    """What all parts work with. profile: of the ways that name one. folder: where stores are made."""

    rows: Rows
    model: Any
    tokenizer: Any
    identity: ModelIdentity
    profile: Path
    folder: Path
    text: Path | None
    quick: bool

    def open(self, name: str, way: str) -> KVStore:
        """The store of this name in `folder`. way: whether its settings name the profile."""
        config = StoreConfig(profile=self.profile) if way in (PROFILE, UNREAD) else StoreConfig()
        return KVStore(self.folder / name, self.identity, config)

    def add(self, case: str, metric: str, value: float, unit: str, peer: tuple[str, float] | None = None) -> None:
        """One row, against `peer` (its name, and ours over it) or what README.md said before."""
        before = README.get((case, metric))
        if peer is None and before is not None and not self.quick:
            peer = f"README: {before:g}", value / before
        self.rows.add(case, metric, value, unit, *(peer or ()))

    def windows(self, text: str, count: int, length: int) -> list[Any]:
        """`count` sequences of `length` tokens, int64 `[1, length]`."""
        ids = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        if ids.shape[1] < count * length:
            raise SystemExit(f"the text has {ids.shape[1]} tokens: too few, {count * length} are needed")
        return list(ids[:, : count * length].split(length, dim=1))


def main() -> None:
    parser = arguments("What a program gets with StoreConfig() and nothing else.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (all)")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prefixes to resume (512 2048 8000)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--dir", type=Path, help="where stores are made (default: build/scratch)")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    identity, profile = ModelIdentity.from_transformers(model, tokenizer), profile_path(model, tokenizer, args.profile)
    same_bits = True
    with scratch("default", args.dir) as folder, torch.inference_mode():
        rows = Rows("default", args.json)
        bench = Bench(rows, model, tokenizer, identity, profile, folder, args.text, args.quick)
        rows.add(PROFILE, "profile_bytes", profile.stat().st_size, "bytes")
        for part in args.only:
            same_bits &= _run(part, bench, args)
    rows.main_exit(same_bits)


def _run(part: str, bench: Bench, args: argparse.Namespace) -> bool:
    if part == "ratio":
        return ratios(bench)
    if part == "dedup":
        names = DUPLICATES[:1] if bench.quick else DUPLICATES
        found = [duplicates(bench, name) for name in names]
        return all(found)
    lengths = args.lengths or ([512] if bench.quick else [512, 2048, 8000])
    found = [resumes(bench, length) for length in lengths]
    return all(found)


# -- bytes -------------------------------------------------------------------------------------------------------------


def ratios(bench: Bench) -> bool:
    """Rows of what stores of each kind of text take."""
    length, count, others = (256, 2, 1) if bench.quick else (WINDOW, WINDOWS, OTHER_WINDOWS)
    texts: dict[str, tuple[Callable[[int], str], int]] = {"conversations": (_talk(bench), count)}
    texts |= {name: (take, others) for name, take in OTHER_TEXTS.items()}
    exact = True
    for name, (take, windows) in texts.items():
        exact &= ratio(bench, name, bench.windows(take(windows * length * CHARACTERS), windows, length))
    return exact


def _talk(bench: Bench) -> Callable[[int], str]:
    return lambda characters: measured_text(bench.text, characters)


def ratio(bench: Bench, text: str, windows: list[Any]) -> bool:
    """Rows of one text; whether every sequence came back bit for bit."""
    width, count = bench.identity.layout.bytes_per_token, 0
    sizes, digests = dict[str, int](), list[tuple[Ids, bytes]]()
    with ExitStack() as stack:
        stores = {way: stack.enter_context(bench.open(f"{text}-{way}", way)) for way in (DEFAULT, PROFILE)}
        for number, ids in enumerate(windows, 1):
            layers = cache_layers(bench.model(ids, use_cache=True, logits_to_keep=1).past_key_values)
            tokens = ids[0].numpy().astype("uint32")
            digests.append((tokens, digest(layers)))
            count += len(tokens)
            for way, store in stores.items():
                put(store, tokens, layers)
                sizes[way] = held(store)[0]
            if count in SIZES or number == len(windows):
                for way in stores:
                    _report_size(bench, way, f"{text}/{count}", count * width, sizes[way])
    saved = (sizes[DEFAULT] - sizes[PROFILE]) / count
    if saved > 0:
        bench.add(f"profile/pays/{text}", "tokens", bench.profile.stat().st_size / saved, "tokens")
    exact = True
    for way in stores:
        with bench.open(f"{text}-{way}", way) as store:
            exact &= all(digest_of(store, tokens) == want for tokens, want in digests)
    return exact


def _report_size(bench: Bench, way: str, what: str, raw: int, stored: int) -> None:
    case = f"{way}/ratio/{what}"
    profile = bench.profile.stat().st_size if way == PROFILE else 0
    name = f"{what.partition('/')[0]}-{way}"
    bench.add(case, "raw_bytes", raw, "bytes")
    bench.add(case, "stored_bytes", stored, "bytes of records and catalog")
    bench.add(case, "disk_bytes", folder_bytes(bench.folder / name), "bytes of all files, segments whole")
    bench.add(case, "ratio", raw / stored, "raw bytes / stored bytes")
    bench.add(case, "ratio_all_in", raw / (stored + profile), "raw bytes / bytes with the profile")


# -- duplicates --------------------------------------------------------------------------------------------------------


def duplicates(bench: Bench, name: str) -> bool:
    """Rows of one workload of `benchmarks.dedup`; whether every sequence came back bit for bit."""
    text, ledger, width = Text(bench.tokenizer, bench.text, TEXT), Ledger(), bench.identity.layout.bytes_per_token
    arrived = list[tuple[Ids, bytes]]()
    with ExitStack() as stack:
        stores = {way: stack.enter_context(bench.open(f"{name}-{way}", way)) for way in (DEFAULT, PROFILE)}
        for arrival in WORKLOADS[name](text, bench.quick):
            layers = computed(bench.model, stores[DEFAULT], arrival.tokens)
            sizes = {way: put(store, arrival.tokens, layers) for way, store in stores.items()}
            new = sizes[DEFAULT][1]
            stored = {way: size for way, (size, _) in sizes.items()} | {PREFIX: new}
            ledger.arrive(len(arrival.tokens) * width, new, arrival.counterpart, stored)
            arrived.append((arrival.tokens, digest(layers)))
    exact = True
    for way in stores:
        with bench.open(f"{name}-{way}", way) as store:
            equal = all(digest_of(store, tokens) == want for tokens, want in arrived)
        for metric, value in ledger.ratios(way).items():
            bench.add(f"{way}/dedup/{name}", metric, value, "raw bytes / stored bytes")
        bench.add(f"{way}/dedup/{name}", "exact", int(equal), "1 = yes")
        exact &= equal
    return exact


# -- the first token ---------------------------------------------------------------------------------------------------


@dataclass
class Resume:
    """One way to resume a prompt. store: the name of its store. want: the cache that was put."""

    bench: Bench
    store: str
    way: str
    prompt: Any
    want: list[Any]

    def __post_init__(self) -> None:
        self.opened: list[float] = []
        self.got: list[float] = []
        self.equal = True

    def __call__(self) -> float:
        """Seconds from before the store is opened to the first token."""
        bench, tokens = self.bench, self.prompt[0, :-1].numpy()
        gc.collect()
        drop_page_cache(bench.folder / self.store, bench.profile, machine=False)
        begin = time.perf_counter()
        with bench.open(self.store, self.way) as store:
            opened = time.perf_counter()
            hit = store.get(tokens)
            got = time.perf_counter()
            known = 0 if hit is None else hit.tokens
            first_token(bench.model, self.prompt, None if hit is None else hit.cache(), known)
            seconds = time.perf_counter() - begin
            self.equal &= hit is not None and known == len(tokens) and same(hit.layers, self.want)
        self.opened.append(opened - begin)
        self.got.append(got - opened)
        return seconds


def resumes(bench: Bench, length: int) -> bool:
    """Rows of one length of the prefix; whether every cache was the one that was put."""
    prompt = bench.windows(measured_text(bench.text, CHARACTERS * (length + 1)), 1, length + 1)[0]
    first_token(bench.model, prompt[:, :64], None, 0)  # the libraries' own warm-up is nobody's first token
    cache = bench.model(prompt[:, :length], use_cache=True, logits_to_keep=1).past_key_values
    want = [(layer.keys, layer.values) for layer in cache.layers]
    for way in (DEFAULT, PROFILE):
        with bench.open(f"resume-{way}-{length}", way) as store:
            put(store, prompt[0, :length].numpy().astype("uint32"), cache_layers(cache))
    stored = {DEFAULT: DEFAULT, PROFILE: PROFILE, OWN: PROFILE}
    ways = {way: Resume(bench, f"resume-{name}-{length}", way, prompt, want) for way, name in stored.items()}
    functions: dict[str, Callable[[], object]] = dict(ways)
    medians = interleave(
        {**functions, "recompute": lambda: first_token(bench.model, prompt, None, 0)},
        ROUNDS_QUICK if bench.quick else ROUNDS,
    )
    # Last, and apart: naming a profile for the first time copies it into the store.
    unread = Resume(bench, f"resume-{DEFAULT}-{length}", UNREAD, prompt, want)
    unread()
    ways[UNREAD] = Resume(bench, unread.store, UNREAD, prompt, want)
    medians[UNREAD] = statistics.median(ways[UNREAD]() for _ in range(ROUNDS_QUICK if bench.quick else ROUNDS))
    bench.add(f"recompute/{length}", "ttft_s", medians["recompute"], "s")
    for way, resume in ways.items():
        case, faster = f"{way}/resume/{length}", medians["recompute"] / medians[way]
        bench.add(case, "ttft_s", medians[way], "s", ("recompute", 1 / faster))
        bench.add(case, "speedup", faster, "x")
        bench.add(case, "open_s", statistics.median(resume.opened), "s")
        bench.add(case, "get_s", statistics.median(resume.got), "s")
        bench.add(case, "bit_identical", int(resume.equal), "1 = yes")
    return all(resume.equal for resume in ways.values())


if __name__ == "__main__":
    main()
