"""`KVStoreTier`: a secondary tier of vLLM's `TieringOffloadingSpec`, in stores (docs/vllm.md).

A chunk of such a tier is memory under an opaque key, the hash of its tokens, so it is kept by `ChunkStores`: coded
without loss, checked when it is read, within a budget, and there after a restart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.integrations.chunks.settings import ChunkSettings
from kvstore.integrations.chunks.shape import ChunkShape
from kvstore.integrations.chunks.stores import ChunkStores

_LOG = logging.getLogger("kvstore")


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # mypy has no vLLM
    """A secondary tier in kvstore. One process writes to a folder: that of vLLM's scheduler.

    A store job has succeeded when its chunks are queued for writing; they are durable within moments, and after
    `shutdown`. What is damaged or evicted between lookup and load is not loaded, which the result of the job says.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: as vLLM gives them.
        locality: "LOCAL" or "REMOTE", for requests that name the tiers they want.
        params: `ChunkSettings`.

    Raises:
        ConfigError, ValueError: names the setting that does not fit.
        StoreLocked, DiskError, ...: as `KVStore`.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **params: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        settings = ChunkSettings.of(params, "secondary_tiers")
        self._memory = np.frombuffer(primary_kv_view, np.uint8)
        self._shape = ChunkShape.of((self.block_size_bytes,), "uint8")
        self._namespace = _namespace(offloading_spec)
        self._chunks = ChunkStores(settings.path, "vllm", settings.config())
        self._workers = ThreadPoolExecutor(settings.threads, "kvstore-vllm-tier")
        self._changed = threading.Condition()
        self._open = 0  # jobs; guarded by _changed, and so is what is below
        self._done: list[JobResult] = []

    def lookup(self, key: Any, req_context: Any) -> Any:
        there = self._chunks.contains(bytes(key), namespace=self._namespace)
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._put)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._get)

    def get_finished_jobs(self) -> Iterable[Any]:
        with self._changed:
            done, self._done = self._done, []
        return done

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def shutdown(self) -> None:
        """End the jobs that were submitted and close the stores; what was stored is durable on return."""
        self._workers.shutdown()
        self._chunks.close()

    def _submit(self, job: Any, work: Callable[[bytes, memoryview], bool]) -> None:
        with self._changed:  # so that the job does not end before it counts
            self._workers.submit(self._run, job, work)
            self._open += 1

    def _run(self, job: Any, work: Callable[[bytes, memoryview], bool]) -> None:
        begin, done = time.monotonic(), list[Any]()
        try:
            for key, place in zip(job.keys, job.chunk_ids, strict=True):
                if work(bytes(key), self._at(place)):
                    done.append(key)
        except Exception as error:  # whatever it is: vLLM waits for a result
            _LOG.warning("vLLM: job %s of the tier failed: %s", job.job_id, error)
        took, whole = time.monotonic() - begin, len(done) == len(job.keys)
        some = tuple(done) if done and not whole and job.is_promotion else None
        result = JobResult(job.job_id, whole, some, took, len(done) * self.block_size_bytes)
        with self._changed:
            self._done.append(result)
            self._open -= 1
            self._changed.notify_all()

    def _at(self, place: int) -> memoryview:
        """The memory of a chunk of the primary tier.

        Raises:
            IndexError: there is no such chunk.
        """
        begin = int(place) * self.block_size_bytes
        if not 0 <= begin <= len(self._memory) - self.block_size_bytes:
            raise IndexError(f"chunk {place} is outside of the primary tier")
        return self._memory[begin : begin + self.block_size_bytes].data

    def _put(self, key: bytes, memory: memoryview) -> bool:
        if self._chunks.contains(key, namespace=self._namespace):
            return True
        return self._chunks.put(key, memory, self._shape, namespace=self._namespace)

    def _get(self, key: bytes, memory: memoryview) -> bool:
        return self._chunks.get_into(key, memory, self._shape, namespace=self._namespace)


def _namespace(offloading_spec: Any) -> str:
    """What the bytes of a chunk follow from besides its key, as vLLM's own file tier tells it: model, dtype, ranks."""
    blocks = offloading_spec.blocks_per_chunk
    mapper = FileMapper.from_offloading_spec("", offloading_spec, blocks, parallel_agnostic=True)
    text = json.dumps(mapper.get_run_config(), sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()}-r{mapper.rank}"
