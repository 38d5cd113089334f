"""What do the codecs make of each dtype that a cache may have, and how fast? `python -m benchmarks.dtypes`

Keys and values of real text: of the model in float32, and cast to float16, float8 E5M2 and E4M3 as they are and (E4M3)
scaled to its range, as engines do; of the model in bfloat16, and the same held as float32 ("upcast"). Every codec codes
blocks of 64 tokens, all layers, as the store does, one thread; nothing is timed that does not give back every bit.

Predictive codes bf16, fp32 and fp16 with the arrays that `calibrate` fits to the model in float32, and each float8, as
it is, with those that it fits to caches of it (`kv_dtype`).

`ideal` is the code length of the entropy codec's symbols where every channel of a block has the best of the 16 shipped
distributions, with the bits that are kept and the byte a channel: what a perfect coder without headers would take.
`refitted` is the same with 16 distributions that were fitted to other channels of the same dtype and text.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.codecs import Case, Cases, keep_memory, measure
from benchmarks.common import MIB, Rows, arguments
from benchmarks.conversations import load_model
from benchmarks.peers.codecs.coders import StoreBlocks
from benchmarks.peers.codecs.data import BLOCK, RealKV, Values, real_kv
from benchmarks.profile import profile_of
from kvstore.codecs import codec_by_name
from kvstore.codecs.entropy import tables
from kvstore.codecs.entropy.reference import FORMS, words_of
from kvstore.codecs.profile import Profile
from kvstore.codecs.words import FLOAT8
from kvstore.core.identity import ModelIdentity
from tools.make_entropy_tables import cluster, frequencies, histograms, symbols_of

CODECS = ("splitzip", "entropy", "zstd", "predictive")
SECTION = "lossless"
WINDOWS = 24  # of calibration
KEPT = {"bfloat16": 5, "float32": 21, "float16": 8, "float8_e5m2": 0, "float8_e4m3fn": 1}
UPCAST = "float32-upcast"
SCALED = "float8_e4m3fn-scaled"
WIDE = "float32"
DTYPES = ("bfloat16", UPCAST, WIDE, "float16", *FLOAT8, SCALED)
SAMPLE = 20_000  # channels of a kind that are fitted to, and as many that are coded
LARGEST = 240.0  # of an E4M3, with room for what the next tokens bring


def main() -> None:
    parser = arguments("Ratio and speed of the codecs for every dtype of a cache.")
    parser.add_argument("--mib", type=int, default=64, help="keys and values in bfloat16 (64)")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="of the model in float32 (default: made in build/; so are those of float8)",
    )
    parser.add_argument("--only", nargs="+", choices=CODECS, default=CODECS, help="codecs to run (all)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="caches to code (all)")
    args = parser.parse_args()
    rows = Rows("dtypes", args.json)
    keep_memory()
    rounds = 5 if args.quick else 15
    model, tokenizer = load_model(args.model, stored=False)
    small = real_kv(args.mib * MIB, model, tokenizer, args.text)
    profiles: dict[str, Profile | None] = {}
    if "predictive" in args.only:
        profiles = {
            dtype: profile_of(rows, model, tokenizer, None, WINDOWS, dtype) for dtype in args.dtypes if dtype in FLOAT8
        }
    model = model.float()
    wide = real_kv(2 * args.mib * MIB, model, tokenizer, args.text)
    if "predictive" in args.only and not set(args.dtypes) <= {*FLOAT8, SCALED}:
        profiles[WIDE] = profile_of(rows, model, tokenizer, args.profile, WINDOWS)
    del model
    for name, kv in caches(small, wide):
        if name not in args.dtypes:
            continue
        profile = None if name == SCALED else profiles.get(name if name in FLOAT8 else WIDE)
        measure(rows, cases(name, kv, args.only, profile), {1: None}, rounds, "/tiled" if kv.tiled else "")
        if name != UPCAST and "entropy" in args.only:
            ideal(rows, name, kv)
    rows.main_exit()


def caches(small: RealKV, wide: RealKV) -> Iterator[tuple[str, RealKV]]:
    """Yields the name and the cache of every dtype, made of those of the model in bfloat16 and in float32."""
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    yield "bfloat16", small
    yield UPCAST, small.to("float32")
    yield "float32", wide
    for dtype in ("float16", "float8_e5m2", "float8_e4m3fn"):
        yield dtype, wide.to(dtype)
    yield SCALED, wide.to("float8_e4m3fn", LARGEST)


def cases(name: str, kv: RealKV, only: Sequence[str], profile: Profile | None) -> Cases:
    """Every codec on the blocks of one cache; predictive on those of the dtypes that it takes."""
    target = np.full_like(kv.values, 1)
    blocks, targets = kv.blocks(kv.values), kv.blocks(target)
    codecs = {codec: codec_by_name(codec) for codec in only if codec != "predictive"}
    if profile is not None:
        facts = profile.identity
        identity = ModelIdentity(facts["model"], facts["revision"], facts["weights"], facts["tokenizer"], kv.layout)
        codecs["predictive"] = codec_by_name("predictive", Profile.new(identity, {SECTION: profile.section(SECTION)}))
    return {
        f"{codec}/{name}/KV": Case(f"{name}/KV", StoreBlocks(made, blocks, targets, None), kv.values, target)
        for codec, made in codecs.items()
    }


def ideal(rows: Rows, name: str, kv: RealKV) -> None:
    """What the symbols of a cache come to, by the shipped distributions and by such that are fitted to it."""
    dtype, rng = kv.layout.dtype, np.random.default_rng(0)
    rest = KEPT[dtype] + 8 / BLOCK
    shipped, fitted = [], []
    for kind in range(2):
        values = channels(kv, kind)
        coded, known = np.split(values[rng.permutation(len(values))[: 2 * SAMPLE]], 2)
        own = np.stack([frequencies(row) for row in cluster(histograms(symbols_of(words_of(known, dtype))), rng)])
        symbols = symbols_of(words_of(coded, dtype))
        shipped.append(code_length(symbols, tables.tables()[0][kind]))
        fitted.append(code_length(symbols, own))
    for metric, found in (("ideal", shipped), ("refitted", fitted)):
        bits = sum(found) / 2 + rest
        rows.add(f"entropy/{name}/KV", f"{metric}_bits_per_value", bits, "bits")
        rows.add(f"entropy/{name}/KV", f"{metric}_ratio", 8 * FORMS[dtype].item / bits, "x")


def channels(kv: RealKV, kind: int) -> Values:
    """Bits of keys (0) or values (1) of whole blocks, `[channels, 64 tokens]`."""
    widths = [dim for x in kv.layout.layers for dim in (x.key_dim, x.value_dim)]
    found, per_window = [], len(widths)
    for number, unit in enumerate(kv.units(kv.values)):
        if number % 2 != kind:
            continue
        tokens, dim = len(kv.ids[number // per_window]), widths[number % per_window]
        blocks = unit.reshape(-1, tokens, dim)[:, : tokens // BLOCK * BLOCK].reshape(-1, BLOCK, dim)
        found.append(blocks.transpose(0, 2, 1).reshape(-1, BLOCK))
    every: Values = np.concatenate(found)
    return every


def code_length(symbols: npt.NDArray[np.int64], freqs: npt.NDArray[np.uint16]) -> float:
    """Bits a value, each channel (a row) with the distribution that is best for it."""
    total = 1 << tables.PROB_BITS
    escape = np.log2(total / freqs[:, tables.ESCAPE :]) + 16
    bits = np.where(freqs > 0, np.log2(total / np.maximum(freqs, 1)), escape)
    bits[:, tables.ESCAPE] = escape[:, 0]
    return float((histograms(symbols) @ bits.T.astype(np.float32)).min(axis=1).sum()) / symbols.size


if __name__ == "__main__":
    main()
