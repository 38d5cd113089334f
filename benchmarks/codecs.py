"""How small do the codecs make keys and values, and how fast? `python -m benchmarks.codecs [--only NAME ...]`

Data: keys and values (bfloat16, also cast to fp16 and e5m2) of real text in windows of 2,048 tokens; and normal numbers
with zeros and with exponents that fit no table. Every codec of the project codes blocks of 64 tokens, all layers, as
the store does (`store-blocks`, `entropy/bf16/KV`); splitzip's kernels also code all K, or all V, in one call at each
level of the CPU, and as `splitzip/bf16/KV` the tensors that the peers code one a call. The peers are those of
`benchmarks/requirements-peers.txt`; one that is not installed is a row `missing`.

`predictive/lossy@BITS/KV`, `aqua/BITSbit/KV` and `tsc/KV` are the lossy codecs on the same blocks; the predictors of
aqua are fitted to a few windows here, for its speed and size do not depend on the fit.

Nothing is timed that does not give back every bit before and after; of a lossy codec, the same numbers every time.
GB/s are of raw bytes, 1e9 a second; outputs are memory that was touched before, the peers' too where their libraries
allow. One thread copies the same bytes between two warm buffers in the same rounds (of a case of two threads, two
threads): the shares are of that. Medians over rounds; one thread unless the case says otherwise. /tiled: windows are
repeated, for their prefill takes more than a minute.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB, Rows, arguments, interleave
from benchmarks.conversations import load_model
from benchmarks.peers.codecs.base import LIBRARIES, codec_peer
from benchmarks.peers.codecs.coders import Coder, Kernels, PeerTensors, StoreBlocks
from benchmarks.peers.codecs.data import RealKV, Values, normal, real_kv
from benchmarks.peers.quality.data import MemoryDump, calibration_text, cut
from benchmarks.profile import profile_of
from kvstore.calibration.aqua.fit import AquaPredictors, fit
from kvstore.codecs import Codec, codec_by_name, codec_names
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.levels import cpu_levels
from kvstore.codecs.profile import Profile
from kvstore.codecs.rans.coder import RansTables, quantise
from kvstore.config import GIB
from kvstore.errors import ProfileError

SLOW = frozenset(("zstd", "pcodec", "blosc2-zstd", "zstandard"))
ZEROS, ESCAPES = (0, 2, 5), (0, 1, 3)  # per cent
CLEAN = "splitzip/normal/zeros0/escapes0"
ZIPNN = "zipnn/bf16/KV"
RANS_TABLES, SYMBOLS = 40, 193
NORMAL_MIB, NORMAL_MIB_QUICK = 64, 16  # of each of the nine
LOSSY_BITS, AQUA_BITS = (0.32, 0.7), (2, 4)
FIT_WINDOWS = 2  # for aqua
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

Pools = Mapping[int, ThreadPoolExecutor | None]


@dataclass(frozen=True)
class Case:
    """data: name of the values. values, target: arrays alike, raw and restored. ours: a codec of this project. exact:
    what is restored is the values."""

    data: str
    coder: Coder
    values: Values
    target: Values
    threads: int = 1
    ours: bool = True
    exact: bool = True


Cases = dict[str, Case]


def main() -> None:
    names = tuple(dict.fromkeys(("splitzip", "predictive", "aqua", "tsc", "rans", *codec_names(), *LIBRARIES)))
    parser = arguments("Ratio and speed of the codecs, and of peers, on the same data.")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="codecs and peers to run (all)")
    parser.add_argument("--mib", type=int, default=64, help="real keys and values, raw (64)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `kvstore calibrate` (default: made in build/)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of the blocks (1 2)")
    args = parser.parse_args()
    rows, only = Rows("codecs", args.json), set(args.only)
    keep_memory()
    model, tokenizer = load_model(args.model, stored=False)
    profile = profile_of(rows, model, tokenizer, args.profile) if "predictive" in only else None
    kv = real_kv(args.mib * MIB, model, tokenizer, args.text)
    predictors = aqua_predictors(model, tokenizer, kv) if "aqua" in only and kv.layout.dtype == "bfloat16" else None
    del model
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    # What takes 20 times as long needs fewer rounds for a steady median. More data, fewer rounds.
    rounds, few = (11, 2) if args.quick else (max(5, 41 * 64 // args.mib), max(3, 7 * 64 // args.mib))
    rounds, few = min(rounds, 41), min(few, 7)
    tiled = "/tiled" if kv.tiled else ""
    with ExitStack() as stack:
        pools = {n: stack.enter_context(ThreadPoolExecutor(n)) if n > 1 else None for n in {1, *args.threads}}
        for part, count in ((only - SLOW, rounds), (only & SLOW, few)):
            cases = bf16(rows, kv, part, sorted(set(args.threads)), pools)
            measure(rows, cases, pools, count, tiled)
        if profile is not None:
            cases = predictive(kv, profile, sorted(set(args.threads)), pools)
            measure(rows, cases, pools, few, tiled)
            all_in(rows, "predictive/lossless/KV" + tiled, cases["predictive/lossless/KV"], profile)
        measure(rows, lossy(kv, profile, predictors, only), pools, few, tiled)
        if "rans" in only:
            entropy_coder(rows, rounds)
        if "splitzip" in only:
            measure(rows, by_level(kv, cpu_levels()[1:]), pools, rounds, tiled)
            measure(rows, by_level(kv, cpu_levels()[:1]), pools, few, tiled)
            size = min(args.mib, NORMAL_MIB_QUICK if args.quick else NORMAL_MIB) * MIB
            measure(rows, robustness(size // 2), pools, rounds)
    rows.main_exit()


def keep_memory() -> None:
    """Has the allocator keep what is freed: a peer that returns its output in new memory gets touched memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(M_TRIM_THRESHOLD, 1024 * MIB)


# -- what is measured --------------------------------------------------------------------------------------------------


def bf16(rows: Rows, kv: RealKV, only: AbstractSet[str], threads: list[int], pools: Pools) -> Cases:
    """Everything that codes all keys and values: the codecs in blocks, splitzip and the peers in tensors."""
    target = np.full_like(kv.values, 1)
    parts, restored = kv.units(kv.values), kv.units(target)
    blocks, targets = kv.blocks(kv.values), kv.blocks(target)
    cases: Cases = {}
    for name in codec_names():
        if name not in only:
            continue
        base = "entropy/bf16/KV" if name == "entropy" else f"{name}/bf16/KV/store-blocks"
        for count in threads:
            coder = StoreBlocks(codec_by_name(name), blocks, targets, pools[count], count)
            cases[base + (f"/{count}threads" if count > 1 else "")] = Case("bf16/KV", coder, kv.values, target, count)
    if "splitzip" in only:
        cases["splitzip/bf16/KV"] = Case("bf16/KV", Kernels(parts, restored, "bfloat16", None), kv.values, target)
    for name in LIBRARIES:
        if name not in only:
            continue
        peer = codec_peer(name)
        if peer is None:
            rows.add(f"{name}/bf16/KV", "missing", 1, "library")
        else:
            cases[f"{name}/bf16/KV"] = Case(
                "bf16/KV", PeerTensors(peer, parts, restored), kv.values, target, ours=False
            )
    return cases


def predictive(kv: RealKV, profile: Profile, threads: list[int], pools: Pools) -> Cases:
    """All keys and values by the profile's predictor, in blocks."""
    target = np.full_like(kv.values, 1)
    blocks, targets, codec = kv.blocks(kv.values), kv.blocks(target), codec_by_name("predictive", profile)
    return {
        "predictive/lossless/KV" + (f"/{count}threads" if count > 1 else ""): Case(
            "bf16/KV", StoreBlocks(codec, blocks, targets, pools[count], count), kv.values, target, count
        )
        for count in threads
    }


def aqua_predictors(model: Any, tokenizer: Any, kv: RealKV) -> AquaPredictors:
    """Fitted to windows of calibration text."""
    text = calibration_text(None, None, FIT_WINDOWS)
    return fit(MemoryDump(model, kv.layout, cut(tokenizer, text, FIT_WINDOWS)), AQUA_BITS[0])


def lossy(
    kv: RealKV, profile: Profile | None, predictors: AquaPredictors | None, only: AbstractSet[str] = frozenset()
) -> Cases:
    """All keys and values by the lossy codecs, in blocks; those of the profile at the rates that it reaches."""
    made: dict[str, Codec] = {}
    if profile is not None and "lossy" in profile.sections:
        for bits in LOSSY_BITS:
            with suppress(ProfileError):
                made[f"predictive/lossy@{bits}/KV"] = codec_by_name(f"predictive@{bits}", profile)
    if predictors is not None:
        made |= {f"aqua/{bits}bit/KV": AquaCodec(predictors, bits) for bits in AQUA_BITS}
    if "tsc" in only:
        made["tsc/KV"] = codec_by_name("tsc")
    target = np.full_like(kv.values, 1)
    blocks, targets = kv.blocks(kv.values), kv.blocks(target)
    return {
        name: Case("bf16/KV", StoreBlocks(codec, blocks, targets, None), kv.values, target, exact=False)
        for name, codec in made.items()
    }


def all_in(rows: Rows, name: str, case: Case, profile: Profile) -> None:
    """Ratios with all that the disk holds of it: records as they are written, and the profile, once in 1 GiB."""
    assert isinstance(case.coder, StoreBlocks)
    raw, stored = case.values.nbytes, case.coder.record_bytes()
    parts = [profile.section(name) for name in ("lossless", "levels") if name in profile.sections]
    section = sum(array.nbytes for part in parts for array in part.values())
    rows.add(name, "ratio_records", raw / stored, "x")
    rows.add(name, "ratio_records_and_profile_per_GiB", raw / (stored + section * raw / GIB), "x")
    rows.add(name, "profile_bytes", section, "bytes")


def entropy_coder(rows: Rows, rounds: int) -> None:
    """rANS alone: a million symbols of 40 normal distributions, a table each, in turns of two."""
    rng = np.random.default_rng(0)
    width = np.exp2(np.arange(RANS_TABLES) / 8)
    symbols = np.arange(SYMBOLS) - SYMBOLS // 2
    counts = np.rint(1e6 * np.exp(-((symbols / width[:, None]) ** 2) / 2)).astype(np.int64)
    tables = RansTables(quantise(counts, 12, floor=True), 12)
    classes = rng.integers(0, RANS_TABLES, 1 << 20).astype(np.uint8)
    values = rng.normal(0, width[classes]).round().clip(-(SYMBOLS // 2), SYMBOLS // 2 - 1) + SYMBOLS // 2
    coded = values.astype(np.uint8)
    out, found = np.empty(tables.bound(len(coded)), np.uint8), np.empty_like(coded)
    size = tables.encode_into(coded, classes, out)
    functions: dict[str, Callable[[], object]] = {}
    for level in cpu_levels():
        functions[f"rans/{level} encode"] = lambda level=level: tables.encode_into(coded, classes, out, level=level)
        functions[f"rans/{level} decode"] = lambda level=level: tables.decode_into(
            out[:size], classes, found, level=level
        )
    for name, seconds in interleave(functions, rounds).items():
        case, way = name.split()
        rows.add(case, f"{way}_symbols_per_s", len(coded) / seconds, "symbols/s")
    if not np.array_equal(found, coded):
        raise SystemExit("rans: what was decoded is not what was encoded")


def by_level(kv: RealKV, levels: Sequence[str]) -> Cases:
    """splitzip's kernels, one call an array."""
    cases: Cases = {}
    for name, dtype, values in (
        ("bf16/K", "bfloat16", kv.part(kv.values, 0)),
        ("bf16/V", "bfloat16", kv.part(kv.values, 1)),
        ("fp16/KV", "float16", kv.cast(torch.float16)),
        ("e5m2/KV", "float8_e5m2", kv.cast(torch.float8_e5m2)),
    ):
        target = np.full_like(values, 1)
        for level in levels:
            cases[f"splitzip/{name}/{level}"] = Case(name, Kernels([values], [target], dtype, level), values, target)
    return cases


def robustness(count: int) -> Cases:
    """splitzip's kernels on `count` normal numbers, at the best level."""
    target = np.full(count, 1, np.uint16)
    return {
        f"splitzip/normal/{name}": Case(f"normal/{name}", Kernels([values], [target], "bfloat16", None), values, target)
        for name, values in normal(count, ZEROS, ESCAPES).items()
    }


# -- how ---------------------------------------------------------------------------------------------------------------


def measure(
    rows: Rows,
    cases: Cases,
    pools: Pools,
    rounds: int,
    suffix: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """All cases and the copies of their values in the same rounds, then their rows. suffix: of every case's name.

    Ends the program with status 1 at the first case that does not give back every bit.
    """
    for name, case in cases.items():
        check(name, case)
    functions: dict[str, Callable[[], object]] = {}
    for name, case in cases.items():
        functions[f"{name} encode"], functions[f"{name} decode"] = case.coder.encode, case.coder.decode
        functions.setdefault(copy_name(case), copier(case, pools[case.threads]))
    seconds = interleave(functions, rounds, clock)
    for name, case in cases.items():
        check(name, case)
        raw, copy = case.values.nbytes, seconds[copy_name(case)]
        rows.add(name + suffix, "ratio", raw / case.coder.coded_bytes(), "x")
        rows.add(name + suffix, "bits_per_value", 8 * case.coder.coded_bytes() / case.values.size, "bits")
        for way in ("encode", "decode"):
            spent = seconds[f"{name} {way}"]
            rows.add(name + suffix, f"{way}_GBps", raw / spent / 1e9, "GB/s")
            rows.add(name + suffix, f"{way}_share_of_memcpy", copy / spent, "share", "memcpy", copy / spent)
            for other, metric in ((ZIPNN, "vs_zipnn"), (CLEAN, "vs_clean")):
                if other in cases and other != name and case.ours and case.threads == 1:
                    times = seconds[f"{other} {way}"] / spent
                    rows.add(name + suffix, f"{way}_{metric}", times, "x", other, times)
    for name, nbytes in {copy_name(case): case.values.nbytes for case in cases.values()}.items():
        if not any(row["case"] == name + suffix for row in rows.rows):  # those of the most rounds come first
            rows.add(name + suffix, "copy_GBps", nbytes / seconds[name] / 1e9, "GB/s")


def copy_name(case: Case) -> str:
    return f"memcpy/{case.data}" + (f"/{case.threads}threads" if case.threads > 1 else "")


def copier(case: Case, pool: ThreadPoolExecutor | None) -> Callable[[], None]:
    """A copy of the values of a case into its target; by as many threads as the case has, a part each."""
    parts = [np.array_split(x, case.threads) for x in (case.target, case.values)]
    if pool is None:
        return lambda: np.copyto(case.target, case.values)

    def copy() -> None:
        list(pool.map(np.copyto, *parts))

    return copy


def check(name: str, case: Case) -> None:
    """The round trip, into a target of which every bit is wrong; of a lossy codec, twice."""
    np.invert(case.values, out=case.target)
    case.coder.restore()
    want = case.values
    if not case.exact:
        want = case.target.copy()
        np.invert(case.values, out=case.target)
        case.coder.restore()
    if not np.array_equal(want, case.target):
        raise SystemExit(f"{name}: what was decoded is not what was encoded")


if __name__ == "__main__":
    main()
