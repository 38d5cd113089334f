"""What is deduplication beyond the prefix worth? `python -m benchmarks.dedup [--only NAME ...] [--profile FILE]`

Workloads (`benchmarks/workloads/`) of real text arrive at a store as they would from a program: what is stored of a
sequence is taken from the store, the model computes the rest, the whole is put and made durable. `donor/lossless/NAME`
is the store with donors, `predictive/lossless/NAME` (or the codec that `--codec` names) the same store without,
`prefix/lossless/NAME` prefix hashing alone with raw blocks, `zipnn/lossless/NAME` that library on the same new tokens,
a whole tensor a call. All code the same caches.

`ratio`: raw / stored bytes of what prefix hashing has to store of the sequences that have a counterpart: an earlier one
with the same content behind another prefix. In workloads without counterparts, of all that it has to store.
`ratio_stored`: of all that it has to store, first occurrences included. `ratio_put`: raw bytes of all caches that were
put / stored bytes. Stored bytes are the pages of live records and the growth of the catalog; the profile, once a store,
is the row `profile_bytes`. `exact`: 1 if every sequence came back bit for bit after the store was opened again.

`growing`: a prompt, then decoding steps; a snapshot is put, and durable, at every step; ratios are of all snapshots.
`unrelated`: also bytes and the time of put and flush with donors, over those without: medians, interleaved.
`donor/lossy/NAME`: `bits_per_value` of the sequences with a counterpart, all-in, `bits_per_value_members` of those of
their blocks that have donors; and the KL of the next 256 tokens after `get`, against the exact cache. Tokens without
donors are kept bit for bit.
`donor/decode/NAME`: blocks of the workload's last sequence, decoded by one thread beside a copy of the same bytes;
`.../groups`: with the profile's model of differences; `.../propagated`: with that of profiles of before.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common import Rows, arguments, interleave, scratch
from benchmarks.conversations import load_model
from benchmarks.peers.codecs.base import codec_peer
from benchmarks.profile import needs_profile, profile_path
from benchmarks.workloads.arrival import Arrival, Ids
from benchmarks.workloads.caches import computed, digest, digest_of, held, put, tensor_bytes
from benchmarks.workloads.decode import decode_speed
from benchmarks.workloads.growing import growing
from benchmarks.workloads.ledger import Ledger
from benchmarks.workloads.loss import Loss
from benchmarks.workloads.retrieval import retrieval
from benchmarks.workloads.sessions import sharegpt
from benchmarks.workloads.text import Text
from benchmarks.workloads.transcript import edited_transcript
from benchmarks.workloads.unrelated import unrelated
from benchmarks.workloads.variants import near_synonym, other_instruction
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.codecs.donor.steps import DEFAULT_STEP
from kvstore.codecs.profile import Profile
from kvstore.config import GIB
from kvstore.integrations.transformers import cache_layers

WORKLOADS: dict[str, Callable[[Text, bool], Iterator[Arrival]]] = {
    "near-synonym": near_synonym,
    "other-instruction": other_instruction,
    "retrieval": retrieval,
    "edited-transcript": edited_transcript,
    "sharegpt": sharegpt,
    "unrelated": unrelated,
}
LOSSY = ("near-synonym", "other-instruction", "retrieval")
DECODED = ("near-synonym", "retrieval")
NAMES = (*WORKLOADS, "growing")
TEXT = 16_384  # tokens of running text, more than any workload takes
PUT_ROUNDS, PUT_ROUNDS_QUICK = 9, 5
CHECKED = 9  # snapshots of the growing cache that are compared
DONOR, PREFIX, ZIPNN = "donor", "prefix", "zipnn"


@dataclass
class Bench:
    """codec, profile: of the disk tier. folder: where stores are made."""

    rows: Rows
    model: Any
    identity: ModelIdentity
    codec: str
    profile: Path | None
    folder: Path
    quick: bool

    def open(self, name: str, identity: ModelIdentity | None = None, **settings: Any) -> KVStore:
        """The store of this name in `folder`, nothing in memory. settings: of donors."""
        disk = TierConfig(8 * GIB, self.codec)
        config = StoreConfig(host=TierConfig(0), disk=disk, profile=self.profile, **settings)
        return KVStore(self.folder / name, identity or self.identity, config)

    def pair(self, name: str) -> dict[str, KVStore]:
        """With donors and without."""
        return {DONOR: self.open(f"{name}-donor", donors=True), self.codec: self.open(name, donors=False)}

    def lossy(self, name: str) -> KVStore:
        """A store that codes members in steps, and bit for bit what stands alone."""
        return self.open(f"{name}-lossy", replace(self.identity, codec_family="lossy"), donor_step=DEFAULT_STEP)


def main() -> None:
    parser = arguments("Bytes that donors save, workload by workload.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="workloads to run (all)")
    parser.add_argument("--codec", default="predictive", help="codec of what has no donor (predictive)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--dir", type=Path, help="where stores are made (default: build/scratch)")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    profile = profile_path(model, tokenizer, args.profile) if needs_profile(args.codec) else None
    identity = ModelIdentity.from_transformers(model, tokenizer)
    text = Text(tokenizer, args.text, TEXT)
    exact = True
    with scratch("dedup", args.dir) as folder:
        bench = Bench(Rows("dedup", args.json), model, identity, args.codec, profile, folder, args.quick)
        if profile is not None:
            bench.rows.add("profile", "profile_bytes", profile.stat().st_size, "bytes")
        for name in args.only:
            text.rewind()
            begin = time.perf_counter()
            exact &= measure_growing(bench, text) if name == "growing" else measure(bench, name, text)
            note(f"{name}: {time.perf_counter() - begin:.0f} s")
    bench.rows.main_exit(exact)


# -- the workloads -----------------------------------------------------------------------------------------------------


def measure(bench: Bench, name: str, text: Text) -> bool:
    """Rows of one workload; whether every sequence came back bit for bit."""
    ledger, arrived, caches = Ledger(), list[tuple[Ids, bytes]](), list[tuple[Ids, Any]]()
    zipnn, width = codec_peer(ZIPNN), bench.identity.layout.bytes_per_token
    with ExitStack() as stack:
        stores = {way: stack.enter_context(store) for way, store in bench.pair(name).items()}
        lossy = bench.lossy(name) if name in LOSSY else None
        loss = None if lossy is None else Loss(stack.enter_context(lossy))
        for arrival in WORKLOADS[name](text, bench.quick):
            tokens = arrival.tokens
            layers = computed(bench.model, stores[DONOR], tokens)
            sizes = {way: put(store, tokens, layers) for way, store in stores.items()}
            new = sizes[DONOR][1]
            stored = {way: size for way, (size, _) in sizes.items()} | {PREFIX: new}
            if zipnn is not None:
                stored[ZIPNN] = tensor_bytes(zipnn, layers, new // width)
            ledger.arrive(len(tokens) * width, new, arrival.counterpart, stored)
            if loss is not None:
                loss.arrive(bench.model, arrival, layers)
            arrived.append((tokens, digest(layers)))
            if name in DECODED or name == "unrelated":
                caches.append((tokens, layers))
        note(f"{name}: {counts(stores[DONOR].stats()['counters'])}")
    with bench.open(f"{name}-donor", donors=True) as store:
        exact = all(digest_of(store, tokens) == want for tokens, want in arrived)
    report(bench, name, ledger, exact)
    if loss is not None:
        loss.report(bench.rows, name)
    if name in DECODED:
        profile = None if bench.profile is None else Profile.load(bench.profile)
        layout = bench.identity.layout
        exact &= decode_speed(bench.rows, name, layout, bench.codec, profile, caches, bench.quick)
    if name == "unrelated":
        put_time(bench, caches)
    return exact


def report(bench: Bench, name: str, ledger: Ledger, exact: bool) -> None:
    rows, plain = bench.rows, ledger.ratios(bench.codec)
    for metric, raw in (("put", ledger.put), ("new", ledger.new), ("part", ledger.part)):
        rows.add(f"workload/{name}", f"{metric}_bytes", raw, "raw bytes")
    for way in (DONOR, bench.codec, PREFIX, ZIPNN):
        if way not in ledger.stored:
            rows.add(f"{way}/lossless/{name}", "missing", 1, "library")
            continue
        for metric, value in ledger.ratios(way).items():
            peer = (bench.codec, value / plain[metric]) if way == DONOR else (None, None)
            rows.add(f"{way}/lossless/{name}", metric, value, "raw bytes / stored bytes", *peer)
    rows.add(f"donor/lossless/{name}", "exact", int(exact), "1 = yes")


def counts(counters: dict[str, Any]) -> str:
    found = {name: value for name, value in counters.items() if "donor" in name or "member" in name}
    return ", ".join(f"{value} {name}" for name, value in found.items()) or "no donors"


# -- one growing cache -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_growing(bench: Bench, text: Text) -> bool:
    """Rows of the snapshots; whether those that are compared came back bit for bit.

    The cache is computed as when generating: the prompt at once, then a token a step, the text's next."""
    work = growing(text, bench.quick)
    width = bench.identity.layout.bytes_per_token
    ledger, tokens = Ledger(), work.tokens
    with ExitStack() as stack:
        stores = {way: stack.enter_context(store) for way, store in bench.pair("growing").items()}
        cache = DynamicCache(config=bench.model.config)
        for begin, end in [(0, work.prompt), *((n - 1, n) for n in range(work.prompt + 1, len(tokens) + 1))]:
            ids = torch.tensor(tokens[None, begin:end].astype("int64"))
            bench.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            layers = cache_layers(cache)
            sizes = {way: put(store, tokens[:end], layers) for way, store in stores.items()}
            stored = {way: size for way, (size, _) in sizes.items()}
            new = sizes[DONOR][1]
            ledger.arrive(0 if end == work.prompt else end * width, new, False, stored | {PREFIX: new})
    with bench.open("growing-donor", donors=True) as store:
        ends = range(work.prompt + 1, len(tokens) + 1)[:: max(1, work.steps // CHECKED)]
        same = [
            digest_of(store, tokens[:n]) == digest([(k[..., :n, :], v[..., :n, :]) for k, v in layers]) for n in ends
        ]
    rows, steps = bench.rows, work.steps
    assert ledger.put == work.snapshot_tokens * width
    rows.add("workload/growing", "put_bytes", ledger.put, "raw bytes")
    rows.add("workload/growing", "new_bytes", ledger.new, "raw bytes")
    for way in (DONOR, bench.codec, PREFIX):
        found = ledger.ratios(way)
        peer = (bench.codec, found["ratio_put"] / ledger.ratios(bench.codec)["ratio_put"]) if way == DONOR else ()
        rows.add(f"{way}/lossless/growing", "ratio", found["ratio_put"], "raw bytes / stored bytes", *peer)
        rows.add(f"{way}/lossless/growing", "ratio_stored", found["ratio_stored"], "raw bytes / stored bytes")
        rows.add(f"{way}/lossless/growing", "snapshot_bytes", ledger.stored[way][0] / steps, "bytes a snapshot")
    rows.add("donor/lossless/growing", "exact", int(all(same)), "1 = yes")
    found = ledger.ratios(DONOR)
    note(
        f"growing: {steps} snapshots of {work.prompt + 1} to {len(tokens)} tokens: {work.snapshot_tokens:,} tokens x "
        f"{width:,} bytes = {ledger.put / 1e9:.2f} GB raw, bfloat16. Stored once: {len(tokens):,} tokens, "
        f"{ledger.stored[DONOR][0] / 1e6:.2f} MB with the catalog.\n"
        f"growing: {work.snapshot_tokens:,} / {len(tokens):,} = {ledger.put / ledger.new:.1f}x is that nothing is "
        f"stored twice, {found['ratio_stored']:.2f}x is lossless coding: {found['ratio_put']:.0f}x. "
        "The first factor is the length of the run, not a merit of coding.\n"
        "growing: TSC's 63x is of 32-bit floats in 4 bits, 8x with loss, and of snapshots that repeat, which leaves "
        "7.9x (its own formula gives 7.1x)."
    )
    return all(same)


# -- no sharing at all -------------------------------------------------------------------------------------------------


def put_time(bench: Bench, caches: list[tuple[Ids, Any]]) -> None:
    """Rows of what looking for donors costs where there are none: bytes, and seconds of put and flush."""
    sizes: dict[str, int] = {}

    def write(way: str, donors: bool) -> float:
        with bench.open("put", donors=donors) as store:
            begin = time.perf_counter()
            for tokens, layers in caches:
                store.put(tokens, layers)
            store.flush()
            seconds = time.perf_counter() - begin
            sizes[way] = held(store)[0]
        shutil.rmtree(bench.folder / "put")
        return seconds

    rounds = PUT_ROUNDS_QUICK if bench.quick else PUT_ROUNDS
    seconds = interleave({DONOR: lambda: write(DONOR, True), bench.codec: lambda: write(bench.codec, False)}, rounds)
    raw = sum(len(tokens) for tokens, _ in caches) * bench.identity.layout.bytes_per_token
    rows, off = bench.rows, bench.codec
    for way in (DONOR, off):
        case = f"{way}/lossless/unrelated"
        rows.add(case, "put_s", seconds[way], "s")
        rows.add(case, "put_GBps", raw / seconds[way] / 1e9, "GB/s")
        rows.add(case, "bytes", sizes[way], "bytes")
    case = "donor/lossless/unrelated"
    for metric, share in (("put_share", seconds[DONOR] / seconds[off]), ("bytes_share", sizes[DONOR] / sizes[off])):
        rows.add(case, metric, share, "x", off, share)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
