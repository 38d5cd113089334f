"""How soon the first token comes on a machine that has nothing: prefix from a Valkey server, against recomputing it.

`python -m benchmarks.remote_resume [--lengths 512 2048 8000] [--codec auto]`. One store puts prefixes of held-out
conversations and sends every block to a server on this machine, over loopback. Resume: a store in an empty folder that
knows of nothing but that server is opened; `get`, then a forward pass of one more token, all of it in the time.
Recompute: a forward pass of the whole prompt.

Every restored cache is compared bit for bit with the one that was put; a difference ends the run with status 1.
"""

from __future__ import annotations

import gc
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows, interleave, scratch
from benchmarks.conversations import load_model
from benchmarks.peers.servers import valkey
from benchmarks.resume import LONG, add_times, first_token, measured_ids, resume_arguments, same
from kvstore import KVStore, ModelIdentity, RemoteConfig, StoreConfig, TierConfig
from kvstore.config import GIB

DEADLINE_S = 10.0  # of a get: longer than any takes, so that all of the prefix comes


def main() -> None:
    parser = resume_arguments("Time to the first token: prefix from a remote tier against recompute.")
    parser.add_argument("--codec", default="auto", help="codec of the disk, and so of the remote tier (auto)")
    args = parser.parse_args()
    rows = Rows("remote_resume", args.json)
    model, tokenizer = load_model(args.model)
    identity = ModelIdentity.from_transformers(model, tokenizer)
    lengths, ids = measured_ids(args, tokenizer, 1)
    first_token(model, ids[:, :64], None, 0)  # the libraries' own warm-up is nobody's first token
    ok = True
    with scratch("remote", args.dir) as folder:
        for length in lengths:
            with valkey() as server:
                url = f"valkey://127.0.0.1:{server.port}"
                remote = RemoteConfig(url, upload="put", deadline_s=DEADLINE_S, flush_timeout_s=60.0)
                config = StoreConfig(disk=TierConfig(8 * GIB, args.codec), remote=remote, learn="off")
                path = folder / str(length)
                ok &= measure(rows, path, identity, config, model, ids[:, : length + 1], args.quick)
    rows.main_exit(ok)


def measure(
    rows: Rows, path: Path, identity: ModelIdentity, config: StoreConfig, model: Any, prompt: Any, quick: bool
) -> bool:
    """Rows of one length; whether every restored cache was the one that was put."""
    length = prompt.shape[1] - 1
    tokens = prompt[0, :length].numpy()
    with torch.inference_mode():
        cache = model(prompt[:, :length], use_cache=True, logits_to_keep=1).past_key_values
    with KVStore(path / "first", identity, config) as store:
        store.put(tokens, cache)
        if store.flush(remote=True).remote_due:
            raise RuntimeError("not everything reached the server")
    want = [(layer.keys, layer.values) for layer in cache.layers]
    whole = length // config.block_tokens * config.block_tokens
    equal: list[bool] = []
    restored: list[float] = []
    machines = count()

    def resume() -> float:
        gc.collect()
        begin = time.perf_counter()
        with KVStore(path / f"machine-{next(machines)}", identity, config) as store:
            before = time.perf_counter()
            hit = store.get(tokens)
            restored.append(time.perf_counter() - before)
            first_token(model, prompt, None if hit is None else hit.cache(), 0 if hit is None else hit.tokens)
            seconds = time.perf_counter() - begin
            held = [(k[:, :whole], v[:, :whole]) for k, v in ((k[0], v[0]) for k, v in want)]
            equal.append(hit is not None and hit.tokens == whole and same(_heads(hit.layers), held))
        return seconds

    def recompute() -> None:
        first_token(model, prompt, None, 0)

    rounds = 2 if quick else 3 if length >= LONG else 5
    functions = {"resume": lambda: statistics.median(resume() for _ in range(3)), "recompute": recompute}
    medians = interleave(functions, rounds)
    case = add_times(rows, length, medians, restored)
    rows.add(case, "bit_identical", int(all(equal)), "1 = yes")
    return all(equal)


def _heads(layers: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(k[0], v[0]) for k, v in layers]


if __name__ == "__main__":
    main()
