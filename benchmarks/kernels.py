"""How fast does splitzip code on the GPU that holds the cache? `python -m benchmarks.kernels [--published DIR]`

bf16 keys and values `[8, tokens, 128]` of normal numbers, every channel with its own scale, 1 to 512 MiB in one call.
Times are of CUDA events around a call, allocations included, with an L2 that was filled with other bytes; `/graph` is
the same encoding replayed from a CUDA graph, without the launches' cost. Medians over rounds in which a copy on the
device of the same raw bytes takes its turn. GB/s are of raw bytes, 1e9 a second; `share_of_copy` compares bytes read
and written a second with the copy's. Nothing is timed that does not give back every bit.

--published DIR: a clone of the published implementation of SplitZip, whose `codec_gpu.py` is timed in the same rounds
on the same values, calibrated on them (it codes one tensor a call, so K and V take two).

`demotion`: 1 GiB, 32 layers, from the device to pinned host memory and back, against copies of the raw bytes between
the same places; wall-clock time. Without a CUDA device there is one row, `no_gpu`.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import MIB, Rows, arguments, interleave

HEADS, DIM = 8, 128
TOKEN_BYTES = 2 * 2 * HEADS * DIM  # a token's keys and values of one layer
SIZES, SIZES_QUICK = (1, 16, 64, 512), (1, 16)
L2_BYTES = 256 * MIB  # more than any L2
DEMOTION_LAYERS, DEMOTION_MIB, DEMOTION_MIB_QUICK = 32, 1024, 128

Layers = list[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    parser = arguments("splitzip on a GPU.")
    parser.add_argument("--published", type=Path, metavar="DIR", help="clone of the published implementation")
    args = parser.parse_args()
    rows = Rows("kernels", args.json)
    if not torch.cuda.is_available():
        rows.add("splitzip/bf16/gpu", "no_gpu", 1, "devices missing")
        rows.main_exit()
    published = None if args.published is None else load_published(args.published)
    repeats = 10 if args.quick else 30
    for size in SIZES_QUICK if args.quick else SIZES:
        measure(rows, size, repeats, published)
    demotion(rows, DEMOTION_MIB_QUICK if args.quick else DEMOTION_MIB, 5)
    rows.main_exit()


def load_published(folder: Path) -> Any:
    """The module `codec_gpu` in `folder`, or in a folder below it."""
    path = min(folder.rglob("codec_gpu.py"), key=lambda found: len(found.parts))
    spec = importlib.util.spec_from_file_location("codec_gpu", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--published: {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["codec_gpu"] = module
    spec.loader.exec_module(module)
    return module


def cache(layers: int, tokens: int) -> Layers:
    generator = torch.Generator("cuda").manual_seed(0)

    def tensor() -> torch.Tensor:
        scale = torch.randn(DIM, device="cuda", generator=generator).exp()
        values = torch.randn(HEADS, tokens, DIM, device="cuda", generator=generator)
        return (values * scale).bfloat16()

    return [(tensor(), tensor()) for _ in range(layers)]


def like(layers: Layers) -> Layers:
    return [(torch.empty_like(k), torch.empty_like(v)) for k, v in layers]


def check(found: Layers, expected: Layers, what: str) -> None:
    """Raises `SystemExit` unless all bits are equal."""
    for pair, other in zip(found, expected, strict=True):
        for a, b in zip(pair, other, strict=True):
            if not torch.equal(a.reshape(-1).view(torch.int16), b.reshape(-1).view(torch.int16)):
                raise SystemExit(f"{what}: the values that came back are not those that went in")


def timed(function: Callable[[], object], filler: torch.Tensor) -> Callable[[], float]:
    """Seconds on the device, from an L2 that holds nothing of `function`'s."""

    def once() -> float:
        filler.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = function()
        end.record()
        end.synchronize()
        del kept
        return float(begin.elapsed_time(end)) / 1e3

    for _ in range(3):
        once()  # compiles, and fills the allocator's pools
    return once


def measure(rows: Rows, size: int, repeats: int, published: Any) -> None:
    from kvstore.codecs.splitzip.kernels.launch import decode_block, encode_block, plan_block

    tokens = size * MIB // TOKEN_BYTES
    layers, raw = cache(1, tokens), size * MIB
    plan = plan_block(layers)
    buffer, sizes = encode_block(layers, plan)
    coded = int(sizes.sum())
    out = like(layers)
    if decode_block(buffer, plan.offsets, tokens, out).any():
        raise SystemExit("the kernel refuses what it wrote")
    check(out, layers, "splitzip")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode_block(layers, plan)
    source, target = torch.empty(2, raw, dtype=torch.uint8, device="cuda")
    functions: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "encode": lambda: encode_block(layers, plan),
        "encode/graph": graph.replay,
        "decode": lambda: decode_block(buffer, plan.offsets, tokens, out),
    }
    if published is not None:
        keys, values = layers[0]
        peer = published.ChunkLocalSplitZipGPU(device="cuda")
        peer.calibrate(torch.stack((keys, values)))
        theirs = [peer.encode(tensor) for tensor in layers[0]]
        back = [peer.decode(encoded).view(keys.shape) for encoded in theirs]
        check([(back[0], back[1])], layers, "published")
        functions["published/encode"] = lambda: [peer.encode(tensor) for tensor in layers[0]]
        functions["published/decode"] = lambda: [peer.decode(encoded) for encoded in theirs]
    filler = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    found = interleave({name: timed(function, filler) for name, function in functions.items()}, repeats)

    case = f"splitzip/bf16/gpu/{size}MiB"
    rows.add(case, "ratio", raw / coded, "x")
    rows.add(case, "copy_GBps", raw / found["copy"] / 1e9, "GB/s")
    for way, name in (("encode", "encode"), ("encode", "encode/graph"), ("decode", "decode")):
        full = case + name.removeprefix(way)
        # A peer reads and writes what it must; the same tensors in the same rounds.
        against = found.get(f"published/{name}")
        ratio = None if against is None else against / found[name]
        rows.add(full, f"{way}_GBps", raw / found[name] / 1e9, "GB/s", None if ratio is None else "published", ratio)
        share = (raw + coded) / found[name] / (2 * raw / found["copy"])
        rows.add(full, f"{way}_share_of_copy", share, "share")
    if published is not None:
        rows.add(f"{case}/published", "ratio", raw / sum(encoded.compressed_bytes for encoded in theirs), "x")
        for way in ("encode", "decode"):
            rows.add(f"{case}/published", f"{way}_GBps", raw / found[f"published/{way}"] / 1e9, "GB/s")


def demotion(rows: Rows, size: int, repeats: int) -> None:
    from kvstore.codecs.splitzip.kernels.launch import decode_block, encode_block, plan_block
    from kvstore.codecs.splitzip.kernels.transfer import to_host

    raw = size * MIB
    tokens = raw // TOKEN_BYTES // DEMOTION_LAYERS
    layers = cache(DEMOTION_LAYERS, tokens)
    out = like(layers)
    plan = plan_block(layers)
    device_bytes = torch.empty(plan.offsets[-1], dtype=torch.uint8, device="cuda")
    flat = torch.empty(raw, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(raw, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    coded = to_host(*encode_block(layers, plan), plan, stream).wait()

    def clock(function: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            kept = function()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            del kept
            return seconds

        for _ in range(2):
            once()
        return once

    def promote() -> torch.Tensor:
        for begin, layer in zip(plan.offsets, coded, strict=False):
            device_bytes[begin : begin + layer.numel()].copy_(layer, non_blocking=True)
        return decode_block(device_bytes, plan.offsets, tokens, out)

    functions = {
        "demote": clock(lambda: to_host(*encode_block(layers, plan), plan, stream).wait()),
        "promote": clock(promote),
        "raw/demote": clock(lambda: pinned.copy_(flat, non_blocking=True)),
        "raw/promote": clock(lambda: flat.copy_(pinned, non_blocking=True)),
    }
    if promote().any():
        raise SystemExit("demotion: the kernel refuses what it wrote")
    check(out, layers, "demotion")
    found = interleave(functions, repeats)
    case = f"demotion/bf16/gpu/{size}MiB"
    for way in ("demote", "promote"):
        other = found[f"raw/{way}"]
        rows.add(case, f"{way}_GBps", raw / found[way] / 1e9, "GB/s", "pinned copy", other / found[way])
        rows.add(f"{case}/raw", f"{way}_GBps", raw / other / 1e9, "GB/s")


if __name__ == "__main__":
    main()
