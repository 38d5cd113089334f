"""What a connector does in vLLM's worker: fills blocks from the store and keeps others there, on threads of its own.

A step of the engine pays for one copy of what it saves; the store takes it afterwards. A load goes into blocks that
nobody else uses until it is reported. Knows vLLM not at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvstore.integrations.vllm.counters import Counters
from kvstore.integrations.vllm.paged import PagedCache, Pair
from kvstore.integrations.vllm.steps import Load, Save, Step, whole
from kvstore.store import KVStore

_IDLE_S = 0.005  # how long a step waits for a load if the engine has nothing else to do


class WorkerSide:
    """See the module. The engine's thread calls it; its own threads end with `close`.

    Args:
        store: open for writing.
        cache: vLLM's memory.
        queue_bytes: copies that may wait for the store; what is beyond is dropped and counted.
        threads: loads at a time.
    """

    def __init__(self, store: KVStore, cache: PagedCache, queue_bytes: int, threads: int, counters: Counters) -> None:
        self.store = store
        self._cache = cache
        self._queue_bytes = queue_bytes
        self._counters = counters
        self._loaders = ThreadPoolExecutor(threads, "kvstore-vllm-load")
        self._saver = ThreadPoolExecutor(1, "kvstore-vllm-save")
        self._changed = threading.Condition()  # guards what follows
        self._waiting_bytes = 0
        self._loading = 0
        self._loaded: deque[tuple[str, tuple[int, ...]]] = deque()
        self._failed: set[int] = set()

    # ---- loads ---------------------------------------------------------------------------------------------------

    def start_loads(self, step: Step) -> None:
        """Begin the loads of a step."""
        for load in step.loads:
            with self._changed:
                self._loading += 1
            self._loaders.submit(self._load, load)

    def _load(self, load: Load) -> None:
        begin, loaded = time.perf_counter(), load.start
        try:
            hit = self.store.get(load.tokens, namespace=load.namespace, reserve=0, gate=False)
            end = whole(hit.tokens, self._cache.block_tokens) if hit is not None else 0
            if hit is not None and end > load.start:
                count = (end - load.start) // self._cache.block_tokens
                self._cache.write(load.blocks[:count], hit.layers, load.start, end)
                loaded = end
        except Exception as error:  # vLLM must learn of every load, else the request waits for ever
            self._counters.log("load", error)
        failed = load.failed_blocks(loaded, self._cache.block_tokens)
        self._counters.add("loaded_tokens", loaded - load.start)
        self._counters.add("failed_loads", bool(failed))
        self._counters.add("failed_blocks", len(failed))
        self._counters.add("load_seconds", time.perf_counter() - begin)
        with self._changed:
            self._loading -= 1
            self._loaded.append((load.request, failed))
            self._changed.notify_all()

    def take_loaded(self, idle: bool) -> set[str]:
        """Return the requests whose loads have ended since the last call, failed or not."""
        with self._changed:
            if idle and self._loading and not self._loaded:
                self._changed.wait(_IDLE_S)
            requests = set()
            while self._loaded:
                request, failed = self._loaded.popleft()
                requests.add(request)
                self._failed.update(failed)
            return requests

    def take_failed(self) -> set[int]:
        """Return the blocks that those loads did not fill."""
        with self._changed:
            failed, self._failed = self._failed, set()
        return failed

    # ---- saves ---------------------------------------------------------------------------------------------------

    def save(self, step: Step) -> None:
        """Copy what a step computed; the store takes it later."""
        begin = time.perf_counter()
        for save in step.saves:
            count = len(save.tokens) - save.start
            nbytes = count * self._cache.bytes_per_token
            with self._changed:
                fits = self._waiting_bytes + nbytes <= self._queue_bytes
                self._waiting_bytes += nbytes if fits else 0
            if not fits:
                self._counters.add("dropped_saves")
                continue
            layers = self._cache.read(save.blocks, save.start, len(save.tokens))
            self._counters.add("saved_tokens", count)
            self._saver.submit(self._put, save, layers, self._cache.mark(), nbytes)
        if step.saves:
            self._counters.add("save_seconds", time.perf_counter() - begin)

    def _put(self, save: Save, layers: list[Pair], copied: Callable[[], None], nbytes: int) -> None:
        try:
            copied()
            kv = [(keys.cpu(), values.cpu()) for keys, values in layers]
            done = self.store.put(save.tokens, kv, namespace=save.namespace, start=save.start)
            self._counters.add("stored_tokens", done.new_tokens)
            if done.missing_from is not None or done.dropped_blocks:
                self._counters.add("lost_saves")
        except Exception as error:  # a cache that is not stored is computed again, and no more
            self._counters.log("save", error)
            self._counters.add("lost_saves")
        finally:
            with self._changed:
                self._waiting_bytes -= nbytes

    def close(self) -> None:
        """End the threads, when the store has all that was saved. Leaves the store open."""
        self._loaders.shutdown()
        self._saver.shutdown()
