"""`bench`: puts and gets of made-up caches, for a quick look at a machine and its disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, print_json, size, table
from kvstore.config import GIB, StoreConfig, TierConfig
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.errors import ConfigError
from kvstore.tiers.disk.fs import FileSystem, remove_tree


def bench(
    path: Annotated[
        Path, typer.Option(help="Folder on the disk to measure; a store is made in it and removed.")
    ] = Path(),
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a sequence.")] = 2048,
    sequences: Annotated[int, typer.Option(min=1, help="How many sequences.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the made-up model, with 4 heads of 64.")] = 24,
    codec: Annotated[list[str] | None, typer.Option(help="Codec of the disk; may be given again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure put, flush and get with normally distributed bfloat16 values; real caches are coded a little smaller."""
    with told(as_json):
        if not path.is_dir():
            raise ConfigError(f"path: {path} is no folder; name one on the disk that is to be measured")
        layout = KVLayout.uniform(layers, 4, 64)
        caches = _caches(layout, tokens, sequences)
        rows = [_measured(path, layout, caches, name) for name in codec or ("raw", "splitzip", "entropy")]
    if as_json:
        print_json({"tokens": tokens, "sequences": sequences, "bytes_per_token": layout.bytes_per_token, "rows": rows})
        return
    names = ("put", "flush", "host", "disk")
    table(
        ("codec", "ratio", "put returns", "durable", "get from memory", "get from disk"),
        [(row["codec"], row["ratio"], *(f"{size(row[f'{name}_bytes_per_s'])}/s" for name in names)) for row in rows],
    )


def _caches(layout: KVLayout, tokens: int, sequences: int) -> list[tuple[list[int], Any]]:
    import torch

    made = torch.Generator().manual_seed(0)
    found = []
    for number in range(sequences):
        kv = [
            tuple(torch.randn(x.heads, tokens, x.key_dim, generator=made).bfloat16() for _ in range(2))
            for x in layout.layers
        ]
        found.append(([number, *range(tokens - 1)], kv))
    return found


def _measured(path: Path, layout: KVLayout, caches: list[tuple[list[int], Any]], codec: str) -> dict[str, Any]:
    from kvstore.store import KVStore

    folder = str(path / f"kvstore-bench.{os.getpid()}")
    raw = sum(len(tokens) for tokens, _ in caches) * layout.bytes_per_token
    identity = ModelIdentity("bench", "", "", "", layout)
    config = StoreConfig(host=TierConfig(2 * raw + GIB, "splitzip"), disk=TierConfig(2 * raw + GIB, codec))
    seconds: dict[str, float] = {}
    try:
        with KVStore(folder, identity, config) as store:
            seconds["put"] = _timed(lambda: [store.put(tokens, kv) for tokens, kv in caches])
            seconds["flush"] = seconds["put"] + _timed(store.flush)
            _timed(lambda: [store.get(tokens) for tokens, _ in caches])
            seconds["host"] = _timed(lambda: [store.get(tokens) for tokens, _ in caches])
            stored = store.stats()["disk"]["bytes"]
        with KVStore(folder, identity, config) as store:
            seconds["disk"] = _timed(lambda: [store.get(tokens) for tokens, _ in caches])
    finally:
        remove_tree(FileSystem(), folder)
    return {
        "codec": codec,
        "raw_bytes": raw,
        "ratio": round(raw / max(1, stored), 3),
        **{f"{name}_bytes_per_s": raw / max(taken, 1e-9) for name, taken in seconds.items()},
    }


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
