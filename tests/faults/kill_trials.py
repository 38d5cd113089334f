"""SIGKILL at random moments: what a child had been told was durable must be there, bit for bit, when it is reopened.

One trial is a life of one store: several children in a row open it, work, and are killed; after each death the store
is opened and checked against what the dead child had acknowledged through a pipe. Run by helpers/trials.py.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path
from typing import Any

import killed
import lives
import seeds
import small_stores
from teller import ACK, MOMENTS, PipeTeller
from trials import TIMEOUT_S, in_child

from kvstore import KVStore
from kvstore.errors import StoreLocked


def life(seed: int, phase: str, kills: int, moment: int | None = None) -> dict[str, Any]:
    """Kills `kills` children of one store and checks after each. Returns figures; raises where a promise broke.

    moment: which of MOMENTS the first of them dies at; the others, or all, at random ones."""
    rng = random.Random(f"{phase}/{seeds.nth(seed)}")
    known = lives.Known()
    reopen: list[float] = []
    with small_stores.scratch() as folder:
        path = folder / "store"
        for turn in range(kills):
            if phase == "recover" and turn:
                _break_catalog(path)
            at = MOMENTS[phase][moment] if moment is not None and not turn else None
            known.take(_killed_child(path, phase, rng, 1 + 1000 * turn, at))
            if not (path / "store.json").exists():
                continue  # killed before there was a store
            outcome = in_child(lambda last=turn == kills - 1: lives.check(path, phase, known, last))
            if "result" not in outcome:
                raise AssertionError(f"after kill {turn}: {outcome}")
            reopen.append(outcome["result"])
    return {
        "kills": kills,
        "reopen_s": reopen,
        "durable": len(known.durable),
        "flushed": known.flushed,
        "given": len(known.given),
        "recoded": known.recoded,
        "deleted": len(known.deleted),
        "deaths": known.deaths,
    }


def turns(seed: int, kills: int) -> dict[str, Any]:
    """Two processes want to write the same store; one of them is killed, and another one comes, `kills` times."""
    rng = random.Random(f"turns/{seeds.nth(seed)}")
    with small_stores.scratch() as folder:
        path = folder / "store"
        KVStore(path, small_stores.IDENTITY, lives.config("put")).close()
        read, write = os.pipe()
        children = [_turn(path, write, rng.random(), 1 + 10_000 * number) for number in range(2)]
        data = b""
        for number in range(kills):
            wanted = len(data) + rng.randrange(1, 60) * ACK.size
            while len(data) < wanted:
                assert select.select([read], [], [], TIMEOUT_S)[0], "both hang"
                data += os.read(read, 4096)
            which = rng.randrange(2)
            os.kill(children[which], signal.SIGKILL)
            os.waitpid(children[which], 0)
            children[which] = _turn(path, write, rng.random(), 1 + 10_000 * (2 + number))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(write)
        while part := os.read(read, 65536):
            data += part
        os.close(read)
        known = lives.Known()
        known.take(killed.acks(data))
        outcome = in_child(lambda: lives.check(path, "put", known, last=True))
        assert "result" in outcome, outcome
    return {"kills": kills + 2, "durable": len(known.durable), "given": len(known.given)}


def _turn(path: Path, write: int, seed: float, first: int) -> int:
    """A child that writes when it can, and reads when it cannot."""
    pid = os.fork()
    if pid == 0:
        rng, tell = random.Random(seed), PipeTeller(write, "put", None)
        try:
            while True:
                try:
                    store = lives.work(path, "put", rng, first, tell, count=rng.randrange(2, 12))
                    if rng.random() < 0.3:
                        time.sleep(rng.random() * 0.05)
                    store.close()
                    first += 100
                except StoreLocked:
                    _read(path, rng)
        finally:
            os._exit(1)
    return pid


def _read(path: Path, rng: random.Random) -> None:
    with KVStore(path, small_stores.IDENTITY, lives.config("put"), read_only=True) as reader:
        for info in range(8):
            small_stores.stored(reader, small_stores.tokens_of(1 + 10_000 * info + rng.randrange(20), 48))


def _killed_child(
    path: Path, phase: str, rng: random.Random, first: int, moment: tuple[bytes, bytes | str] | None
) -> list[tuple[bytes, int, int]]:
    """Starts a child that works on the store, kills it at a random moment, or lets it die at the given one, and
    returns its acknowledgements."""
    child_seed, wanted, delay = rng.random(), rng.randrange(1, 120), rng.random() * 0.02
    if rng.random() < (0.7 if phase == "recover" else 0.2):
        wanted = 0

    def work(pipe: int) -> None:
        lives.work(path, phase, random.Random(child_seed), first, PipeTeller(pipe, phase, moment))

    return killed.child(work, wanted if moment is None else None, delay)


def _break_catalog(path: Path) -> None:
    """Makes the catalog's structure unreadable, so that opening has to rebuild it."""
    file = path / "catalog" / "data.mdb"
    if file.exists() and file.stat().st_size >= 8192:
        with file.open("r+b") as opened:
            for page in (0, 4096):
                opened.seek(page + 16)
                opened.write(b"\xff\xff\xff\xff")
