"""The calls of a store from an event loop: the same results, a bounded number of threads, and nothing half done."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kvcases import GatedFS
from small_stores import config, identity, is_exact, kv_of, put, stored, tokens_of
from threadruns import HANGS_S

from kvstore import KVStore, Session, StoreClosed
from kvstore.aio import AsyncKVStore, AsyncSession
from kvstore.errors import ConfigError
from kvstore.write import put as put_path


def served(folder: Path, work: Callable[[AsyncKVStore], Awaitable[Any]], threads: int = 4) -> Any:
    async def run() -> Any:
        async with await AsyncKVStore.open(folder, identity(), config(), threads=threads) as store:
            return await work(store)

    return asyncio.run(run())


def test_every_call_of_a_store_is_there() -> None:
    for plain, other in ((KVStore, AsyncKVStore), (Session, AsyncSession)):
        wanted = {name for name, each in inspect.getmembers(plain) if not name.startswith("_") and callable(each)}
        missing = wanted - set(dir(other))
        assert not missing


def test_calls_give_what_those_of_a_store_give(tmp_path: Path) -> None:
    tokens = tokens_of(1, 20)

    async def work(store: AsyncKVStore) -> None:
        assert (await store.put(tokens, kv_of(tokens))).new_tokens == 20
        assert (await store.flush()).dropped_blocks == 0
        hit = await store.get(tokens, max_tokens=9)
        assert hit is not None
        assert is_exact(hit, tokens)
        assert hit.tokens == 9
        assert (await store.contains(tokens), await store.prefetch(tokens)) == (20, 20)
        assert (await store.explain(tokens)).tokens == 20
        assert len((await store.inventory()).sequences) == 1
        session = store.session("alice")
        await session.save(tokens, kv_of(tokens))
        fork = await session.fork("bob")
        assert (await fork.tokens()).tolist() == tokens.tolist()
        resumed = await fork.resume()
        assert resumed is not None
        assert resumed.tokens == 20
        assert [await fork.delete(), await fork.exists()] == [True, False]
        assert [each.id for each in await store.sessions()] == ["alice"]
        assert (await store.compact()).moved_records == 0
        assert not await store.unpin(tokens)
        assert (await store.check(deep=True)).ok
        assert (await store.stats())["counters"]["put_new_tokens"] == 20
        assert await store.delete(tokens) == 5
        assert await store.delete_namespace(b"") == 0

    served(tmp_path, work)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an open KVStore, found Posix"):
        AsyncKVStore(tmp_path)  # type: ignore[arg-type]


def test_many_tasks_share_few_threads(tmp_path: Path) -> None:
    async def work(store: AsyncKVStore) -> int:
        async def one(number: int) -> None:
            tokens = tokens_of(number, 12)
            await store.put(tokens, kv_of(tokens))
            hit = await store.get(tokens)
            assert hit is not None
            assert is_exact(hit, tokens)

        await asyncio.gather(*(one(number) for number in range(1, 41)))
        return sum(thread.name.startswith("kvstore-async") for thread in threading.enumerate())

    assert served(tmp_path, work, threads=3) <= 3


def test_the_loop_goes_on_while_a_call_waits(tmp_path: Path) -> None:
    async def work(store: AsyncKVStore) -> None:
        go = threading.Event()
        waiting = asyncio.ensure_future(store._run(go.wait))
        await asyncio.sleep(0)
        assert await store.contains(tokens_of(1, 4)) == 0
        assert not waiting.done()
        go.set()
        assert await waiting

    served(tmp_path, work, threads=2)


@pytest.mark.parametrize("call", ["put", "save"])
def test_a_put_that_is_cancelled_while_it_waits_reads_nothing_later(tmp_path: Path, call: str) -> None:
    """The caller has its tensors back, and writes into them."""
    tokens, fs = tokens_of(1, 20), GatedFS()

    async def work() -> None:
        settings = config(write_queue_bytes=1)
        async with AsyncKVStore(KVStore(tmp_path, identity(), settings, fs=fs)) as store:
            await store.put(tokens_of(9, 4), kv_of(tokens_of(9, 4)))
            await store.flush()
            fs.shut()
            await store.put(tokens_of(2, 20), kv_of(tokens_of(2, 20)))  # fills the queue
            kv = kv_of(tokens)
            put = store.put(tokens, kv) if call == "put" else store.session("s").save(tokens, kv)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(put, 0.05)
            for k, v in kv:
                k.fill_(7)
                v.fill_(8)
            fs.gate.set()
            await store.flush()
            await store.put(tokens_of(3, 20), kv_of(tokens_of(3, 20)))  # behind it
            await store.flush()
            assert await store.contains(tokens) == 0
            assert not await store.session("s").exists()
            assert await store.contains(tokens_of(3, 20)) == 20

    asyncio.run(work())


def test_a_put_that_is_cancelled_while_it_reads_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, reads, go, of = tokens_of(1, 20), threading.Event(), threading.Event(), put_path.view_from

    def slowly(*arguments: Any) -> Any:
        reads.set()
        assert go.wait(HANGS_S)
        return of(*arguments)

    monkeypatch.setattr(put_path, "view_from", slowly)

    async def work(store: AsyncKVStore) -> None:
        kv = kv_of(tokens)
        task = asyncio.ensure_future(store.put(tokens, kv))
        await asyncio.to_thread(reads.wait, HANGS_S)
        for _ in range(3):  # more than once
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        for k, v in kv:
            k.fill_(7)
            v.fill_(8)
        await store.flush()
        hit = await store.get(tokens)
        assert hit is not None
        assert is_exact(hit, tokens)

    served(tmp_path, work)


def test_a_put_whose_task_is_cancelled_is_whole_or_never_begun(tmp_path: Path) -> None:
    tokens, other = tokens_of(1, 20), tokens_of(2, 20)

    async def work(store: AsyncKVStore) -> None:
        began, go = threading.Event(), threading.Event()

        def slow() -> None:
            began.set()
            go.wait()
            put(store.store, tokens)

        running = asyncio.ensure_future(store._run(slow))
        await asyncio.to_thread(began.wait)
        queued = asyncio.ensure_future(store.put(other, kv_of(other)))
        await asyncio.sleep(0)
        for task in (queued, running):
            task.cancel()
        await asyncio.sleep(0)  # what it waited for is cancelled by the loop's next turn
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(running, queued, return_exceptions=True)

    served(tmp_path, work, threads=1)
    with KVStore(tmp_path, identity(), config()) as store:
        assert (stored(store, tokens), stored(store, other)) == (20, 0)


def test_calls_that_wait_when_the_store_is_closed_say_so(tmp_path: Path) -> None:
    """They were not cancelled: a group of tasks would lose them in silence."""
    tokens = tokens_of(1, 8)

    async def run() -> Any:
        store = await AsyncKVStore.open(tmp_path, identity(), config(), threads=1)
        began, go = threading.Event(), threading.Event()
        running = asyncio.ensure_future(store._run(lambda: (began.set(), go.wait())[1]))
        await asyncio.to_thread(began.wait)
        waiting = [asyncio.ensure_future(store.put(tokens, kv_of(tokens))) for _ in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(store.close())
        found = await asyncio.gather(*waiting, return_exceptions=True)
        go.set()
        return await running, found, await closing

    done, found, _ = asyncio.run(run())
    assert done
    assert [type(each) for each in found] == [StoreClosed] * 3


def test_a_close_whose_task_is_cancelled_closes(tmp_path: Path) -> None:
    tokens = tokens_of(1, 8)

    async def run() -> None:
        began, go = threading.Event(), threading.Event()
        opened: list[AsyncKVStore] = []

        async def serve() -> None:
            async with await AsyncKVStore.open(tmp_path, identity(), config(), threads=1) as store:
                opened.append(store)
                await store.put(tokens, kv_of(tokens))
                held = asyncio.ensure_future(store._run(lambda: (began.set(), go.wait())))
                await asyncio.to_thread(began.wait)
                held.cancel()

        task = asyncio.ensure_future(serve())
        await asyncio.to_thread(began.wait)
        while not opened[0]._closing:
            await asyncio.sleep(0)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())  # it ends when the threads have
    with KVStore(tmp_path, identity(), config()) as store:
        assert stored(store, tokens) == 8


def test_an_open_whose_task_is_cancelled_leaves_no_store_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(KVStore):
        def __init__(self, *args: Any, **options: Any) -> None:
            began.set()
            go.wait()
            super().__init__(*args, **options)

        def close(self) -> Any:
            done = super().close()
            closed.set()
            return done

    monkeypatch.setattr("kvstore.aio.KVStore", Slow)

    async def run() -> None:
        task = asyncio.ensure_future(AsyncKVStore.open(tmp_path, identity(), config()))
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await asyncio.to_thread(closed.wait)

    asyncio.run(run())
    with KVStore(tmp_path, identity(), config()):
        pass


def test_errors_are_those_of_a_store(tmp_path: Path) -> None:
    async def run() -> None:
        store = await AsyncKVStore.open(tmp_path, identity(), config())
        with pytest.raises(ValueError, match="tokens"):
            await store.get([])
        await store.close()
        assert (await store.close()).dropped_blocks == 0
        with pytest.raises(StoreClosed):
            await store.get([1])

    asyncio.run(run())
    with KVStore(tmp_path, identity(), config()) as store, pytest.raises(ValueError, match="threads"):
        AsyncKVStore(store, threads=0)
