"""`SharedKVStore`: a store that any number of processes of one machine write at the same time."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

from kvstore.config import StoreConfig, as_config
from kvstore.core.approximate import Approximate
from kvstore.core.arguments import as_folder, check_integer, end_of_life
from kvstore.core.explanation import Explanation
from kvstore.core.history import Sample
from kvstore.core.identity import ModelIdentity, as_identity
from kvstore.core.learning_status import LearningStatus
from kvstore.core.loan import reading
from kvstore.core.prepared import PreparedCache
from kvstore.core.results import (
    ClusterInfo,
    CompactResult,
    EraseResult,
    FlushResult,
    Hit,
    PutResult,
    RequestReport,
    SessionInfo,
)
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.errors import ConfigError, StoreClosed, StoreForked, StoreLocked
from kvstore.gate.gate import Gate
from kvstore.metrics import Metrics
from kvstore.residency.block_table import BlockTable
from kvstore.residency.check import CheckReport
from kvstore.residency.inventory import Inventory
from kvstore.shared.calls import PrefixMissing, as_plain, perform
from kvstore.shared.link import Link
from kvstore.shared.owner import Owner
from kvstore.shared.promised import Promised
from kvstore.shared.session import SharedSession
from kvstore.shared.shipment import Shipment
from kvstore.shared.wire import Disconnected
from kvstore.store import KVStore
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.disk.lock import WriterLock

T = TypeVar("T")
_AGAIN_S = 0.02
_ANSWER_S = 30.0  # beyond what a put may wait for space


@dataclass(frozen=True)
class _Role:
    """What this process is at the moment: the owner (`owner`), or one that asks the owner (`link`)."""

    store: KVStore
    owner: Owner | None = None
    link: Link | None = None


class SharedKVStore:
    """A store for several processes that all put and get: workers of a server, for example. Thread-safe.

    The first process that opens it owns it and writes; the others hand it what they put, in shared memory, and read
    the files directly. If the owner ends, or is killed, the next call of another process makes that one the owner;
    nothing that was flushed is lost, gets go on meanwhile. What one process puts the others find when it is written,
    at the latest after `flush`. All processes belong to one user and see the same folder and process numbers.

    Arguments, results and errors of the methods are those of `KVStore`; besides, what changes the store raises
    `WriterSilent` if its owner does not answer (it is stopped, for instance). Open it anew in every process: after a
    fork, calls in the child raise `StoreForked`.

    Args:
        path, identity, config: see `KVStore`; the config of the process that owns the store counts for all that is
            written.
        wait_s: how long to wait for a store whose owner has just ended, or that a `KVStore` has open.

    Raises:
        StoreLocked: a `KVStore` has it open for writing, which does not share it.
        ConfigError: it has no disk tier, or an argument does not fit.
        The other errors of `KVStore`.

    Example:
        >>> import tempfile, torch
        >>> from kvstore import KVLayout
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> kv = [(torch.zeros(2, 3, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16())]
        >>> with tempfile.TemporaryDirectory() as folder, SharedKVStore(folder, identity) as store:
        ...     done = store.put([11, 12, 13], kv)  # in any number of processes
        ...     store.owns, store.get([11, 12, 13, 14]).tokens
        (True, 3)
    """

    read_only = False
    last_request: RequestReport | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: ModelIdentity,
        config: StoreConfig | None = None,
        *,
        wait_s: float = 30.0,
    ) -> None:
        self.path = as_folder(path)
        self.identity = as_identity(identity)
        self._given = as_config(config)
        if not self._given.disk.bytes:
            raise ConfigError("shared: a store without a disk tier cannot be shared; set disk.bytes")
        self._wait_s = wait_s
        self._pid = os.getpid()
        self._promised = Promised()
        self._switch = threading.RLock()  # held while this process changes its role
        self._closed = False
        self._role = self._join(None)
        self._finalizer = weakref.finalize(self, _end_roles, roles := [self._role], os.getpid())
        self._roles = roles

    # ---- roles ---------------------------------------------------------------------------------------------------

    @property
    def owns(self) -> bool:
        """Whether this process is the one that writes at the moment."""
        return self._role.owner is not None

    def _join(self, old: _Role | None) -> _Role:
        """Become the owner, or find it. `old` is what this process was before; its reader is used again."""
        reader = old.store if old is not None and old.owner is None else None
        end = time.monotonic() + self._wait_s
        lock = WriterLock(FileSystem(), self.path)
        while True:
            try:
                link = Link(self.path, self._given.put_timeout_s + _ANSWER_S)
            except (Disconnected, OSError):
                pass
            else:
                return _Role(reader or KVStore(self.path, self.identity, self._given, read_only=True), link=link)
            if lock.is_free():
                if reader is not None:
                    reader.close()  # a process opens a catalog only once
                    reader = None
                try:
                    store = KVStore(self.path, self.identity, self._given)
                except StoreLocked:
                    pass  # another one was quicker
                else:
                    return _Role(store, owner=Owner(store))
            if time.monotonic() > end:
                if reader is None and old is not None:  # gets go on, and the next change tries again
                    self._become(_Role(KVStore(self.path, self.identity, self._given, read_only=True), link=old.link))
                raise StoreLocked(
                    f"{self.path} is open for writing in {lock.holder()}, which does not share it with this user",
                    "open it there with SharedKVStore, as the same user, or close it",
                )
            time.sleep(_AGAIN_S)

    def _become(self, role: _Role) -> None:
        self._role = role
        self._roles[:] = [role]

    def _succeed(self, role: _Role) -> None:
        """The owner that `role` asks is gone: be the next one, or find it."""
        with self._switch:
            if self._closed or self._role is not role:
                return
            assert role.link is not None
            role.link.close()
            self._become(self._join(role))
            self._promised.owner_died(lambda tokens, namespace: self._role.store.contains(tokens, namespace=namespace))

    def _has_left(self, role: _Role) -> bool:
        """Whether the store of `role` is closed for this process has another role by now; waits while it changes."""
        with self._switch:
            return not self._closed and self._role is not role

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise StoreForked("the store was opened in the parent process; open it again in this one")
        if self._closed:
            raise StoreClosed("the store is closed; open it again")

    def _read(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Makes a call of the store that changes nothing."""
        while True:
            self._check()
            role = self._role
            try:
                return call(role.store, *arguments, **options)
            except StoreClosed:
                if not self._has_left(role):
                    raise

    def _change(self, call: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Makes a call that changes the store, here or in its owner."""
        while True:
            self._check()
            role = self._role
            try:
                if role.link is None:
                    return perform(role.store, call, arguments)
                return role.link.call(call, arguments, timeout_s=timeout_s)
            except Disconnected:
                self._succeed(role)
            except StoreClosed:
                if not self._has_left(role):
                    raise

    def _store_cache(
        self, call: str, tokens: Tokens, kv: Any, namespace: str | bytes, start: int = 0, **options: Any
    ) -> PutResult:
        """Makes a call that takes a cache, of the tokens from `start` on."""
        with reading():
            cache = PreparedCache.of(self.identity.layout, kv, len(tokens) - start)
        arguments = {"tokens": tokens, "namespace": namespace, **options}
        size = self.config.block_tokens
        whole = bool(options["pin"]) or self.identity.layout.is_grouped
        while True:
            self._check()
            role = self._role
            try:
                if role.link is None:
                    done: PutResult = perform(role.store, call, {**arguments, "kv": cache, "start": start})
                    return done
                lost = self._read(_cannot_decode, namespace, tokens)
                if lost:
                    role.link.call("look", {"tokens": tokens, "namespace": namespace})
                stored = 0 if whole or lost else self.contains(tokens, namespace=namespace)
                begin = max(start, min(stored, len(tokens) - 1) // size * size)
                with reading():  # by the owner, until it answers
                    done = self._send_cache(role.link, call, {**arguments, "start": begin}, cache, begin - start)
            except PrefixMissing as missing:
                if whole or role.link is None:  # so the caller gave the end alone, and what comes before has left
                    return PutResult(len(tokens), 0, 0, 0, 0.0, missing_from=missing.begin)
                whole = True
            except Disconnected:
                self._succeed(role)
            except StoreClosed:
                if not self._has_left(role):
                    raise
            else:
                if done.new_blocks and self._given.durability != "put":
                    self._promised.add(tokens, namespace, done.new_blocks)
                return done

    def _send_cache(
        self, link: Link, call: str, arguments: dict[str, Any], cache: PreparedCache, skipped: int
    ) -> PutResult:
        shipment = Shipment.of(cache, skipped)
        arguments = {**arguments, "shipment": shipment.told}
        if link.is_readable:
            arguments["shipment"] = {**shipment.told, "places": shipment.places}
            done: PutResult = link.call(call, arguments)
            return done
        fd = shipment.sealed()
        try:
            done = link.call(call, arguments, fd)
            return done
        finally:
            os.close(fd)

    # ---- what changes the store ----------------------------------------------------------------------------------

    def put(
        self,
        tokens: Any,
        kv: Any,
        *,
        namespace: str | bytes = b"",
        logprobs: Any = None,
        ttl: float | None = None,
        pin: bool = False,
        start: int = 0,
    ) -> PutResult:
        """See `KVStore.put`. In a process that is not the owner the tensors are copied before it returns."""
        ids = as_tokens(tokens)
        check_integer("start", start, 0, len(ids) - 1)
        end_of_life(ttl)
        options = {"logprobs": as_plain(logprobs), "ttl": ttl, "pin": bool(pin)}
        return self._store_cache("put", ids, kv, namespace, start, **options)

    @overload
    def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: Literal[False] = False) -> int: ...

    @overload
    def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: Literal[True]) -> EraseResult: ...

    def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: bool = False) -> int | EraseResult:
        """See `KVStore.delete`. If the owner ends meanwhile, it is repeated, and may find nothing left to remove."""
        ids = as_tokens(tokens)
        done: int | EraseResult = self._change("delete", 0, tokens=ids, namespace=namespace, erase=bool(erase))
        if done if isinstance(done, int) else done.removed_blocks:
            self._read(_forget, namespace, ids)
        return done

    @overload
    def delete_namespace(self, namespace: str | bytes, *, erase: Literal[False] = False) -> int: ...

    @overload
    def delete_namespace(self, namespace: str | bytes, *, erase: Literal[True]) -> EraseResult: ...

    def delete_namespace(self, namespace: str | bytes, *, erase: bool = False) -> int | EraseResult:
        """See `KVStore.delete_namespace`."""
        done: int | EraseResult = self._change("delete_namespace", 0, namespace=namespace, erase=bool(erase))
        self._read(_forget, namespace, None)
        return done

    def unpin(self, tokens: Any, *, namespace: str | bytes = b"") -> bool:
        """See `KVStore.unpin`."""
        return bool(self._change("unpin", tokens=as_tokens(tokens), namespace=namespace))

    def touch(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """See `KVStore.touch`."""
        return int(self._change("touch", tokens=as_tokens(tokens), namespace=namespace))

    def flush(self, *, remote: bool = False) -> FlushResult:
        """See `KVStore.flush`; everything that any process put before is durable on return.

        Returns:
            What the owner wrote. Blocks of this process that an owner took and did not write before it died count as
            dropped.
        """
        last = self._promised.last
        done: FlushResult = self._change("flush", 0, remote=bool(remote))
        self._promised.flushed(last)
        return replace(done, dropped_blocks=done.dropped_blocks + self._promised.take_lost())

    def compact(self, *, move: bool = True) -> CompactResult:
        """See `KVStore.compact`."""
        done: CompactResult = self._change("compact", 0, move=bool(move))
        return done

    def learn(self) -> LearningStatus:
        """See `KVStore.learn`; the owner learns."""
        done: LearningStatus = self._change("learn", 0)
        return done

    def session(self, name: str, *, namespace: str | bytes = b"") -> SharedSession:
        """Return a handle on the session with this name, which need not exist yet. See `KVStore.session`."""
        return SharedSession(name, namespace, self._change, self._store_cache, self.get, partial(self._read, _forget))

    # ---- what reads it -------------------------------------------------------------------------------------------

    def get(
        self,
        tokens: Any,
        *,
        namespace: str | bytes = b"",
        max_tokens: int | None = None,
        device: Any = None,
        reserve: int | None = None,
        approximate: Approximate | None = None,
        gate: bool | None = None,
        lazy: bool = False,
    ) -> Hit | None:
        """See `KVStore.get`. The process that asks reads and decodes; the owner only hears that it was used."""
        options = {"max_tokens": max_tokens, "device": device, "reserve": reserve, "approximate": approximate}
        hit = self._read(KVStore.get, tokens, namespace=namespace, gate=gate, lazy=lazy, **options)
        link = self._role.link
        if hit is not None and link is not None:
            used = as_tokens(tokens)[: hit.tokens]
            link.hint("touch", {"tokens": used, "namespace": namespace})
        return hit

    def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """See `KVStore.contains`."""
        return self._read(KVStore.contains, tokens, namespace=namespace)

    def prefetch(self, tokens: Any, *, namespace: str | bytes = b"") -> Future[int]:
        """See `KVStore.prefetch`; into the memory of this process."""
        return self._read(KVStore.prefetch, tokens, namespace=namespace)

    def explain(self, tokens: Any, *, namespace: str | bytes = b"", start: int | None = None) -> Explanation:
        """See `KVStore.explain`."""
        return self._read(KVStore.explain, tokens, namespace=namespace, start=start)

    def sessions(self, *, stored: bool = False) -> list[SessionInfo]:
        """See `KVStore.sessions`; as of the last flush, in a process that is not the owner."""
        return self._read(KVStore.sessions, stored=stored)

    def clusters(self, *arguments: Any, **options: Any) -> list[ClusterInfo]:
        """See `KVStore.clusters`; as of the last flush, in a process that is not the owner."""
        return self._read(KVStore.clusters, *arguments, **options)

    def inventory(self) -> Inventory:
        """See `KVStore.inventory`."""
        return self._read(KVStore.inventory)

    def blocks(self) -> BlockTable:
        """See `KVStore.blocks`."""
        return self._read(KVStore.blocks)

    def history(self) -> tuple[Sample, ...]:
        """See `KVStore.history`."""
        return self._read(KVStore.history)

    def check(self, deep: bool = False) -> CheckReport:
        """See `KVStore.check`."""
        return self._read(KVStore.check, deep)

    def stats(self) -> dict[str, Any]:
        """See `KVStore.stats`: of this process, and under "shared" whether it is the owner, the connections of the
        others, and whether the owner can read its memory (if not, puts are copied once more)."""
        role = self._role
        shared = {
            "owner": int(role.owner is not None),
            "connections": role.owner.connections if role.owner is not None else 0,
            "reads_memory": int(role.link is None or role.link.is_readable),
        }
        return {**self._read(KVStore.stats), "shared": shared}

    @property
    def config(self) -> StoreConfig:
        """The settings, with the sizes of a store that exists."""
        return self._role.store.config

    @property
    def metrics(self) -> Metrics:
        """The counters of this process."""
        return self._role.store.metrics

    @property
    def gate(self) -> Gate:
        """See `KVStore.gate`; each process measures for itself."""
        return self._read(_gate)

    def __len__(self) -> int:
        """Return how many blocks are stored."""
        return self._read(KVStore.__len__)

    def __bool__(self) -> bool:
        """A store is true, also while it is empty."""
        return True

    def __contains__(self, tokens: Any) -> bool:
        """Return whether all of a sequence is stored, in the namespace b""."""
        return self._read(KVStore.__contains__, tokens)

    def close(self) -> FlushResult:
        """Leave the store; the owner writes what is queued, and another process becomes the owner. Idempotent.

        What this process put is durable on return only after a `flush`, or if it is the owner.
        """
        with self._switch:
            self._closed = True
            role = self._role
        self._finalizer.detach()
        return _end(role)

    def __enter__(self) -> SharedKVStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _gate(store: KVStore) -> Gate:
    return store.gate


def _forget(store: KVStore, namespace: str | bytes, tokens: Tokens | None) -> None:
    """What the owner removed for this process is found here no more, not even in memory."""
    follower = store._lookup.follower
    if follower is not None:
        store._calls.run(follower.forget, store._digest(namespace), tokens)


def _cannot_decode(store: KVStore, namespace: str | bytes, tokens: Tokens) -> bool:
    """Whether something that is stored of a sequence could not be decoded when this process read it last."""
    residency = store._residency
    if not residency.has_unreadable:
        return False
    match = residency.index.match(store._digest(namespace), tokens, touch=False)
    return bool(residency.unreadable_among(match.records.tolist()))


def _end(role: _Role) -> FlushResult:
    if role.link is not None:
        role.link.close()
    if role.owner is not None:
        role.owner.close()
    return role.store.close()


def _end_roles(roles: list[_Role], pid: int) -> None:
    if os.getpid() == pid:  # a forked child has copies of what its parent ends
        for role in roles:
            _end(role)
