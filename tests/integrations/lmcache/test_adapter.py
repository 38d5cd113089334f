"""The contract of LMCache's L2 adapters, held by ours: made by LMCache's own registry, driven as its controllers do.

Runs where LMCache 0.5.6 is installed: `make test-lmcache`.
"""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache")

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvstore.errors import ConfigError, StoreLocked

CHUNK = (2, 3, 64, 16)


def adapter_in(folder: Path, **params: Any) -> Any:
    spec = {"type": "plugin", "module_path": "kvstore.integrations.lmcache.adapter", "class_name": "KVStoreL2Adapter"}
    spec["adapter_params"] = {"path": str(folder), "disk_gb": 0.25, **params}
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(json.loads(json.dumps(spec))))


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[Any]:
    made = adapter_in(tmp_path)
    yield made
    made.close()


def key(number: int, **fields: Any) -> Any:
    return ObjectKey(**{"chunk_hash": number.to_bytes(32, "big"), "model_name": "org/model", "kv_rank": 0, **fields})


def thing(tensor: torch.Tensor) -> Any:
    metadata = MemoryObjMetadata(
        shape=tensor.shape,
        dtype=tensor.dtype,
        address=tensor.data_ptr(),
        phy_size=tensor.numel() * tensor.element_size(),
        ref_count=1,
    )
    return TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None)


def chunk(seed: int, dims: tuple[int, ...] = CHUNK) -> torch.Tensor:
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed)).bfloat16()


def wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000), "no event"
    consume_fd(descriptor)


def store(adapter: Any, keys: list[Any], tensors: list[torch.Tensor]) -> Any:
    task = adapter.submit_store_task(keys, [thing(tensor) for tensor in tensors])
    done: dict[int, Any] = {}
    while task not in done:
        wait(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    return done[task]


def lookup(adapter: Any, keys: list[Any]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    bitmap = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None  # once
    return [bitmap.test(number) for number in range(len(keys))]


def load(adapter: Any, keys: list[Any], tensors: list[torch.Tensor]) -> list[bool]:
    task = adapter.submit_load_task(keys, [thing(tensor) for tensor in tensors])
    wait(adapter.get_load_event_fd())
    bitmap = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    return [bitmap.test(number) for number in range(len(keys))]


def test_the_event_descriptors_are_distinct(adapter: Any) -> None:
    found = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(found) == 3


@pytest.mark.parametrize("dims", [CHUNK, (1, 3, 64, 16), (1024,)])
def test_what_was_stored_is_found_and_loaded(adapter: Any, dims: tuple[int, ...]) -> None:
    keys, tensors = [key(1), key(2)], [chunk(1, dims), chunk(2, dims)]
    assert lookup(adapter, keys) == [False, False]
    result = store(adapter, keys, tensors)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(2 * tensor.numel() for tensor in tensors)
    assert lookup(adapter, [*keys, key(3)]) == [True, True, False]
    targets = [torch.zeros_like(tensor) for tensor in (*tensors, tensors[0])]
    assert load(adapter, [*keys, key(3)], targets) == [True, True, False]
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors, strict=False))
    assert not targets[2].any()
    adapter.submit_unlock(keys)


def test_a_key_is_all_of_its_fields(adapter: Any) -> None:
    stored = key(1, cache_salt="alice")
    store(adapter, [stored], [chunk(1)])
    others = [key(1), key(1, cache_salt="bob"), key(1, cache_salt="alice", model_name="org/other")]
    others += [key(1, cache_salt="alice", kv_rank=1), key(1, cache_salt="alice", object_group_id=1)]
    assert lookup(adapter, [stored, *others]) == [True, *[False] * len(others)]


def test_an_object_of_another_size_is_a_miss(adapter: Any) -> None:
    store(adapter, [key(1)], [chunk(1)])
    target = torch.zeros(2, 3, 64, 32).bfloat16()
    assert load(adapter, [key(1)], [target]) == [False]
    assert not target.any()


def test_an_object_is_stored_once(adapter: Any) -> None:
    store(adapter, [key(1)], [chunk(1)])
    again = store(adapter, [key(1)], [chunk(1)])
    assert again.is_successful()
    assert again.bytes_transferred() == 0


def test_objects_are_there_after_a_restart(tmp_path: Path) -> None:
    first = adapter_in(tmp_path)
    store(first, [key(1)], [chunk(1)])
    with pytest.raises(StoreLocked):
        adapter_in(tmp_path)
    first.close()
    second, target = adapter_in(tmp_path), torch.zeros(CHUNK).bfloat16()
    assert lookup(second, [key(1), key(2)]) == [True, False]
    assert load(second, [key(1)], [target]) == [True]
    assert torch.equal(target, chunk(1))
    second.close()


def test_what_is_deleted_is_gone_and_told(adapter: Any) -> None:
    told: list[tuple[str, list[Any]]] = []

    class Listener:
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            told.append(("stored", keys))

        def on_l2_keys_accessed(self, keys: list[Any]) -> None:
            told.append(("accessed", keys))

        def on_l2_keys_deleted(self, keys: list[Any]) -> None:
            told.append(("deleted", keys))

    adapter.register_listener(Listener())
    store(adapter, [key(1), key(2)], [chunk(1), chunk(2)])
    load(adapter, [key(2)], [torch.zeros(CHUNK).bfloat16()])
    adapter.delete([key(1), key(9)])
    assert lookup(adapter, [key(1), key(2)]) == [False, True]
    assert told == [("stored", [key(1), key(2)]), ("accessed", [key(2)]), ("deleted", [key(1)])]


def test_a_task_that_fails_is_answered(adapter: Any) -> None:
    class Broken:
        @property
        def byte_array(self) -> Any:
            raise OSError("gone")

    task = adapter.submit_store_task([key(1)], [Broken()])
    wait(adapter.get_store_event_fd())
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    task = adapter.submit_load_task([key(1)], [Broken()])
    wait(adapter.get_load_event_fd())
    assert not adapter.query_load_result(task).test(0)


def test_an_object_that_fails_takes_no_other_with_it(adapter: Any) -> None:
    class Broken:
        @property
        def byte_array(self) -> Any:
            raise OSError("gone")

    task = adapter.submit_store_task([key(1), key(2), key(3)], [thing(chunk(1)), Broken(), thing(chunk(3))])
    wait(adapter.get_store_event_fd())
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    assert lookup(adapter, [key(1), key(2), key(3)]) == [True, False, True]
    target = torch.zeros(CHUNK).bfloat16()
    task = adapter.submit_load_task([key(1), key(3)], [Broken(), thing(target)])
    wait(adapter.get_load_event_fd())
    bitmap = adapter.query_load_result(task)
    assert (bitmap.test(0), bitmap.test(1)) == (False, True)
    assert torch.equal(target, chunk(3))


def test_a_task_without_objects_is_answered(adapter: Any) -> None:
    assert store(adapter, [], []).is_successful()
    assert lookup(adapter, []) == load(adapter, [], []) == []


def test_status_and_usage(adapter: Any) -> None:
    assert adapter.get_usage().total_bytes_used == 0
    store(adapter, [key(1)], [chunk(1)])
    adapter._chunks.flush()
    assert adapter.get_usage().total_bytes_used > 0
    assert not adapter.supports_global_eviction
    status = adapter.report_status()
    assert status["is_healthy"]
    assert status["stores"]["bfloat16-2x3x64x16"]["disk"]["bytes"] > 0


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'disk'"):
        adapter_in(tmp_path, disk=1)
