"""Calls to the nodes that have the keys, also while keys move between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from kvstore.errors import RemoteError, RemoteTimeout, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.engines.resp.connection import Moved, number_of
from kvstore.tiers.remote.engines.resp.node import Node
from kvstore.tiers.remote.engines.resp.nodes import Member, Nodes, together
from kvstore.tiers.remote.engines.resp.replies import Reply

T = TypeVar("T")
_HOPS = 3  # a key is not followed further in one call


class _Group(NamedTuple):
    """Keys of one node; `asking`: it was said to have them for this once."""

    member: Member
    asking: bool
    keys: list[str]

    def ask(self, verb: str, deadline: Deadline, options: Sequence[str]) -> list[Reply]:
        return self.member.node.each(verb, self.keys, deadline, *options, asking=self.asking)


class Router:
    """Finds the nodes of keys, and follows keys that moved. Thread-safe.

    Args:
        nodes: of the cluster.
        counts: of the engine; `redirects` is counted.
    """

    def __init__(self, nodes: Nodes, counts: Counts) -> None:
        self._nodes = nodes
        self._counts = counts

    def one(self, key: str, deadline: Deadline, call: Callable[[Node, bool], T]) -> T:
        """Call a key's node, then the one that it names if it does not have the key any more."""
        member, asking = self._nodes.of(key, deadline), False
        for _ in range(_HOPS):
            try:
                return call(member.node, asking)
            except Moved as moved:
                member, asking = self._follow(key, moved), moved.once
            except (RemoteUnavailable, RemoteTimeout):
                self._nodes.refresh_soon()
                raise
        raise RemoteUnavailable(f"the cluster sends {key} from node to node")

    def each(self, verb: str, keys: Sequence[str], deadline: Deadline, *options: str) -> Sequence[int | RemoteError]:
        """Send one command for each key, to all nodes at once; return the number that each key's node says, or how
        that failed. Raises only if no node tells which node has what."""
        self._nodes.all(deadline)
        found: dict[str, int | RemoteError] = {}
        left: list[tuple[str, Member, bool]] = []
        for key in dict.fromkeys(keys):
            try:
                left.append((key, self._nodes.of(key, deadline), False))
            except RemoteError as error:
                found[key] = error
        for _ in range(_HOPS):
            groups = _grouped(left)
            calls = [
                partial(one.member.node.each, verb, one.keys, deadline, *options, asking=one.asking) for one in groups
            ]
            answers = together([(one.member, call) for one, call in zip(groups, calls, strict=True)], deadline)
            for group, replies in zip(groups, answers, strict=True):
                if isinstance(replies, RemoteError):
                    self._nodes.refresh_soon()
                    found.update(dict.fromkeys(group.keys, replies))
                else:
                    found.update(zip(group.keys, map(_number, replies), strict=True))
            moved = [(key, found[key]) for key, _, _ in left]
            left = [(key, self._follow(key, one), one.once) for key, one in moved if isinstance(one, Moved)]
            if not left:
                break
        return [found[key] for key in keys]

    def _follow(self, key: str, moved: Moved) -> Member:
        self._counts.add(redirects=1)
        if not moved.once:
            self._nodes.slots.move(key, moved.address)
            self._nodes.refresh_soon()
        return self._nodes.member(moved.address)


def _grouped(keys: Iterable[tuple[str, Member, bool]]) -> list[_Group]:
    groups: dict[tuple[int, bool], _Group] = {}
    for key, member, asking in keys:
        groups.setdefault((id(member), asking), _Group(member, asking, [])).keys.append(key)
    return list(groups.values())


def _number(reply: Reply) -> int | RemoteError:
    try:
        return number_of(reply)
    except RemoteError as error:
        return error
