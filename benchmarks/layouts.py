"""What do the codecs and the store make of one model's caches? `python -m benchmarks.layouts [--model NAME]`

Every model of `benchmarks.models`, whose layouts differ, the same way: held-out conversations in windows of 1,024
tokens. Cases begin with the model's name.

- `cache`: is it like a trained model's, or like chance? `exponent_bits_in_channels`: mean entropy of the exponents of a
  channel (one value of one head of K or V of a layer); `exponent_bits`: of all of them together. Then the entropy
  codec's ratio on the same values in another order (`shuffled`), on a cache of the model before its training
  (`untrained`; those that are trained here) and on normal numbers (`normal`).
- `CODEC/KV`: splitzip, entropy, predictive and donor, exact, and `predictive@BITS`, with loss (0.7 bits a value, or the
  nearest rate that the profile reaches): `ratio`, `bits_per_value`, GB/s and shares of a copy in the same rounds, in
  blocks of 64 tokens, one thread; seconds of the processor, which other programs change less than those of a clock.
  Predictive has a profile of 16 windows of other conversations. Donor: windows behind one instruction, coded against
  the same tokens behind another one, with the profile if there is one. `refused`: what cannot code this layout, and
  why, on stderr. With loss, protocol A of `benchmarks.quality` on 4 windows, `kl` and so on, beside a plain 4-bit grid.
- `store`: prefills put into a store with `StoreConfig()`: `cache_bytes` that the model keeps, `stored_bytes` of records
  and catalog, and whether every cache came back bit for bit after the store was opened again. `store/predictive`: the
  same with the profile, whose own bytes do not count. The program ends with status 1 if a cache did not come back, or
  if a store takes more than the caches.

`--untrained NAME` measures a model with chance weights: what that says of ratios is nothing, of speeds and of what a
layout allows all there is.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.codecs import Case, Cases, keep_memory, measure
from benchmarks.common import MIB, Rows, arguments, scratch
from benchmarks.conversations import load_model, load_tokenizer, measured_text
from benchmarks.models import RECIPES
from benchmarks.models.train import new_model
from benchmarks.models.vocabulary import small_tokenizer
from benchmarks.peers.codecs.coders import Blocks, Members, StoreBlocks
from benchmarks.peers.codecs.data import RealKV, assemble, normal, real_kv, whole_layout
from benchmarks.peers.quality.data import cut, test_text
from benchmarks.peers.quality.methods import Method, StoreMethod
from benchmarks.profile import PARTS, profile_path
from benchmarks.quality import Score, measured, prefix
from benchmarks.workloads.caches import digest, digest_of, held, put
from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig
from kvstore.codecs import BlockInfo, Codec, codec_by_name
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.profile import Profile
from kvstore.errors import KVStoreError, ProfileError, UnsupportedModel
from kvstore.integrations.transformers import cache_layers

WINDOW, WINDOWS = 1024, 16  # tokens of a window; windows of calibration
LOSSY_BITS = 0.7
PROMPTS = 2  # of the store
SCORED = 4  # windows that codecs with loss are scored on
MEMBERS = 2  # windows, half of each
INSTRUCTIONS = (
    "Answer the question below as shortly as you can, and say what you are not sure of.\n\n",
    "You are a patient teacher. Explain every step of what follows in plain words, with one example each.\n\n",
)
CHARACTERS = 8  # more than a token has, on average


@dataclass
class Bench:
    """What all parts work with. rounds: of each measurement."""

    rows: Rows
    name: str
    model: Any
    tokenizer: Any
    text: Path | None
    rounds: int

    def add(self, case: str, metric: str, value: float, unit: str, peer: str | None = None, ratio: Any = None) -> None:
        self.rows.add(f"{self.name}/{case}", metric, value, unit, peer, ratio)

    def refuse(self, case: str, why: Exception) -> None:
        """The row of what cannot code this layout."""
        print(f"{self.name}/{case}: {why}", file=sys.stderr, flush=True)
        self.add(case, "refused", 1, "1 = yes")

    def ids(self, count: int) -> list[int]:
        """The first tokens of the text."""
        found = self.tokenizer(measured_text(self.text, count * CHARACTERS), verbose=False).input_ids[:count]
        if len(found) < count:
            raise SystemExit(f"the text has {len(found)} tokens: too few, {count} are needed")
        return [int(token) for token in found]


def main() -> None:
    parser = arguments("What the codecs and the store make of one model's caches.")
    parser.add_argument("--untrained", choices=RECIPES, help="the model of this name before its training, not --model")
    parser.add_argument("--mib", type=int, default=32, help="keys and values, raw (32)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    args = parser.parse_args()
    rows = Rows("layouts", args.json)
    keep_memory()
    name = f"{args.untrained}-untrained" if args.untrained else str(args.model or "smollm2")
    model, tokenizer = untrained(args.untrained) if args.untrained else load_model(args.model)
    bench = Bench(rows, name, model, tokenizer, args.text, 5 if args.quick else 15)
    profile = profile_for(bench, args.profile, 4 if args.quick else WINDOWS)
    kv = real_kv((4 if args.quick else args.mib) * MIB, model, tokenizer, args.text, WINDOW)
    torch.set_num_threads(1)
    is_like_chance(bench, kv)
    gc.collect()
    codecs(bench, kv, profile)
    with scratch("layouts", args.dir) as folder:
        length = WINDOW // 4 if args.quick else WINDOW
        prompts = np.array(bench.ids(PROMPTS * length), np.uint32).reshape(PROMPTS, length)
        same = stored(bench, folder / "default", prompts)
        if profile is not None:
            file = folder / "profile"
            profile.save(file)
            same &= stored(bench, folder / "predictive", prompts, "store/predictive", StoreConfig(profile=file))
        rows.main_exit(same)


def untrained(name: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a recipe, with chance weights: shapes and speeds are those of the trained one."""
    recipe = RECIPES[name]
    return new_model(recipe).to(torch.bfloat16).eval(), small_tokenizer(load_tokenizer(), recipe.vocabulary)


def profile_for(bench: Bench, given: Path | None, windows: int) -> Profile | None:
    """Of as many sections as can be fitted; None, and a row, where none can."""
    why: Exception
    for parts in (PARTS, ("lossless", "lossy"), ("lossless",)):
        try:
            return Profile.load(profile_path(bench.model, bench.tokenizer, given, windows, parts=parts))
        except (ProfileError, UnsupportedModel) as error:
            print(f"{bench.name}: sections {', '.join(parts)}: {error}", file=sys.stderr, flush=True)
            why = error
    bench.refuse("predictive/KV", why)
    return None


# -- chance ------------------------------------------------------------------------------------------------------------


def is_like_chance(bench: Bench, kv: RealKV) -> None:
    """Rows of how exponents lie, and of the entropy codec on what is like the cache and has no order."""
    inside, whole = exponent_bits(kv)
    bench.add("cache", "exponent_bits_in_channels", inside, "bits")
    bench.add("cache", "exponent_bits", whole, "bits")
    bench.add("cache", "bytes_per_token", kv.layout.bytes_per_token, "bytes, all tokens in all layers")
    rng = np.random.default_rng(0)
    others = {
        "shuffled": np.concatenate([rng.permutation(unit) for unit in kv.units(kv.values)]),
        "normal": normal(len(kv.values), [0], [0])["zeros0/escapes0"],
    }
    if bench.name in RECIPES:
        fresh, tokenizer = untrained(bench.name)
        others["untrained"] = real_kv(kv.values.nbytes, fresh, tokenizer, bench.text, WINDOW).values
    codec = codec_by_name("entropy")
    cache = kv.values.nbytes / StoreBlocks(codec, kv.blocks(kv.values), [], None).coded_bytes()
    for name, values in others.items():
        found = values.nbytes / StoreBlocks(codec, kv.blocks(values), [], None).coded_bytes()
        bench.add(f"cache/{name}", "entropy_ratio", found, "x", "cache", found / cache)


def exponent_bits(kv: RealKV) -> tuple[float, float]:
    """Entropy of the exponents of bfloat16 values, bits: mean over channels, and of all together."""
    widths = [dim for x in kv.layout.layers for dim in (x.key_dim, x.value_dim)]
    total, inside, channels = np.zeros(256), 0.0, 0
    for number, unit in enumerate(kv.units(kv.values)):
        rows = (unit >> 7 & 0xFF).reshape(-1, len(kv.ids[number // len(widths)]), widths[number % len(widths)])
        for channel in rows.transpose(0, 2, 1).reshape(-1, rows.shape[1]):
            counts = np.bincount(channel, minlength=256)
            total += counts
            inside += entropy(counts)
            channels += 1
    return inside / channels, entropy(total)


def entropy(counts: Any) -> float:
    """Bits a symbol."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


# -- codecs ------------------------------------------------------------------------------------------------------------


def codecs(bench: Bench, kv: RealKV, profile: Profile | None) -> None:
    """Rows of every codec that takes the layout, and of those that refuse it."""
    cases: Cases = {}
    target = np.full_like(kv.values, 1)
    for name in ("splitzip", "entropy", *(() if profile is None else ("predictive", lossy_name(profile)))):
        try:
            codec = codec_by_name(name, profile)
            layout = profile.layout if profile is not None and codec.profile == profile.id else None
            coder = StoreBlocks(codec, kv.blocks(kv.values, layout), kv.blocks(target, layout), None)
        except (KVStoreError, ValueError) as error:
            bench.refuse(f"{name}/KV", error)
            continue
        cases[f"{bench.name}/{name}/KV"] = Case("KV", coder, kv.values, target, exact="@" not in name)
    measure(bench.rows, cases, {1: None}, bench.rounds, "/tiled" if kv.tiled else "", time.process_time)
    for name in (name for name in cases if "@" in name):
        lost(bench, name.removeprefix(f"{bench.name}/"), codec_by_name(name.split("/")[1], profile), kv.layout)
    try:
        case = members(bench, kv, profile)
    except ValueError as error:
        bench.refuse("donor/KV", error)
    else:
        measure(bench.rows, {f"{bench.name}/donor/KV": case}, {1: None}, bench.rounds, clock=time.process_time)


def lost(bench: Bench, case: str, codec: Codec, layout: KVLayout) -> None:
    """Rows of what coding with loss does to the model, and of a grid of 4 bits."""
    methods: dict[str, Method] = {case: StoreMethod(codec, layout)}
    methods["higgs/4bit/KV"] = StoreMethod(AquaCodec(None, 4, "higgs"), layout)
    scores = {name: Score() for name in methods}
    windows = cut(bench.tokenizer, test_text(bench.text, None, SCORED), SCORED)
    for ids in windows:
        prefix(bench.model, ids, methods, scores)
    for name, score in scores.items():
        for metric, (value, unit) in measured(score, Score(), len(windows), "A").items():
            bench.add(name, metric if metric != "bits_per_value" else "scored_bits_per_value", value, unit)


def lossy_name(profile: Profile) -> str:
    """Predictive with `LOSSY_BITS`, or the rate next to it that the profile reaches."""
    rates = [row[2] for row in profile.report["parts"].get("lossy", {}).get("ladder", [])]
    bits = min(max(LOSSY_BITS, 1.01 * min(rates)), 0.99 * max(rates)) if rates else LOSSY_BITS
    return f"predictive@{bits:.3g}"


def members(bench: Bench, kv: RealKV, profile: Profile | None) -> Case:
    """Windows behind one instruction, coded against the same tokens behind another. Raises `ValueError` if the layout's
    keys cannot be moved."""
    codec = DonorCodec(codec_by_name("entropy"))
    if profile is not None and "donor" in profile.sections:
        codec = DonorCodec.from_profile(codec_by_name("predictive", profile), profile)
    windows = [ids[: WINDOW // 2] for ids in kv.ids][:MEMBERS]
    starts = [bench.tokenizer(text, verbose=False).input_ids for text in INSTRUCTIONS]
    donor, own = (behind(bench, start, windows) for start in starts)
    target = np.full_like(own.values, 1)
    blocks, targets = (at(own.blocks(values), len(starts[1])) for values in (own.values, target))
    donors = [view for _, view in donor.blocks(donor.values)]
    coder = Members(codec, blocks, donors, len(starts[1]) - len(starts[0]), targets)
    return Case("members/KV", coder, own.values, target)


@torch.inference_mode()
def behind(bench: Bench, start: list[int], windows: list[Any]) -> RealKV:
    """The caches of windows behind the tokens of `start`, without these."""
    found = []
    for ids in windows:
        cache = DynamicCache()  # without a config every layer keeps all tokens
        tokens = torch.tensor([[*start, *ids.tolist()]])
        bench.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found.append((ids, [(x.keys[0, :, len(start) :], x.values[0, :, len(start) :]) for x in cache.layers]))
    layout = whole_layout(bench.model, found[0][1])
    return assemble(found, sum(map(len, windows)) * layout.bytes_per_token, layout)


def at(blocks: Blocks, position: int) -> Blocks:
    """The same blocks, so much further behind."""
    return [(BlockInfo(info.layout, info.tokens, info.start + position), view) for info, view in blocks]


# -- the store ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def stored(bench: Bench, folder: Path, prompts: Any, case: str = "store", config: StoreConfig | None = None) -> bool:
    """Rows of prompts, uint32 `[prompts, tokens]`, in a store with these settings (default ones); whether they came
    back and take no more than the caches do."""
    config = config or StoreConfig()
    identity = ModelIdentity.from_transformers(bench.model, bench.tokenizer)
    digests, raw = [], 0
    with KVStore(folder, identity, config) as store:
        for tokens in prompts:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            layers = cache_layers(bench.model(ids, use_cache=True, logits_to_keep=1).past_key_values)
            raw += sum(tensor.nbytes for pair in layers for tensor in pair)
            digests.append(digest(layers))
            put(store, tokens, layers)
        taken = held(store)[0]
    with KVStore(folder, identity, config) as store:
        same = all(digest_of(store, tokens) == want for tokens, want in zip(prompts, digests, strict=True))
    bench.add(case, "cache_bytes", raw, "bytes")
    bench.add(case, "stored_bytes", taken, "bytes of records and catalog", "cache_bytes", taken / raw)
    bench.add(case, "exact", int(same), "1 = yes")
    return same and taken <= raw


if __name__ == "__main__":
    main()
