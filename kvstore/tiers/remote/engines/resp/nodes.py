"""The nodes of a cluster, and which of them has what."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstore.errors import RemoteError, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.address import Address, Dialer
from kvstore.tiers.remote.engines.resp.connection import Login
from kvstore.tiers.remote.engines.resp.node import Node
from kvstore.tiers.remote.engines.resp.pool import Pool
from kvstore.tiers.remote.engines.resp.slots import SlotMap
from kvstore.tiers.remote.engines.threads import Threads

T = TypeVar("T")
_THREADS = 8  # of each node: one that hangs holds its own alone
_ASKED = 4  # nodes that are asked for the slots at once; the first answer counts
_REFRESH_S = 1.0  # the slots are not asked for more often
_REFRESH_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Member:
    """A node, and the threads that wait for it."""

    node: Node
    threads: Threads


class Nodes:
    """Who is in a cluster. Thread-safe.

    Args:
        seeds: nodes to ask first; one that answers is enough.
        dialer, login, connections: as for one server; connections are of each node.
    """

    def __init__(self, seeds: Sequence[Address], dialer: Dialer, login: Login, connections: int) -> None:
        self._seeds = list(seeds)
        self._dialer = dialer
        self._login = login
        self._connections = connections
        self._lock = threading.Lock()
        self._members: dict[Address, Member] = {}  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._next_refresh = 0.0  # guarded by _lock
        self._refresher = Threads("kvstore-cluster", most=1)
        self.slots = SlotMap()  # replaced as a whole
        self.refreshes = 0

    def member(self, address: Address) -> Member:
        """Return the node at an address; it is not asked anything. Raises `RemoteUnavailable` after `close`."""
        with self._lock:
            if self._closed:
                raise RemoteUnavailable("the connections to the cluster were closed")
            if address not in self._members:
                pool = Pool(self._dialer, address, self._login, self._connections)
                self._members[address] = Member(Node(pool), Threads(f"kvstore-{address}", _THREADS))
            return self._members[address]

    def of(self, key: str, deadline: Deadline) -> Member:
        """Return the node of a key. Asks for the slots if they are not known."""
        if not self.slots.nodes():
            self._load(deadline)
        owner = self.slots.owner(key)
        if owner is None:
            self.refresh_soon()
            raise RemoteUnavailable(f"no node of the cluster has the slot of {key}")
        return self.member(owner)

    def all(self, deadline: Deadline) -> list[Member]:
        """Return every node that has slots. Asks for the slots if they are not known."""
        if not self.slots.nodes():
            self._load(deadline)
        return [self.member(address) for address in self.slots.nodes()]

    def refresh_soon(self) -> None:
        """Ask for the slots anew, in a thread, and not more often than once a second."""
        with self._lock:
            if self._closed or time.monotonic() < self._next_refresh:
                return
            self._next_refresh = time.monotonic() + _REFRESH_S
        self._refresher.submit(lambda: self._load(Deadline(_REFRESH_TIMEOUT_S)))

    def close(self) -> None:
        """Close all connections and end the threads."""
        with self._lock:
            self._closed = True
            members = list(self._members.values())
        for member in members:
            member.node.pool.close()
            member.threads.close()
        self._refresher.close()
        self._dialer.close()

    def opened(self) -> int:
        """Return how many connections were opened to nodes that are known."""
        with self._lock:
            return sum(member.node.pool.opened for member in self._members.values())

    def _load(self, deadline: Deadline) -> None:
        known = self.slots.nodes()
        asked = list(dict.fromkeys([*random.sample(known, min(_ASKED, len(known))), *self._seeds[:_ASKED]]))
        waiting = {self._ask(address, deadline) for address in asked}
        error: RemoteError = RemoteUnavailable("no node of the cluster answered")
        while waiting:
            done, waiting = wait(waiting, timeout=deadline.left_s(), return_when=FIRST_COMPLETED)
            if not done:
                raise deadline.passed()
            for future in done:
                try:
                    slots = future.result()
                except RemoteError as caught:
                    error = caught
                else:
                    if slots.nodes():
                        self.slots = slots
                        self.refreshes += 1
                        return
                    error = RemoteUnavailable("no node of the cluster has any slots")
        raise error

    def _ask(self, address: Address, deadline: Deadline) -> Future[SlotMap]:
        member = self.member(address)
        return member.threads.submit(
            lambda: SlotMap.parse(member.node.ask(["CLUSTER", "SLOTS"], deadline), asked=address)
        )


def together(works: Sequence[tuple[Member, Callable[[], T]]], deadline: Deadline) -> list[T | RemoteError]:
    """Do one work for each node, at once; return each result, or the error that it met."""
    if len(works) == 1:
        return [_outcome(works[0][1])]
    futures = [member.threads.submit(work) for member, work in works]
    return [_outcome(partial(deadline.wait, future)) for future in futures]


def _outcome(work: Callable[[], T]) -> T | RemoteError:
    try:
        return work()
    except RemoteError as error:
        return error
