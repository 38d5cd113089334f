"""LMCache's L2 storage: our plugin and its own fs_native, driven as LMCache drives them, with chunks of a real cache.

`build/lmcache/bin/python -m benchmarks.lmcache_l2 [--chunks 8]`, in the environment of `make test-lmcache`. Chunks of
256 tokens, `[2, layers, tokens, heads * dim]` in bf16, of held-out conversations. Each adapter stores all of them in
one task and is synced; then the page cache is dropped, another adapter on the same folder loads them, and every byte is
compared. A store of ours is durable when the time is taken (`close`), and so are the others' files (`sync`).
"""

from __future__ import annotations

import os
import select
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import load_model, measured_text

TOKENS = 256
ROUNDS = 3


def main() -> None:
    parser = arguments("LMCache's L2 storage: our plugin against fs_native.")
    parser.add_argument("--chunks", type=int, default=8, metavar="N", help=f"of {TOKENS} tokens (8)")
    parser.add_argument("--dir", type=Path, help="where objects are kept (default: build/scratch)")
    args = parser.parse_args()
    rows, chunks = Rows("lmcache_l2", args.json), chunks_of(args.model, args.text, args.chunks)
    size = sum(chunk.numel() * chunk.element_size() for chunk in chunks)
    with scratch("lmcache", args.dir) as base:
        folders = {name: base / name for name in ("kvstore", "fs_native")}
        loads: dict[str, list[float]] = {name: [] for name in folders}
        equal: list[bool] = []

        def store(name: str) -> float:
            shutil.rmtree(folders[name], ignore_errors=True)
            adapter = adapter_of(name, folders[name])
            begin = time.perf_counter()
            done(adapter, "store", chunks)
            adapter.close()
            os.sync()
            seconds = time.perf_counter() - begin
            drop_page_cache(folders[name])
            adapter, targets = adapter_of(name, folders[name]), [torch.zeros_like(chunk) for chunk in chunks]
            begin = time.perf_counter()
            found = done(adapter, "load", targets)
            loads[name].append(time.perf_counter() - begin)
            adapter.close()
            equal.append(found == len(chunks) and all(map(torch.equal, targets, chunks)))
            return seconds

        stores = interleave({name: lambda name=name: store(name) for name in folders}, 2 if args.quick else ROUNDS)
        fastest = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in loads.items()}
        for what, taken in (("stores", stores), ("loads", fastest)):
            ours, theirs = (size / taken[name] / 1e9 for name in folders)
            rows.add(what, "rate", ours, "GB/s of objects", "fs_native", ours / theirs)
            rows.add(f"{what}/fs_native", "rate", theirs, "GB/s of objects")
        kept = {name: sum(x.stat().st_blocks * 512 for x in folder.rglob("*")) for name, folder in folders.items()}
        used = usage(folders["kvstore"])
        rows.add("kept", "bytes", used / size, "of the objects' bytes", "fs_native", used / kept["fs_native"])
    rows.add("kept", "bit_identical", int(all(equal)), "1 = yes")
    rows.main_exit(all(equal))


def chunks_of(folder: Path | None, text: Path | None, count: int) -> list[torch.Tensor]:
    """`count` chunks `[2, layers, 256, heads * dim]` of a cache."""
    model, tokenizer = load_model(folder)
    ids = tokenizer(measured_text(text, 8 * TOKENS * count), return_tensors="pt", verbose=False).input_ids
    with torch.inference_mode():
        layers = model(ids[:, : TOKENS * count], use_cache=True, logits_to_keep=1).past_key_values.layers
    flat = [torch.stack([x[0].transpose(0, 1).flatten(1) for x in (y.keys, y.values)]) for y in layers]
    whole = torch.stack(flat, 1)
    return [part.contiguous() for part in whole.split(TOKENS, dim=2)][:count]


def adapter_of(name: str, folder: Path) -> Any:
    """A new adapter, as LMCache's registry makes it."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    folder.mkdir(parents=True, exist_ok=True)
    spec: dict[str, Any] = {"type": name, "base_path": str(folder)}
    if name == "kvstore":
        spec = {"type": "plugin", "module_path": "kvstore.integrations.lmcache.adapter"}
        spec |= {"class_name": "KVStoreL2Adapter", "adapter_params": {"path": str(folder)}}
    return create_l2_adapter(get_l2_adapter_config_class(spec["type"]).from_dict(spec))


def done(adapter: Any, what: str, tensors: list[torch.Tensor]) -> int:
    """Store or load all tensors in one task, and return how many were."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

    keys = [ObjectKey(number.to_bytes(32, "big"), "model", 0) for number in range(len(tensors))]
    things = []
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        metadata = MemoryObjMetadata(tensor.shape, tensor.dtype, tensor.data_ptr(), nbytes, 1)
        things.append(TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None))
    task = getattr(adapter, f"submit_{what}_task")(keys, things)
    descriptor = getattr(adapter, f"get_{what}_event_fd")()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        poll.poll(60_000)
        consume_fd(descriptor)
        result = adapter.pop_completed_store_tasks().get(task) if what == "store" else adapter.query_load_result(task)
        if result is not None:
            return len(tensors) * int(result.is_successful()) if what == "store" else int(result.popcount())


def usage(folder: Path) -> int:
    """Bytes that our records take."""
    adapter = adapter_of("kvstore", folder)
    try:
        return int(adapter.get_usage().total_bytes_used)
    finally:
        adapter.close()


if __name__ == "__main__":
    main()
