"""What a connector does in vLLM's worker, with a store and with pages of plain memory in the place of vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvcases import BLOCK, SMALL, GatedFS, kv_of, open_store, tokens
from threadruns import HANGS_S

from kvstore import KVStore
from kvstore.integrations.vllm.counters import Counters
from kvstore.integrations.vllm.paged import PagedCache, paged_cache
from kvstore.integrations.vllm.steps import Load, Save, Step
from kvstore.integrations.vllm.worker import WorkerSide

PAGE = 16  # tokens of a block of vLLM; the store has blocks of 8


def pages(count: int = 12) -> PagedCache:
    names = [str(number) for number in range(len(SMALL.layers))]
    made = {name: torch.zeros(count, 2, PAGE, 32).bfloat16() for name in names}
    return paged_cache(made, names, PAGE, None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "store") as opened:
        yield opened


class Worker(WorkerSide):
    def __init__(self, store: KVStore, cache: PagedCache, queue_bytes: int = 1 << 30) -> None:
        self.counters = Counters()
        super().__init__(store, cache, queue_bytes, 2, self.counters)

    def loads(self, *loads: Load) -> tuple[set[str], set[int]]:
        """Requests that were loaded, and blocks that were not."""
        self.start_loads(Step(loads=list(loads)))
        done, give_up = set[str](), time.monotonic() + HANGS_S
        while len(done) < len(loads) and time.monotonic() < give_up:
            done |= self.take_loaded(idle=True)  # waits a moment itself
        return done, self.take_failed()


def put_into(cache: PagedCache, blocks: list[int], ids: object, start: int, end: int) -> None:
    cache.write(blocks, [(k[None], v[None]) for k, v in kv_of(ids)], start, end)  # type: ignore[arg-type]


def holds(cache: PagedCache, blocks: list[int], ids: object, start: int, end: int) -> bool:
    wanted = kv_of(ids)  # type: ignore[arg-type]
    found = cache.read(blocks, start, end)
    return all(
        torch.equal(k.view(torch.int16), wk[:, start:end].view(torch.int16))
        and torch.equal(v.view(torch.int16), wv[:, start:end].view(torch.int16))
        for (k, v), (wk, wv) in zip(found, wanted, strict=True)
    )


def test_what_was_saved_in_pieces_is_loaded_into_other_blocks(store: KVStore) -> None:
    ids, cache = tokens(64), pages()
    worker = Worker(store, cache)
    put_into(cache, [3, 0, 5, 1], ids, 0, 64)
    worker.save(Step(saves=[Save("", ids[:24], 0, (3, 0))]))
    worker.save(Step(saves=[Save("", ids[:64], 24, (0, 5, 1))]))
    worker.close()
    assert store.contains(ids) == 64
    other = Worker(store, fresh := pages())
    assert other.loads(Load("r", "", ids[:48], 16, (9, 2))) == ({"r"}, set())
    assert holds(fresh, [9, 2], ids, 16, 48)
    other.close()
    assert worker.counters.take()["stored_tokens"] == 64
    assert other.counters.take()["loaded_tokens"] == 32


def test_blocks_that_left_the_store_are_reported_one_by_one(store: KVStore) -> None:
    """40 tokens are stored, two blocks and a half of vLLM: the third and fourth are not loaded."""
    ids, cache = tokens(64), pages()
    store.put(ids[:40], kv_of(ids[:40]))
    worker = Worker(store, cache)
    assert worker.loads(Load("r", "", ids, 0, (7, 8, 9, 10))) == ({"r"}, {9, 10})
    assert holds(cache, [7, 8], ids, 0, 32)
    assert worker.loads(Load("s", "", ids, 48, (1,))) == ({"s"}, {1})
    assert worker.take_failed() == set()
    worker.close()
    counted = worker.counters.take()
    assert (counted["failed_loads"], counted["failed_blocks"], counted["loaded_tokens"]) == (2, 3, 32)


def test_a_load_that_raises_is_reported_and_not_raised(store: KVStore) -> None:
    ids, worker = tokens(32), Worker(store, pages())
    store.close()
    assert worker.loads(Load("r", "", ids, 0, (1, 2))) == ({"r"}, {1, 2})
    worker.save(Step(saves=[Save("", ids, 0, (1, 2))]))
    worker.close()
    assert worker.counters.take()["lost_saves"] == 1


def test_what_comes_behind_a_gap_is_counted_as_lost(store: KVStore) -> None:
    ids, worker = tokens(32), Worker(store, pages())
    worker.save(Step(saves=[Save("", ids, 16, (1,))]))
    worker.close()
    assert worker.counters.take()["lost_saves"] == 1
    assert store.contains(ids) == 0


def test_a_store_that_is_slow_does_not_hold_up_the_engine(tmp_path: Path) -> None:
    """Its disk is stuck and a put waits for it: what comes meanwhile is dropped, and not waited for."""
    ids, cache, fs = tokens(48), pages(), GatedFS()
    with open_store(tmp_path / "slow", fs=fs, durability="put") as store:
        worker = Worker(store, cache, queue_bytes=16 * SMALL.bytes_per_token)
        fs.shut()
        worker.save(Step(saves=[Save("", ids[:16], 0, (0,))]))
        assert fs.waiting.wait(HANGS_S)
        worker.save(Step(saves=[Save("", ids[:32], 16, (1,)), Save("", ids, 32, (2,))]))
        fs.gate.set()
        worker.close()
        assert store.contains(ids) == 16
    counted = worker.counters.take()
    assert (counted["dropped_saves"], counted["saved_tokens"]) == (2, 16)


def test_many_loads_at_once(store: KVStore) -> None:
    cache, sequences = pages(64), [tokens(32, seed=number) for number in range(20)]
    for ids in sequences:
        store.put(ids, kv_of(ids))
    store.flush()
    worker = Worker(store, cache)
    loads = [Load(str(i), "", ids, 0, (2 * i, 2 * i + 1)) for i, ids in enumerate(sequences)]
    assert worker.loads(*loads) == ({str(i) for i in range(20)}, set())
    assert all(holds(cache, [2 * i, 2 * i + 1], ids, 0, 32) for i, ids in enumerate(sequences))
    worker.close()


def test_namespaces_are_kept_apart(store: KVStore) -> None:
    ids, worker = tokens(2 * BLOCK), Worker(store, pages())
    worker.save(Step(saves=[Save("a", ids, 0, (1,))]))
    worker.close()
    assert (store.contains(ids, namespace="a"), store.contains(ids), store.contains(ids, namespace="b")) == (16, 0, 0)
