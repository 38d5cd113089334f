"""SIGKILL while a store adopts a profile and codes with it: what was flushed is there without the profile's own file.

Run by helpers/trials.py.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import killed
import lives
import profile_stores
import seeds
import small_stores
from teller import PipeTeller
from trials import in_child

_LENGTHS = (5, 40, 64, 70, 130)
_FIRST_FLUSH = 5  # calls that a child tells of until the first of its flushes has returned, if it flushes each put


def life(seed: int, kills: int) -> dict[str, Any]:
    """Each child adopts one of the profiles, or none, and is killed: in the opening, or while it writes. The last is
    killed after its first flush, so that something is durable."""
    rng, known = random.Random(f"profile/{seeds.nth(seed)}"), lives.Known()
    adopted = 0
    with small_stores.scratch() as folder:
        for which in range(profile_stores.PROFILES):
            profile_stores.save(which, folder)
        for turn in range(kills):
            must = not _adopted(folder / "store")
            given = rng.randrange(profile_stores.PROFILES) if must or rng.random() < 0.7 else None
            adopted += given is not None
            known.take(_killed(folder, given, rng, 1 + 1000 * turn, turn == kills - 1))
            if not (folder / "store" / "store.json").exists():
                continue  # killed before there was a store
            outcome = in_child(lambda: _check(folder, known))
            assert "result" in outcome, f"after kill {turn}: {outcome}"
    return {"kills": kills, "adopted": adopted, "durable": len(known.durable), "deaths": known.deaths}


def _killed(
    folder: Path, given: int | None, rng: random.Random, first: int, late: bool
) -> list[tuple[bytes, int, int]]:
    wanted = 0 if rng.random() < 0.4 else rng.randrange(1, 40)
    wanted = max(wanted, _FIRST_FLUSH) if late else wanted
    child_seed, delay = rng.random(), rng.random() * 0.02
    return killed.child(
        lambda pipe: _work(folder, given, random.Random(child_seed), first, late, PipeTeller(pipe, "put", None)),
        wanted, delay,
    )  # fmt: skip


def _work(folder: Path, given: int | None, rng: random.Random, first: int, flushes: bool, tell: PipeTeller) -> None:
    path = None if given is None else profile_stores.save(given, folder)
    store = profile_stores.open_store(folder / "store", path, fs=tell)
    tell(b"o")
    for number in range(first, first + 900):
        tokens = profile_stores.tokens_of(number, rng.choice(_LENGTHS))
        tell(b"p", number, len(tokens))
        store.put(tokens, profile_stores.kv_of(tokens))
        tell(b"P", number, len(tokens))
        if flushes or rng.random() < 0.3:
            tell(b"f")
            store.flush()
            tell(b"F")
    time.sleep(600)


def _adopted(path: Path) -> bool:
    return any((path / "profiles").glob("*.safetensors"))


def _check(folder: Path, known: lives.Known) -> int:
    """Opens the store, with no profile named where it has one. Returns how many sequences were durable."""
    path = folder / "store"
    with profile_stores.open_store(path, None if _adopted(path) else profile_stores.save(0, folder)) as store:
        small_stores.all_is_well(store, deep=True)
        for number, given in known.given.items():
            there = profile_stores.stored(store, profile_stores.tokens_of(number, given + 3))
            assert there <= given, f"sequence {number}: {there} tokens found, {given} were put"
            wanted = known.durable.get(number, 0)
            assert there >= wanted, f"sequence {number}: {there} tokens found, {wanted} were durable"
        assert store.stats()["counters"].get("quarantined_records", 0) == 0
    return len(known.durable)
