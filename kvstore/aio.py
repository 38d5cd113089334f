"""`AsyncKVStore`: the calls of a store for servers that run an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar, overload

from kvstore.config import StoreConfig
from kvstore.core.explanation import Explanation
from kvstore.core.given_store import check_store
from kvstore.core.history import Sample
from kvstore.core.identity import ModelIdentity
from kvstore.core.learning_status import LearningStatus
from kvstore.core.loan import Loan
from kvstore.core.results import ClusterInfo, CompactResult, EraseResult, FlushResult, Hit, PutResult, SessionInfo
from kvstore.core.tokens import Tokens
from kvstore.errors import StoreClosed
from kvstore.residency.block_table import BlockTable
from kvstore.residency.check import CheckReport
from kvstore.residency.inventory import Inventory
from kvstore.session import Session
from kvstore.store import KVStore

T = TypeVar("T")
_LOOK_S = 0.002  # how often a task that was cancelled looks whether its tensors are still read
_CLOSED = "the store is closed; open it again"


class AsyncKVStore:
    """A `KVStore` whose calls are awaited: each runs on one of a fixed number of threads, so the event loop goes on.

    Arguments, results and errors are those of `KVStore`. A task that is cancelled while it waits gives up its result
    alone: a call that a thread has begun ends, so that a put is whole; one that waits for a thread is not made. For one
    event loop at a time. Tensors given to `put` must not be written into before it returns or raises: a put that is
    cancelled before it has read them is not made, and one that reads them is waited for.

    Attributes:
        store: the store itself, for what is not awaited: `generate(..., store=store.store)` on a thread,
            `export(store.store)`, `last_request`, `learning`.

    Args:
        store: an open store; `close` closes it. Others may use it beside this.
        threads: calls that run at the same time; others wait for their turn.

    Raises:
        ValueError: threads is below 1; as ConfigError, if `store` is something else.

    Example:
        >>> import tempfile, torch
        >>> from kvstore import KVLayout
        >>> identity = ModelIdentity("model", "main", "", "", KVLayout.uniform(1, 2, 8))
        >>> kv = [(torch.zeros(2, 3, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16())]
        >>> async def serve(folder):
        ...     async with await AsyncKVStore.open(folder, identity) as store:
        ...         await store.put([11, 12, 13], kv)
        ...         return (await store.get([11, 12, 13, 14])).tokens
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     asyncio.run(serve(folder))
        3
    """

    def __init__(self, store: KVStore, *, threads: int = 8) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads: expected an integer of at least 1, found {threads!r}")
        check_store(store, "AsyncKVStore.open(path, identity) opens one", "an open KVStore")
        self.store = store
        self._executor = ThreadPoolExecutor(threads, "kvstore-async")
        self._closing = False

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        identity: ModelIdentity,
        config: StoreConfig | None = None,
        *,
        read_only: bool = False,
        threads: int = 8,
    ) -> AsyncKVStore:
        """Open a store, as `KVStore` does, without holding up the event loop."""
        executor = ThreadPoolExecutor(1, "kvstore-async-open")
        opening = executor.submit(KVStore, path, identity, config, read_only=read_only)
        executor.shutdown(wait=False)  # when that is done
        try:
            return cls(await asyncio.shield(asyncio.wrap_future(opening)), threads=threads)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_if_opened)
            raise

    async def put(self, tokens: Any, kv: Any, **options: Any) -> PutResult:
        """See `KVStore.put`."""
        return await self._run_lent(self.store.put, tokens, kv, **options)

    async def get(self, tokens: Any, **options: Any) -> Hit | None:
        """See `KVStore.get`."""
        return await self._run(self.store.get, tokens, **options)

    async def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """See `KVStore.contains`."""
        return await self._run(self.store.contains, tokens, namespace=namespace)

    async def explain(self, tokens: Any, *, namespace: str | bytes = b"", start: int | None = None) -> Explanation:
        """See `KVStore.explain`."""
        return await self._run(self.store.explain, tokens, namespace=namespace, start=start)

    async def prefetch(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """See `KVStore.prefetch`; returns how many leading tokens are in memory when it is done."""
        future = await self._run(self.store.prefetch, tokens, namespace=namespace)
        return await asyncio.wrap_future(future)

    async def touch(self, tokens: Any, *, namespace: str | bytes = b"") -> int:
        """See `KVStore.touch`."""
        return await self._run(self.store.touch, tokens, namespace=namespace)

    @overload
    async def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: Literal[False] = False) -> int: ...

    @overload
    async def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: Literal[True]) -> EraseResult: ...

    async def delete(self, tokens: Any, *, namespace: str | bytes = b"", erase: bool = False) -> int | EraseResult:
        """See `KVStore.delete`."""
        call: Callable[..., int | EraseResult] = self.store.delete
        return await self._run(call, tokens, namespace=namespace, erase=erase)

    async def delete_namespace(self, namespace: str | bytes, *, erase: bool = False) -> int | EraseResult:
        """See `KVStore.delete_namespace`."""
        call: Callable[..., int | EraseResult] = self.store.delete_namespace
        return await self._run(call, namespace, erase=erase)

    async def unpin(self, tokens: Any, *, namespace: str | bytes = b"") -> bool:
        """See `KVStore.unpin`."""
        return await self._run(self.store.unpin, tokens, namespace=namespace)

    async def flush(self, *, remote: bool = False) -> FlushResult:
        """See `KVStore.flush`."""
        return await self._run(self.store.flush, remote=remote)

    async def compact(self, *, move: bool = True) -> CompactResult:
        """See `KVStore.compact`."""
        return await self._run(self.store.compact, move=move)

    async def learn(self) -> LearningStatus:
        """See `KVStore.learn`."""
        return await self._run(self.store.learn)

    async def sessions(self, *, stored: bool = False) -> list[SessionInfo]:
        """See `KVStore.sessions`."""
        return await self._run(self.store.sessions, stored=stored)

    def session(self, name: str, *, namespace: str | bytes = b"") -> AsyncSession:
        """Return a handle on a session; see `KVStore.session`."""
        return AsyncSession(self, self.store.session(name, namespace=namespace))

    async def clusters(self, *arguments: Any, **options: Any) -> list[ClusterInfo]:
        """See `KVStore.clusters`."""
        return await self._run(self.store.clusters, *arguments, **options)

    async def inventory(self) -> Inventory:
        """See `KVStore.inventory`."""
        return await self._run(self.store.inventory)

    async def blocks(self) -> BlockTable:
        """See `KVStore.blocks`."""
        return await self._run(self.store.blocks)

    async def history(self) -> tuple[Sample, ...]:
        """See `KVStore.history`."""
        return await self._run(self.store.history)

    async def stats(self) -> dict[str, Any]:
        """See `KVStore.stats`."""
        return await self._run(self.store.stats)

    async def check(self, deep: bool = False) -> CheckReport:
        """See `KVStore.check`."""
        return await self._run(self.store.check, deep)

    async def close(self) -> FlushResult:
        """Wait for the calls that have begun, and close the store; see `KVStore.close`. Idempotent.

        Calls that wait for a thread raise `StoreClosed`. If the task is cancelled, the store is closed all the same.
        """
        self._closing = True
        # Handed to a thread at once: a loop that ends cancels tasks, and waits for threads.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._close))

    def _close(self) -> FlushResult:
        self._executor.shutdown(cancel_futures=True)
        return self.store.close()

    async def __aenter__(self) -> AsyncKVStore:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _is_closing(self) -> bool:
        return self._closing

    async def _run(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        if self._closing:
            raise StoreClosed(_CLOSED)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            return await loop.run_in_executor(self._executor, partial(call, *arguments, **options))
        except asyncio.CancelledError:
            if self._is_closing() and task is not None and not task.cancelling():
                raise StoreClosed(_CLOSED) from None  # not the task was cancelled, but what it waited for
            raise

    async def _run_lent(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """As `_run`, for a call that reads tensors of the caller, which has them back when this returns or raises."""
        loan = Loan()
        try:
            return await self._run(loan.run, call, *arguments, **options)
        except asyncio.CancelledError:
            while not loan.take_back():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(_LOOK_S)
            raise


def _close_if_opened(opening: Future[KVStore]) -> None:
    """Close a store that nobody waits for any more, on a thread."""
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="kvstore-async-close").start()


class AsyncSession:
    """A handle on a session, made by `AsyncKVStore.session`; see `Session`."""

    def __init__(self, store: AsyncKVStore, session: Session) -> None:
        self.id = session.id
        self._store = store
        self._session = session

    async def exists(self) -> bool:
        """See `Session.exists`."""
        return await self._store._run(lambda: self._session.exists)

    async def tokens(self) -> Tokens:
        """See `Session.tokens`."""
        return await self._store._run(lambda: self._session.tokens)

    async def metadata(self) -> dict[str, Any]:
        """See `Session.metadata`."""
        return await self._store._run(lambda: self._session.metadata)

    async def save(self, tokens: Any, kv: Any, **options: Any) -> PutResult:
        """See `Session.save`."""
        return await self._store._run_lent(self._session.save, tokens, kv, **options)

    async def point_to(self, tokens: Any, **options: Any) -> int:
        """See `Session.point_to`."""
        return await self._store._run(self._session.point_to, tokens, **options)

    async def resume(self, **options: Any) -> Hit | None:
        """See `Session.resume`."""
        return await self._store._run(self._session.resume, **options)

    async def touch(self) -> None:
        """See `Session.touch`."""
        await self._store._run(self._session.touch)

    async def fork(self, new_id: str) -> AsyncSession:
        """See `Session.fork`."""
        return AsyncSession(self._store, await self._store._run(self._session.fork, new_id))

    async def delete(self, *, blocks: bool = False, erase: bool = False) -> bool | EraseResult:
        """See `Session.delete`."""
        call: Callable[..., bool | EraseResult] = self._session.delete
        return await self._store._run(call, blocks=blocks, erase=erase)
