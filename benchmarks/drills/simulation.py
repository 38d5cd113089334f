"""A fleet on paper: which machine a request goes to, what it finds there, and what a shared remote tier has to carry.

Nothing is measured here. `Assumed` has every number that is put in, with where it is from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

Call = tuple[float, list[int]]  # a request: seconds since the first, the hashes of its blocks


@dataclass(frozen=True)
class Assumed:
    """What the simulation takes for granted.

    Attributes:
        block_tokens: of a block of the trace, as Mooncake's are.
        bytes_per_token: raw; Llama 3.1 70B: 80 layers, 8 heads of 128 for keys and for values, two bytes each.
        smaller: raw bytes / stored bytes, of the default codec on held-out conversations.
        flops: that a machine computes a second: eight H100, half of 989e12 each.
        parameters, layers, width: of the model.
        network: bytes a second between a machine and the remote tier, 100 Gbit/s; rtt_s: of one call.
        disk: bytes a second that a machine reads of its own store; capacity: bytes of that.
        remote_s: the remote tier keeps a block so long after its last use.
        per_copy: machines that share one copy of the trace. Larger fleets serve more copies, which share no block.
        most_copies: copies that are simulated; the rest of the fleet is like them.
        node, node_bytes: bytes a second that a node of the remote tier serves, and bytes that it holds.
    """

    block_tokens: int = 512
    bytes_per_token: int = 327_680
    smaller: float = 1.55
    flops: float = 8 * 989e12 * 0.5
    parameters: float = 70.6e9
    layers: int = 80
    width: int = 8192
    network: float = 12.5e9
    rtt_s: float = 1e-3
    disk: float = 12.5e9
    capacity: float = 2e12
    remote_s: float = 900.0
    per_copy: int = 10
    most_copies: int = 2
    node: float = 5e9
    node_bytes: float = 512e9

    @property
    def block_bytes(self) -> float:
        """Of a stored block."""
        return self.block_tokens * self.bytes_per_token / self.smaller

    def compute_s(self, known: int, blocks: int) -> float:
        """Seconds to compute a prompt of so many blocks of which the first are known."""
        begin, end = known * self.block_tokens, blocks * self.block_tokens
        attention = 2 * self.layers * self.width * (end * end - begin * begin)
        return (2 * self.parameters * (end - begin) + attention) / self.flops

    def load_s(self, here: int, there: int) -> float:
        """Seconds to load blocks of this machine's store, and blocks of the remote tier."""
        far = self.rtt_s + there * self.block_bytes / self.network if there else 0.0
        return here * self.block_bytes / self.disk + far


@dataclass
class Outcome:
    """Sums over the simulated requests: blocks, and seconds.

    stored: blocks in the remote tier at the end. ttft: of each request; backlogs: what a machine that was picked by
    chance still had to do when it came.
    """

    blocks: int = 0
    local: int = 0
    remote: int = 0
    written: int = 0
    stored: int = 0
    seconds: float = 0.0
    copies: int = 1
    backlogs: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)


class Simulation:
    """One fleet of `machines` and one routing, "locality" or "chance".

    A machine keeps a block for `life_s` after its last use there: as long as a store of its size that gives up the
    least recently used keeps it (Che's approximation). backlogs: where the fleet is too large to be simulated whole,
    what a machine still has to do is drawn from these.
    """

    def __init__(
        self,
        assumed: Assumed,
        machines: int,
        routing: str,
        has_remote: bool,
        life_s: float,
        backlogs: Sequence[float] | None,
        seed: int = 0,
    ) -> None:
        self._assumed, self._machines, self._routing, self._has_remote = assumed, machines, routing, has_remote
        self._life_s, self._backlogs, self._chance = life_s, backlogs, random.Random(seed)
        self._here: dict[int, dict[int, float]] = {}  # block -> machine -> when it was used there last
        self._there: dict[int, float] = {}  # block -> when it was used last, in the remote tier
        self._free_at: dict[int, float] = {}

    def run(self, trace: Sequence[Call]) -> Outcome:
        """As many copies of the trace as the fleet serves, all at the same time."""
        assumed = self._assumed
        copies = min(max(1, self._machines // assumed.per_copy), assumed.most_copies)
        found = Outcome(seconds=trace[-1][0], copies=copies)
        step = 1 + max(max(blocks) for _, blocks in trace)
        for now, blocks in trace:
            for copy in range(copies):
                self._serve(now, [block + copy * step for block in blocks], found)
        since = found.seconds - assumed.remote_s
        found.stored = sum(used >= since for used in self._there.values())
        return found

    def _serve(self, now: float, blocks: list[int], found: Outcome) -> None:
        assumed = self._assumed
        machine, here, wait = self._place(now, blocks, found)
        there = self._known_there(now, blocks, here)
        load, rest = assumed.load_s(here, there), assumed.compute_s(here + there, len(blocks))
        if there and load + rest > assumed.load_s(here, 0) + assumed.compute_s(here, len(blocks)):
            there, load, rest = 0, assumed.load_s(here, 0), assumed.compute_s(here, len(blocks))
        if self._backlogs is None:
            self._free_at[machine] = now + wait + load + rest
        found.ttft.append(wait + load + rest)
        found.blocks += len(blocks)
        found.local += here
        found.remote += there
        for block in blocks:
            self._here.setdefault(block, {})[machine] = now
            if self._has_remote:
                found.written += now - self._there.get(block, -math.inf) > assumed.remote_s
                self._there[block] = now

    def _place(self, now: float, blocks: list[int], found: Outcome) -> tuple[int, int, float]:
        """The machine that serves a request, how many of its blocks are there, and how long it waits for it."""
        machine = self._chance.randrange(self._machines)
        options = {machine: self._backlog(machine, now)}
        found.backlogs.append(options[machine])
        if self._routing == "locality":
            for other in (self._chance.randrange(self._machines), self._deepest(now, blocks)):
                if other is not None and other not in options:
                    options[other] = self._backlog(other, now)
        known = {machine: self._known_here(machine, now, blocks) for machine in options}
        compute = self._assumed.compute_s
        best = min(options, key=lambda m: (options[m] + compute(known[m], len(blocks)), m))
        return best, known[best], options[best]

    def _deepest(self, now: float, blocks: list[int]) -> int | None:
        """The machine that has most of a prompt."""
        deepest: int | None = None
        for block in blocks:
            users = self._here.get(block)
            recent = None if users is None else max(users, key=users.__getitem__)
            if users is None or recent is None or now - users[recent] > self._life_s:
                break
            deepest = recent
        return deepest

    def _known_here(self, machine: int, now: float, blocks: list[int]) -> int:
        for i, block in enumerate(blocks):
            used = self._here.get(block, {}).get(machine)
            if used is None or now - used > self._life_s:
                return min(i, len(blocks) - 1)
        return len(blocks) - 1  # the last is always computed

    def _known_there(self, now: float, blocks: list[int], here: int) -> int:
        if not self._has_remote:
            return 0
        for i in range(here, len(blocks) - 1):
            if now - self._there.get(blocks[i], -math.inf) > self._assumed.remote_s:
                return i - here
        return max(0, len(blocks) - 1 - here)

    def _backlog(self, machine: int, now: float) -> float:
        if self._backlogs is not None:
            return self._chance.choice(self._backlogs)
        return max(0.0, self._free_at.get(machine, 0.0) - now)


def settled(
    trace: Sequence[Call],
    assumed: Assumed,
    machines: int,
    routing: str,
    has_remote: bool,
    backlogs: Sequence[float] | None,
) -> Outcome:
    """What comes out when machines keep blocks as long as their capacity lets them, given how many they miss."""
    rate = sum(len(blocks) for _, blocks in trace) / trace[-1][0] / assumed.per_copy  # blocks a second and machine
    misses, outcome = 0.7, Outcome()
    for _ in range(2):
        life_s = assumed.capacity / assumed.block_bytes / (rate * misses)
        outcome = Simulation(assumed, machines, routing, has_remote, life_s, backlogs).run(trace)
        misses = 1 - outcome.local / outcome.blocks
    return outcome
