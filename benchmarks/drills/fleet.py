"""A fleet on one machine: stores in processes of their own that share a cluster of Valkey, and requests that come to
any of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drills.prompts import IDENTITY, Ids, cache_of, is_right
from benchmarks.peers.servers import Server
from kvstore import Hit, KVStore, RemoteConfig, StoreConfig, TierConfig
from kvstore.config import MIB

BLOCK = 4  # tokens of ours for a block of the trace, whose hashes stand for 512
Request = Sequence[int]  # the hashes of its blocks
_ENDS_S = 60.0


@dataclass
class Counted:
    """present: values that were sent and were there already. dropped: not written there, and counted."""

    tokens: int = 0
    hit: int = 0
    remote: int = 0
    wrong: int = 0
    written: int = 0
    present: int = 0
    dropped: int = 0


@dataclass
class Answer(Counted):
    """What came of one request. flushed: all of it was written there, as the store says."""

    flushed: bool = False


@dataclass
class Replayed(Counted):
    """Sums over all requests. flushed: those that are in the remote tier, as the stores said."""

    seconds: float = 0.0
    flushed: list[Request] = field(default_factory=list)

    def add(self, request: Request, answer: Answer) -> None:
        for count in fields(Counted):
            setattr(self, count.name, getattr(self, count.name) + getattr(answer, count.name))
        if answer.flushed:
            self.flushed.append(request)


def tokens_of(request: Request) -> Ids:
    """`BLOCK` tokens for each hash."""
    hashes = np.array(request, np.uint32)[:, None]
    return (hashes * np.uint32(BLOCK) + np.arange(BLOCK, dtype=np.uint32)).reshape(-1)


def config(url: str | None, deadline_s: float = 5.0) -> StoreConfig:
    """Of a store of the fleet, or of one that has all to itself."""
    remote = None
    if url is not None:
        remote = RemoteConfig(url, deadline_s=deadline_s, upload="put", miss_s=0.0, write_timeout_s=1.0)
    disk = TierConfig((64 if url else 1024) * MIB, "raw")
    return StoreConfig(
        host=TierConfig(MIB, "raw"), disk=disk, block_tokens=BLOCK, threads=1, remote=remote, gate="off", learn="off"
    )


def serve(store: KVStore, request: Request) -> Answer:
    """Get, put what is missing, and write it to the remote tier."""
    tokens, answer = tokens_of(request), Answer()
    hit = store.get(tokens)
    answer.tokens = len(tokens)
    if hit is not None:
        answer.hit, answer.remote = hit.tokens, hit.tiers.get("remote", 0)
        answer.wrong = int(not is_right(hit.layers, tokens))
    before = store.stats()["counters"]
    store.put(tokens, cache_of(tokens))
    due = store.flush(remote=True).remote_due
    after = store.stats()["counters"]
    more = {name: int(value - before.get(name, 0)) for name, value in after.items()}
    answer.written, answer.present = more.get("remote_written_records", 0), more.get("remote_present", 0)
    answer.dropped = sum(value for name, value in more.items() if name.startswith("dropped_"))
    answer.flushed = due == 0 and not answer.dropped and answer.hit < answer.tokens  # else nothing was put
    return answer


class Machine:
    """One store in a process of its own, which serves a request at a time."""

    def __init__(self, folder: Path, settings: StoreConfig) -> None:
        self._start = (folder, settings)
        self.request: Request | None = None
        self.is_second = False  # the request was sent to a process that was killed before
        self._begin()

    def send(self, request: Request) -> None:
        self.request, self.is_second = request, False
        self.answers.send(request)

    def kill(self) -> None:
        """Another process opens its folder then, and serves what this one did not."""
        self._process.kill()
        self._process.join()
        self._begin()
        if self.request is not None:
            self.is_second = True
            self.answers.send(self.request)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.answers.send(None)
        self._process.join(_ENDS_S)
        self._process.kill()
        self._process.join()

    def _begin(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.answers, theirs = fork.Pipe()
        self._process = fork.Process(target=_work, args=(*self._start, theirs), daemon=True)
        self._process.start()
        theirs.close()


def _work(folder: Path, settings: StoreConfig, requests: Connection[Any, Any]) -> None:
    with KVStore(folder, IDENTITY, settings) as store:
        while (request := requests.recv()) is not None:
            requests.send(serve(store, request))


@contextlib.contextmanager
def machines(folder: Path, count: int, settings: StoreConfig) -> Iterator[list[Machine]]:
    made: list[Machine] = []
    try:
        for number in range(count):
            made.append(Machine(folder / f"machine-{number}", settings))
        yield made
    finally:
        for machine in made:
            machine.end()


def replay(fleet: list[Machine], trace: Sequence[Request], seed: int = 0, trouble: Trouble | None = None) -> Replayed:
    """Send every request to a machine that has nothing to do, by chance; return when all are answered."""
    found, chance, left, begin = Replayed(), random.Random(seed), list(reversed(trace)), time.monotonic()
    while left or any(machine.request is not None for machine in fleet):
        idle = [machine for machine in fleet if machine.request is None]
        chance.shuffle(idle)
        for machine in idle[: len(left)]:
            machine.send(left.pop())
        busy = [machine for machine in fleet if machine.request is not None]
        for ready in wait([machine.answers for machine in busy], 0.1):
            machine = next(machine for machine in busy if machine.answers is ready)
            assert machine.request is not None
            answer = machine.answers.recv()
            if machine.is_second:  # it may find what it put itself
                answer.tokens = answer.hit = answer.remote = 0
            found.add(machine.request, answer)
            machine.request = None
        if trouble is not None:
            trouble.go_on(fleet)
    found.seconds = time.monotonic() - begin
    return found


class Trouble:
    """Every `every_s` something happens, by chance: a node is stopped, killed or full until the next time, or the
    process of a store is killed."""

    KINDS = ("stopped", "killed", "filled", "store killed")

    def __init__(self, nodes: list[Server], every_s: float, seed: int) -> None:
        """every_s: how long each lasts."""
        self.counts = dict.fromkeys(self.KINDS, 0)
        self._nodes, self._every_s, self._chance = nodes, every_s, random.Random(seed)
        self._due = time.monotonic() + every_s
        self._kinds: list[str] = []
        self._hurt: tuple[str, Server] | None = None

    def go_on(self, fleet: list[Machine]) -> None:
        """Called often."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every_s
        self.heal()
        if not self._kinds:
            self._kinds = self._chance.sample(self.KINDS, len(self.KINDS))
        kind, node = self._kinds.pop(), self._chance.choice(self._nodes)
        self.counts[kind] += 1
        if kind == "store killed":
            self._chance.choice(fleet).kill()
            return
        self._hurt = kind, node
        if kind == "stopped":
            node.stop()
        elif kind == "killed":
            node.kill()
        else:
            node.ask("CONFIG", "SET", "maxmemory", 1, "maxmemory-policy", "noeviction")

    def heal(self) -> None:
        """All nodes are well again, but may have to find each other."""
        if self._hurt is None:
            return
        (kind, node), self._hurt = self._hurt, None
        if kind == "stopped":
            node.go_on()
        elif kind == "killed":
            node.restart()
        else:
            node.ask("CONFIG", "SET", "maxmemory", "1gb")


def alone(folder: Path, trace: Sequence[Request]) -> Replayed:
    """The same requests, one after the other, to one store that has room for all."""
    found = Replayed()
    with KVStore(folder, IDENTITY, config(None)) as store:
        for request in trace:
            found.add(request, serve(store, request))
    return found


def lost(folder: Path, url: str, flushed: Sequence[Request]) -> tuple[int, int]:
    """(blocks of these requests that a machine which has nothing does not find in the remote tier, wrong hits)"""
    missing = wrong = 0
    with KVStore(folder, IDENTITY, config(url, deadline_s=30.0)) as store:
        for request in flushed:
            tokens = tokens_of(request)
            hit = _got(store, tokens)
            missing += len(request) - (hit.tokens // BLOCK if hit is not None else 0)
            wrong += hit is not None and not is_right(hit.layers, tokens)
    return missing, wrong


def _got(store: KVStore, tokens: Ids) -> Hit | None:
    """A get that is made again as long as not all servers could be asked."""
    end = time.monotonic() + _ENDS_S
    while True:
        there = store.stats()["remote"]
        could = there["opened"] and not there["read_open"]
        hit = store.get(tokens)
        if (hit is not None and hit.tokens == len(tokens)) or time.monotonic() > end:
            return hit
        if could and not store.stats()["remote"]["read_open"]:
            return hit
        time.sleep(0.05)


def node_urls(nodes: Sequence[Server]) -> str:
    return "valkey+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
