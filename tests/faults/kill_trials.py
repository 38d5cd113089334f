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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import family_stores
import seeds
import small_stores
from teller import ACK, MOMENTS, Teller
from trials import in_child

from kvstore import KVStore

PHASES = ("put", "evict", "flush", "delete", "recover", "recode")
_LENGTHS = (3, 4, 9, 16, 23, 40)
_PINS = 6
# Phase "recode": sequences 10 n to 10 n + 9 are a family, the first of them what the others are coded against.
_FAMILY, _MEMBERS = 10, 4
_CENTROID = 3 * family_stores.BLOCK


@dataclass
class Known:
    """What the dead children acknowledged. durable: sequence -> length that must be there. given: sequence -> the
    longest that may be. deleted: sequences that must be gone. sessions: name -> lengths it may have. flushed: how
    many were durable at some time. recoded: blocks that were made to stand alone. cut: deaths during a delete."""

    durable: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    sessions: dict[int, set[int]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    flushed: int = 0
    recoded: int = 0
    cut: int = 0

    def take(self, acks: list[tuple[bytes, int, int]]) -> None:
        """Applies the acknowledgements of one life."""
        unflushed: dict[int, int] = {}
        unsaved: dict[int, int] = {}
        for kind, number, length in acks:
            if kind == b"p":  # a put begins
                self.given[number] = max(length, self.given.get(number, 0))
                self.deleted.discard(number)
            elif kind == b"P":
                unflushed[number] = max(length, unflushed.get(number, 0))
            elif kind == b"s":  # a save begins
                self.sessions.setdefault(number, {0}).add(length)
            elif kind == b"S":
                unsaved[number] = length
            elif kind == b"!":
                self.pinned.add(number)
            elif kind == b"d":  # a delete begins
                self.durable.pop(number, None)
                unflushed.pop(number, None)
            elif kind == b"D":
                self.deleted.add(number)
                self.recoded += length
            elif kind == b"F":
                self.flushed += len(unflushed)
                for key, value in unflushed.items():
                    self.durable[key] = max(value, self.durable.get(key, 0))
                for key, value in unsaved.items():
                    self.sessions[key] = {value}
                unflushed, unsaved = {}, {}
        self.cut += bool(acks) and acks[-1][0] == b"d"


def life(seed: int, phase: str, kills: int, moment: int | None = None) -> dict[str, Any]:
    """Kills `kills` children of one store and checks after each. Returns figures; raises where a promise broke.

    moment: which of MOMENTS the first of them dies at; the others, or all, at random ones."""
    rng = random.Random(seeds.nth(seed))
    known = Known()
    reopen: list[float] = []
    with small_stores.scratch() as folder:
        path = folder / "store"
        for turn in range(kills):
            if phase == "recover" and turn:
                _break_catalog(path)
            at = MOMENTS[phase][moment] if moment is not None and not turn else None
            acks = _killed_child(path, phase, rng, 1 + 1000 * turn, at)
            known.take(acks)
            if phase == "recover" and not (path / "store.json").exists():
                continue  # killed before there was a store
            outcome = in_child(lambda last=turn == kills - 1: _check(path, phase, known, last))
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
        "cut": known.cut,
    }


def _config(phase: str) -> Any:
    if phase == "recode":
        return family_stores.config(disk=1024 * small_stores.SEGMENT)
    disk = 8 * small_stores.SEGMENT if phase == "evict" else 1024 * small_stores.SEGMENT
    return small_stores.config(host=1 << 16, disk=disk, durability="put" if phase == "flush" else "flush")


def _killed_child(
    path: Path, phase: str, rng: random.Random, first: int, moment: tuple[bytes, bytes | str] | None
) -> list[tuple[bytes, int, int]]:
    """Starts a child that works on the store, kills it at a random moment, or lets it die at the given one, and
    returns its acknowledgements."""
    read, write = os.pipe()
    child_seed, wanted, delay = rng.random(), rng.randrange(1, 120), rng.random() * 0.02
    at_once = phase == "recover" and rng.random() < 0.7
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            work = _work_on_families if phase == "recode" else _work
            work(path, phase, random.Random(child_seed), first, Teller(write, phase, moment))
        finally:
            os._exit(1)
    os.close(write)
    data = b""
    while moment is not None or (not at_once and len(data) < wanted * ACK.size):
        assert select.select([read], [], [], 60.0)[0], "the child hangs"
        part = os.read(read, 4096)
        if not part:
            break
        data += part
    if moment is None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    while part := os.read(read, 65536):
        data += part
    os.close(read)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself, with status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return list(ACK.iter_unpack(data[: len(data) // ACK.size * ACK.size]))


def _work(path: Path, phase: str, rng: random.Random, first: int, tell: Teller) -> None:
    def put(number: int, length: int, pin: bool = False) -> None:
        tell(b"p", number, length)
        small_stores.put(store, small_stores.tokens_of(number, length), pin=pin)
        tell(b"P", number, length)
        if pin:
            tell(b"!", number)
        if phase == "flush":
            tell(b"F")

    store = KVStore(path, small_stores.IDENTITY, _config(phase), fs=tell)
    for number in range(first, first + _PINS if phase == "evict" and first == 1 else first):
        put(number, 9, pin=True)
    store.flush()
    tell(b"F")
    for number in range(first + _PINS, first + 900):
        put(number, rng.choice(_LENGTHS))
        chance = rng.random()
        older = rng.randrange(first + _PINS, number + 1)
        if chance < 0.15:
            store.flush()
            tell(b"F")
        elif chance < 0.3:
            put(older, 40)  # a sequence that grows
        elif chance < 0.4:
            small_stores.stored(store, small_stores.tokens_of(older, 40))
        elif chance < 0.6 and phase in ("delete", "recover"):
            name, length = rng.randrange(5), rng.choice(_LENGTHS)
            tell(b"s", name, length)
            tokens = small_stores.tokens_of(50_000 + name, length)
            store.session(f"session {name}").save(tokens, small_stores.kv_of(tokens))
            tell(b"S", name, length)
        elif chance < 0.75 and phase == "delete":
            tell(b"d", older)
            for length in reversed(_LENGTHS):
                store.delete(small_stores.tokens_of(older, length))
            tell(b"D", older)
    time.sleep(600)


def _work_on_families(path: Path, phase: str, rng: random.Random, first: int, tell: Teller) -> None:
    """Puts families, and deletes what their members are coded against, which stand alone then."""
    store = KVStore(path, family_stores.IDENTITY, _config(phase), fs=tell)
    for family in range(first, first + 900):
        for number in range(family * _FAMILY, family * _FAMILY + 1 + _MEMBERS):
            tokens = _member(number)
            tell(b"p", number, len(tokens))
            family_stores.put(store, tokens)
            tell(b"P", number, len(tokens))
            if number % _FAMILY == 0 and rng.random() < 0.5:
                store.flush()
                tell(b"F")
        if rng.random() < 0.8:
            store.flush()
            tell(b"F")
        gone = family if rng.random() < 0.7 else rng.randrange(first, family + 1)
        number = gone * _FAMILY + (0 if rng.random() < 0.8 else rng.randrange(1, _MEMBERS))
        tell(b"d", number)
        before = family_stores.counter(store, "recoded_members")
        store.delete(_member(number))
        tell(b"D", number, int(family_stores.counter(store, "recoded_members") - before))
    time.sleep(600)


def _member(number: int) -> Any:
    family, role = divmod(number, _FAMILY)
    text = family_stores.passage(family, _CENTROID)
    return family_stores.behind(1_000_000 + number, text, 7 * role) if role else text


def _identity(phase: str) -> Any:
    return family_stores.IDENTITY if phase == "recode" else small_stores.IDENTITY


def _tokens(phase: str, number: int) -> Any:
    """A sequence at its longest, and beyond what was ever put of it."""
    return _member(number) if phase == "recode" else small_stores.tokens_of(number, 48)


def _check_families(store: KVStore) -> None:
    family_stores.families_hold(store)
    assert family_stores.counter(store, "lost_members") == 0


def _check(path: Path, phase: str, known: Known, last: bool) -> float:
    """Opens the store and holds it against what is known. Returns the seconds that opening took."""
    config = _config(phase)
    begin = time.perf_counter()
    store = KVStore(path, _identity(phase), config)
    seconds = time.perf_counter() - begin
    small_stores.all_is_well(store)
    budget = config.disk.bytes + config.segment_bytes
    assert small_stores.disk_use(path) <= budget, f"{small_stores.disk_use(path)} bytes on disk, budget {budget}"
    if phase == "recode":
        _check_families(store)
    stored = family_stores.stored if phase == "recode" else small_stores.stored
    must_be_there = {n: length for n, length in known.durable.items() if phase != "evict" or n in known.pinned}
    for number, given in known.given.items():
        there = stored(store, _tokens(phase, number))
        assert there <= given, f"sequence {number}: {there} tokens found, {given} were put"
        wanted = must_be_there.get(number, 0)
        assert there >= wanted, f"sequence {number}: {there} tokens found, {wanted} were durable"
    for number in known.deleted:
        assert store.contains(_tokens(phase, number)) == 0, f"sequence {number} is there, it was deleted"
    for name, lengths in known.sessions.items():
        tokens = store.session(f"session {name}").tokens
        assert len(tokens) in lengths, f"session {name}: {len(tokens)} tokens, expected one of {sorted(lengths)}"
        assert tokens.tolist() == small_stores.tokens_of(50_000 + name, max(1, len(tokens))).tolist()[: len(tokens)]
    assert store.stats()["counters"].get("quarantined_records", 0) == 0
    if last and phase == "evict":
        _fill(store, path, budget)
    small_stores.all_is_well(store)
    store.close()
    return seconds


def _fill(store: KVStore, path: Path, budget: int) -> None:
    """All the space can still be written, twice over: nothing leaked."""
    dropped = 0
    for number in range(100_000, 100_000 + 2 * budget // (10 * 4096)):
        small_stores.put(store, small_stores.tokens_of(number, 40))
        dropped += store.flush().dropped_blocks
    assert dropped == 0, f"{dropped} blocks found no room"
    assert small_stores.disk_use(path) <= budget


def _break_catalog(path: Path) -> None:
    """Makes the catalog's structure unreadable, so that opening has to rebuild it."""
    file = path / "catalog" / "data.mdb"
    if file.exists() and file.stat().st_size >= 8192:
        with file.open("r+b") as opened:
            for page in (0, 4096):
                opened.seek(page + 16)
                opened.write(b"\xff\xff\xff\xff")
