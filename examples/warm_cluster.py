"""Shared prompts are computed by several workers, merged into one store, and found by the server that asks.

    python examples/warm_cluster.py [--model DIR] [--workers 2]

A store has one writer. So each worker warms up a store of its own with its share of the prompts, and exports it as one
file. The files go to the machine that serves (here: stay in the folder), are merged into its store, and every checksum
is compared on the way. The same with the command: `kvstore warmup`, `kvstore export`, `kvstore import` (docs/cli.md).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from smollm2 import load, passages
from stopwatch import Stopwatch

import kvstore
from kvstore import KVStore, ModelIdentity
from kvstore.integrations.transformers import warmup
from kvstore.transfer.copy import Choice
from kvstore.transfer.portable import export_store, import_bundle

SYSTEM = "You answer questions about the manual of a database. Quote the manual where you can.\n\nThe manual says:\n"
QUESTION = "\n\nQuestion: What does this page promise?\nAnswer:"


def prompts(tokenizer: Any, pages: int, characters: int) -> list[list[int]]:
    """What will be asked for: the system prompt with one page each."""
    return [list(tokenizer(SYSTEM + page).input_ids) for page in passages(pages, characters)]


def work(folder: Path, number: int, of: int, model: Any, tokenizer: Any, every: list[list[int]]) -> None:
    """One worker: every `of`-th prompt into a store of its own, and that into one file."""
    mine = every[number::of]
    with KVStore(folder / f"worker-{number}", ModelIdentity.from_transformers(model, tokenizer)) as store:
        report = warmup(store, model, mine)  # a second run of this would skip what is stored
        _, size = export_store(store, str(folder / f"worker-{number}.bundle"), Choice())
    print(
        f"worker {number}: {len(mine)} prompts, {report.computed_tokens} tokens computed in {report.seconds:.1f} s,"
        f" {report.bytes / 2**20:.0f} MiB raw, a file of {size / 2**20:.0f} MiB",
        flush=True,
    )


def serve(folder: Path, workers: int, model: Any, tokenizer: Any, every: list[list[int]]) -> None:
    """The server: merges the files, then answers questions about the pages, and again without the store."""
    for number in range(workers):
        merged = import_bundle(str(folder / f"worker-{number}.bundle"), str(folder / "served"))
        print(f"merged the file of worker {number}: {merged.tokens} tokens, {merged.new_tokens} of them new")
    asked = [torch.tensor([ids + tokenizer(QUESTION).input_ids]) for ids in every]
    with KVStore(folder / "served", ModelIdentity.from_transformers(model, tokenizer)) as store:
        first_token(model, asked[0][:, -8:])  # the libraries are awake
        print("page  prompt tokens  computed  first token  without the store")
        for number, ids in enumerate(asked):
            without = first_token(model, ids)
            with kvstore.attach(model, tokenizer, store):
                seconds = first_token(model, ids)
            report = store.last_request
            assert report is not None
            print(
                f"{number:4}  {report.prompt_tokens:13}  {report.computed_tokens:8}  {seconds:9.2f} s"
                f"  {without:15.2f} s"
            )
        counts = store.inventory()
        print(f"{len(counts.sequences)} sequences are stored; what they begin with in common is stored once")


def first_token(model: Any, ids: torch.Tensor) -> float:
    watch = Stopwatch()
    model.generate(ids, do_sample=False, max_new_tokens=1, streamer=watch)
    return watch.first_token


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a checkpoint; default: the installed SmolLM2")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes, each of which loads the model")
    parser.add_argument("--quick", action="store_true", help="few short pages")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # the number of a worker's process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is None:
        with tempfile.TemporaryDirectory() as folder:
            again = [sys.executable, __file__, *(sys.argv[1:] if arguments is None else arguments), "--folder", folder]
            workers = [subprocess.Popen([*again, "--worker", str(number)]) for number in range(given.workers)]
            if sum(worker.wait() != 0 for worker in workers):  # waits for all of them
                raise SystemExit("a worker failed")
            model, tokenizer = load(given.model)
            every = prompts(tokenizer, *((2, 300) if given.quick else (8, 1500)))
            serve(Path(folder), given.workers, model, tokenizer, every)
        return
    model, tokenizer = load(given.model)
    every = prompts(tokenizer, *((2, 300) if given.quick else (8, 1500)))
    work(given.folder, given.worker, given.workers, model, tokenizer, every)


if __name__ == "__main__":
    main()
