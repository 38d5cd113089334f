"""A reader of a soak: opens the store read-only, checks every get against the oracle, closes it, and so on for ever.

python reader.py FOLDER WORLD SEED
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from workers import pid_bytes
from worlds import NAMESPACES, NUMBERS, THREADS, WORLDS, World

from kvstore.errors import KVStoreError


def read(folder: Path, world: World, rng: random.Random) -> tuple[int, int]:
    """(gets, tokens) of one opening."""
    gets = tokens = 0
    with world.open(folder, read_only=True) as store:
        for _ in range(rng.randrange(1, 300)):
            number, namespace = rng.randrange(THREADS * NUMBERS), rng.choice(NAMESPACES)
            asked = world.tokens(number)
            hit = store.get(asked, namespace=namespace)
            gets += 1
            if hit is not None:
                tokens += hit.tokens
                assert world.exact(hit, asked, namespace), f"wrong bytes in {hit.tokens} tokens of sequence {number}"
            if rng.random() < 0.02:
                store.sessions()
    return gets, tokens


def main() -> None:
    folder, name, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    world, rng = next(world for world in WORLDS if world.name == name), random.Random(seed)
    gets = tokens = openings = 0
    while True:
        while not (folder / f"pins-{name}").exists():  # written once the store is made
            time.sleep(0.1)
        try:
            more = read(folder, world, rng)
            gets, tokens, openings = gets + more[0], tokens + more[1], openings + 1
        except (AssertionError, KVStoreError, OSError, ValueError, RuntimeError) as error:
            with (folder / "violations.jsonl").open("a") as file:
                file.write(json.dumps({"world": name, "wrong": f"reader: {error!r}"}) + "\n")
            time.sleep(0.5)
        if openings % 10 == 0:
            row = {"t": time.time(), "who": "reader", "pid": os.getpid(), "world": name, **pid_bytes(os.getpid())}
            row["counts"] = {"gets": gets, "tokens": tokens, "openings": openings}
            with (folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
