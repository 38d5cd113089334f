"""SIGKILL while a store learns, adopts and recodes, and somebody puts: nothing is lost, and no byte is wrong.

Run by helpers/trials.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import killed
import learncases
import seeds
import small_stores
from teller import ACK
from trials import in_child

from kvstore.learning import learner, recode, seen, trial
from kvstore.tiers.disk.fs import FileSystem

_SEQUENCES = 5  # that are there before it learns
_CALLS = 80  # that write, of a store that learns: about so many
_PUTS = 4  # of each child


class _Dying(FileSystem):
    """Kills the process at the `left`-th call that changes a file."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self._count()
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._count()
        super().fdatasync(fd)
        self._count()

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)


def life(seed: int, kills: int) -> dict[str, Any]:
    """Kills so many children of one store, which begins anew when all of it is recoded; looks at it after each."""
    _make_small()
    rng, states, durable = random.Random(f"learn/{seeds.nth(seed)}"), Counter[str](), set[int]()
    with small_stores.scratch() as folder:
        with learncases.open_store(folder / "filled") as store:
            learncases.fill(store, count=_SEQUENCES)
        shutil.copytree(folder / "filled", folder / "store")
        fitted = _fitted(folder / "store")
        for turn in range(kills):
            durable |= _killed(folder / "store", fitted, rng, 1000 + 10 * turn)
            outcome = in_child(lambda known=frozenset(durable): _check(folder / "store", known))
            assert "result" in outcome, f"after kill {turn}: {outcome}"
            states[outcome["result"]] += 1
            if outcome["result"] == "recoded":
                shutil.rmtree(folder / "store")
                shutil.copytree(folder / "filled", folder / "store")
                durable.clear()
    return {"kills": kills, "states": dict(states)}


def _make_small() -> None:
    """Few blocks teach enough here, and every record has a commit of its own."""
    trial.LEAST_TOKENS = learner.MOST_TOKENS = 1024
    recode._GROUP_BYTES = 1


def _fitted(path: Path) -> trial.Trial:
    """What a store that holds this learns, which is the same each time: fitted once, so that kills find all moments."""
    found: list[trial.Trial] = []

    def run(*arguments: Any) -> trial.Trial:
        found.append(trial.run(*arguments))
        raise seen.BlocksGone

    learner.run = run
    with learncases.open_store(path) as store:
        assert store.learn().state == "waiting"
    return found[0]


def _killed(path: Path, fitted: trial.Trial, rng: random.Random, first: int) -> set[int]:
    """The sequences that the child said are durable."""
    fits, by_call = rng.random() < 0.1, rng.random() < 0.7
    learner.run = trial.run if fits else lambda *_: fitted
    at, delay = rng.randrange(1, _CALLS) if by_call else 0, 0.5 * rng.random()
    told = killed.child(lambda pipe: _work(path, at, first, pipe), None if by_call else 1, delay)
    return {number for kind, number, _ in told if kind == b"F"}


def _work(path: Path, at: int, first: int, pipe: int) -> None:
    fs = _Dying(0)
    store = learncases.open_store(path, fs=fs)
    os.write(pipe, ACK.pack(b"o", 0, 0))
    fs.left = at
    learns = threading.Thread(target=store.learn)
    learns.start()
    for number in range(first, first + _PUTS):
        learncases.fill(store, first=number, count=1)
        os.write(pipe, ACK.pack(b"F", number, 0))
    learns.join()
    if at:
        os.kill(os.getpid(), signal.SIGKILL)  # it made fewer calls


def _check(path: Path, durable: frozenset[int]) -> str:
    """What had become of the store."""
    with learncases.open_store(path) as store:
        small_stores.all_is_well(store, deep=True)
        assert learncases.is_whole(store, range(_SEQUENCES))
        assert all(learncases.is_whole(store, range(number, number + 1)) for number in durable)
        counters = store.stats()["counters"]
        assert not {"quarantined_records", "unknown_profile", "damaged_profiles"} & set(counters), counters
        found = set(learncases.codecs_on_disk(store)) - {3}
        return {(7,): "entropy", (2, 7): "some recoded", (2,): "recoded"}[tuple(sorted(found))]
