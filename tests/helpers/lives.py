"""Scripts of stores that end in the middle of something, and what must be there afterwards.

A script tells of what it does (helpers/teller.py). From whatever it could still tell, `Known` says what must be there,
bit for bit, when the store is opened again, and `check` looks.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import family_stores
import small_stores
from faultfs import FaultFS

from kvstore import KVStore


class Teller(FaultFS):
    """Whoever hears what a script does: it calls this with what begins and what has happened. Its files, too."""

    def __call__(self, kind: bytes, number: int = 0, length: int = 0) -> None:
        """Kinds: o the store is open; p put begins, P it has returned, ! it was pinned; f flush begins, F what was put
        is durable; s, S of sessions, of length 0 where one is deleted; d, D of deletes, D with how many members were
        made to stand alone."""
        raise NotImplementedError


PHASES = ("put", "evict", "flush", "delete", "erase", "recover", "recode")
# What a child was doing, by the last that it told; after anything else it was between two calls.
_DOING = {b"p": "put", b"f": "flush", b"s": "save", b"d": "delete"}
_LENGTHS = (3, 4, 9, 16, 23, 40)
_PINS = 6
# Phase "recode": sequences 10 n to 10 n + 9 are a family, the first of them what the others are coded against.
_FAMILY, _MEMBERS = 10, 4
_CENTROID = 3 * family_stores.BLOCK


@dataclass
class Known:
    """What the dead children acknowledged. durable: sequence -> length that must be there. given: sequence -> the
    longest that may be. deleted: sequences that must be gone. sessions: name -> lengths it may have. flushed: how
    many were durable at some time. recoded: blocks that were made to stand alone. deaths: by what they were doing."""

    durable: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    sessions: dict[int, set[int]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    flushed: int = 0
    recoded: int = 0
    deaths: Counter[str] = field(default_factory=Counter)

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
            elif kind == b"o":  # opened: what the process before did not flush may be gone
                unflushed, unsaved = {}, {}
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
        self.deaths[_DOING.get(acks[-1][0], "between") if acks else "opening"] += 1


def config(phase: str) -> Any:
    if phase == "recode":
        return family_stores.config(disk=1024 * small_stores.SEGMENT)
    disk = 8 * small_stores.SEGMENT if phase == "evict" else 1024 * small_stores.SEGMENT
    return small_stores.config(host=1 << 16, disk=disk, durability="put" if phase == "flush" else "flush")


def work(path: Path, phase: str, rng: random.Random, first: int, tell: Teller, count: int = 900) -> KVStore:
    """Does what the phase is about with `count` sequences or families from number `first` on. The store stays open."""
    if phase == "recode":
        return _work_on_families(path, phase, rng, first, tell, count)

    def flush() -> None:
        tell(b"f")
        store.flush()
        tell(b"F")

    def put(number: int, length: int, pin: bool = False) -> None:
        tell(b"p", number, length)
        small_stores.put(store, small_stores.tokens_of(number, length), pin=pin)
        tell(b"P", number, length)
        if pin:
            tell(b"!", number)
        if phase == "flush":
            tell(b"F")

    store = KVStore(path, small_stores.IDENTITY, config(phase), fs=tell)
    tell(b"o")
    for number in range(first, first + _PINS if phase == "evict" and first == 1 else first):
        put(number, 9, pin=True)
    flush()
    for number in range(first + _PINS, first + _PINS + count):
        put(number, rng.choice(_LENGTHS))
        chance = rng.random()
        older = rng.randrange(first + _PINS, number + 1)
        if chance < 0.15:
            flush()
        elif chance < 0.3:
            put(older, 40)  # a sequence that grows
        elif chance < 0.4:
            small_stores.stored(store, small_stores.tokens_of(older, 40))
        elif chance < 0.6 and phase in ("delete", "erase", "recover"):
            name, length = rng.randrange(5), rng.choice(_LENGTHS if phase == "recover" else (0, *_LENGTHS))
            tell(b"s", name, length)
            _set_session(store, name, length, erase=phase == "erase")
            tell(b"S", name, length)
        elif chance < 0.75 and phase in ("delete", "erase"):
            tell(b"d", older)
            for length in reversed(_LENGTHS):
                store.delete(small_stores.tokens_of(older, length), erase=phase == "erase")
            tell(b"D", older)
    return store


def _set_session(store: KVStore, name: int, length: int, erase: bool) -> None:
    """Saves a session of so many tokens; deletes it where there are none."""
    session, tokens = store.session(f"session {name}"), small_stores.tokens_of(50_000 + name, max(1, length))
    if length:
        session.save(tokens, small_stores.kv_of(tokens))
    else:
        session.delete(blocks=True, erase=erase)


def _work_on_families(path: Path, phase: str, rng: random.Random, first: int, tell: Teller, count: int) -> KVStore:
    """Puts families, and deletes what their members are coded against, which stand alone then."""

    def flush() -> None:
        tell(b"f")
        store.flush()
        tell(b"F")

    store = KVStore(path, family_stores.IDENTITY, config(phase), fs=tell)
    tell(b"o")
    for family in range(first, first + count):
        for number in range(family * _FAMILY, family * _FAMILY + 1 + _MEMBERS):
            tokens = _member(number)
            tell(b"p", number, len(tokens))
            family_stores.put(store, tokens)
            tell(b"P", number, len(tokens))
            if number % _FAMILY == 0 and rng.random() < 0.5:
                flush()
        if rng.random() < 0.8:
            flush()
        gone = family if rng.random() < 0.7 else rng.randrange(first, family + 1)
        number = gone * _FAMILY + (0 if rng.random() < 0.8 else rng.randrange(1, _MEMBERS))
        tell(b"d", number)
        before = family_stores.counter(store, "recoded_members")
        store.delete(_member(number))
        tell(b"D", number, int(family_stores.counter(store, "recoded_members") - before))
    return store


def _member(number: int) -> Any:
    family, role = divmod(number, _FAMILY)
    text = family_stores.passage(family, _CENTROID)
    return family_stores.behind(1_000_000 + number, text, 7 * role) if role else text


def identity(phase: str) -> Any:
    return family_stores.IDENTITY if phase == "recode" else small_stores.IDENTITY


def _tokens(phase: str, number: int) -> Any:
    """A sequence at its longest, and beyond what was ever put of it."""
    return _member(number) if phase == "recode" else small_stores.tokens_of(number, 48)


def _check_families(store: KVStore) -> None:
    family_stores.families_hold(store)
    assert family_stores.counter(store, "lost_members") == 0


def check(path: Path, phase: str, known: Known, last: bool) -> float:
    """Opens the store and holds it against what is known. Returns the seconds that opening took."""
    settings = config(phase)
    begin = time.perf_counter()
    store = KVStore(path, identity(phase), settings)
    seconds = time.perf_counter() - begin
    small_stores.all_is_well(store)
    budget = settings.disk.bytes
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
    if phase == "erase":
        _check_erased(path, known.deleted)
    return seconds


def _check_erased(path: Path, numbers: set[int]) -> None:
    """No file of the store has two tokens in a row of what was erased."""
    contents = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    for number in numbers:
        tokens = small_stores.tokens_of(number, 3)[1:].astype("<u4").tobytes()
        assert not any(tokens in content for content in contents), f"tokens of sequence {number} are still in a file"


def _fill(store: KVStore, path: Path, budget: int) -> None:
    """All the space can still be written, twice over: nothing leaked."""
    dropped = 0
    for number in range(100_000, 100_000 + 2 * budget // (10 * 4096)):
        small_stores.put(store, small_stores.tokens_of(number, 40))
        dropped += store.flush().dropped_blocks
    assert dropped == 0, f"{dropped} blocks found no room"
    assert small_stores.disk_use(path) <= budget
