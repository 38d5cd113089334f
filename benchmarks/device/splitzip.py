"""splitzip on the GPU that holds the cache, against a copy on the device.

bf16, fp16 and fp32 keys and values of one layer, 1 to 512 MiB in one call. Times are of CUDA events, allocations
included; `/graph` is the same encoding replayed from a CUDA graph. GB/s are of raw bytes, 1e9 a second; the ratio to
the device copy compares bytes read and written a second.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB, Rows
from benchmarks.device.machine import Layers, Machine, WrongBits, check, check_bytes, like, nbytes, on_cpu
from kvstore.codecs import BlockInfo, KVView, codec_by_name

CHECKED_MIB = 64  # the CPU codes as much, to compare


def measure(machine: Machine, rows: Rows) -> None:
    published = None if machine.published is None else load_published(machine.published)
    for size in machine.choose((1, 16, 64, 512), (1, 16), (1,)):
        measure_size(machine, rows, size, "bfloat16", published)
    for dtype in ("float16", "float32"):
        measure_size(machine, rows, machine.choose(64, 16, 1), dtype, None)


def measure_size(machine: Machine, rows: Rows, size: int, dtype: str, published: Any) -> None:
    from kvstore.codecs.splitzip.kernels.launch import decode_block, encode_block, plan_block

    token_bytes = 2 * machine.heads * machine.dim * getattr(torch, dtype).itemsize
    tokens = 70 if machine.dry else size * MIB // token_bytes
    layers = machine.cache(1, tokens, dtype)
    raw, plan = nbytes(layers), plan_block(layers)
    buffer, sizes = encode_block(layers, plan)
    coded, out = int(sizes.sum()), like(layers)
    if decode_block(buffer, plan.offsets, tokens, out).any():
        raise WrongBits("splitzip: the kernel refuses what it wrote")
    check(out, layers, "splitzip")
    if size <= CHECKED_MIB:
        check_bytes(buffer[:coded].cpu().numpy().tobytes(), by_cpu(machine, layers, dtype), f"splitzip {dtype}")
    source, target = machine.empty(raw), machine.empty(raw)
    functions: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "encode": lambda: encode_block(layers, plan),
        "encode/graph": machine.graph(lambda: encode_block(layers, plan)),
        "decode": lambda: decode_block(buffer, plan.offsets, tokens, out),
    }
    theirs = 0 if published is None else add_published(functions, published, layers)
    found = machine.interleave({name: machine.on_device(function) for name, function in functions.items()})

    case, copied = f"splitzip/{dtype}/{size}MiB", 2 * raw / found["copy"]
    rows.add(case, "ratio", raw / coded, "x")
    rows.add(case, "copy_GBps", raw / found["copy"] / 1e9, "GB/s")
    for way, name in (("encode", "encode"), ("encode", "encode/graph"), ("decode", "decode")):
        full, share = case + name.removeprefix(way), (raw + coded) / found[name] / copied
        rows.add(full, f"{way}_GBps", raw / found[name] / 1e9, "GB/s", "device copy", share)
        if published is not None and name in ("encode", "decode"):
            other = found[f"published/{name}"]
            rows.add(f"{case}/published", f"{way}_GBps", raw / other / 1e9, "GB/s")
            rows.add(case, f"{way}_against_published", other / found[name], "x", "published", other / found[name])
    if published is not None:
        rows.add(f"{case}/published", "ratio", raw / theirs, "x")
    rows.add(case, "bit_identical", 1, "1 = yes")


def by_cpu(machine: Machine, layers: Layers, dtype: str) -> bytes:
    """What the CPU's codec makes of one layer."""
    codec, layout = codec_by_name("splitzip"), machine.layout(len(layers), dtype)
    info = BlockInfo(layout, np.arange(layers[0][0].shape[1], dtype=np.uint32), 0)
    out = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(layout, on_cpu(layers)), out)
    assert sizes is not None
    return bytes(out[: sum(sizes)])


def load_published(folder: Path) -> Any:
    """The module `codec_gpu` in `folder`, or in a folder below it."""
    path = min(folder.rglob("codec_gpu.py"), key=lambda found: len(found.parts))
    spec = importlib.util.spec_from_file_location("codec_gpu", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"--published: {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["codec_gpu"] = module
    spec.loader.exec_module(module)
    return module


def add_published(functions: dict[str, Callable[[], object]], published: Any, layers: Layers) -> int:
    """Adds the published coder, which codes one tensor a call and is calibrated on these very values; returns the bytes
    that it writes."""
    keys, values = layers[0]
    peer = published.ChunkLocalSplitZipGPU(device="cuda")
    peer.calibrate(torch.stack((keys, values)))
    coded = [peer.encode(tensor) for tensor in layers[0]]
    back = [peer.decode(encoded).view(keys.shape) for encoded in coded]
    check([(back[0], back[1])], layers, "published")
    functions["published/encode"] = lambda: [peer.encode(tensor) for tensor in layers[0]]
    functions["published/decode"] = lambda: [peer.decode(encoded) for encoded in coded]
    return sum(encoded.compressed_bytes for encoded in coded)
