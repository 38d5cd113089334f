"""The contract of vLLM's secondary tiers, held by ours: made by vLLM's own factory, driven as its manager does.

Runs where vLLM 0.32 is installed: `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.errors import ConfigError, StoreLocked

CHUNK = 96 * 1024
REQUEST = ReqContext(req_id="r")


def spec(model: str = "org/model", dtype: str = "bfloat16", rank: int = 0) -> Any:
    parallel = OffloadingParallelConfig(
        rank=rank,
        world_size=2,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name=model, dtype=dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


def memory(chunks: int = 8) -> np.ndarray:
    return np.zeros((chunks, CHUNK), np.uint8)


def tier_in(folder: Path, primary: np.ndarray, offloading: Any = None, **params: Any) -> Any:
    given = {"type": "KVStoreTier", "module_path": "kvstore.integrations.vllm.tier", "path": str(folder)}
    given = {**given, "disk_gb": 0.1}
    return SecondaryTierFactory.create_secondary_tier({**given, **params}, memoryview(primary), offloading or spec())


@pytest.fixture
def primary() -> np.ndarray:
    return memory()


@pytest.fixture
def tier(tmp_path: Path, primary: np.ndarray) -> Iterator[Any]:
    made = tier_in(tmp_path, primary)
    yield made
    made.shutdown()


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), group)


def job(number: int, keys: list[Any], chunks: list[int], load: bool = False) -> Any:
    return TransferJob(number, keys, np.array(chunks, np.int32), load, REQUEST)


def done(tier: Any) -> dict[int, Any]:
    tier.drain_jobs()
    return {result.job_id: result for result in tier.get_finished_jobs()}


def found(tier: Any, *keys: Any) -> list[bool]:
    return [tier.lookup(one, REQUEST) == LookupResult.HIT for one in keys]


def fill(primary: np.ndarray, *chunks: int) -> np.ndarray:
    drawn = np.random.default_rng(0).integers(0, 256, (len(chunks), CHUNK), np.uint8)
    primary[list(chunks)] = drawn
    return drawn


def test_chunks_come_back_bit_for_bit_to_other_places(tier: Any, primary: np.ndarray) -> None:
    drawn = fill(primary, 0, 1)
    assert found(tier, key(1), key(2)) == [False, False]
    tier.submit_store(job(1, [key(1), key(2)], [0, 1]))
    assert done(tier)[1].success
    assert found(tier, key(1), key(2), key(3)) == [True, True, False]
    tier.submit_load(job(2, [key(2), key(1)], [5, 6], load=True))
    result = done(tier)[2]
    assert (result.success, result.transfer_bytes) == (True, 2 * CHUNK)
    assert np.array_equal(primary[[6, 5]], drawn)
    assert not list(tier.get_finished_jobs())


def test_groups_of_one_hash_are_chunks_of_their_own(tier: Any, primary: np.ndarray) -> None:
    fill(primary, 0)
    tier.submit_store(job(1, [key(1, group=0)], [0]))
    assert done(tier)[1].success
    assert found(tier, key(1, group=0), key(1, group=1)) == [True, False]


def test_what_is_there_of_a_load_is_loaded_and_named(tier: Any, primary: np.ndarray) -> None:
    drawn = fill(primary, 0, 1)
    tier.submit_store(job(1, [key(1), key(3)], [0, 1]))
    assert done(tier)[1].success
    tier.submit_load(job(2, [key(1), key(2), key(3)], [4, 5, 6], load=True))
    tier.submit_load(job(3, [key(2)], [7], load=True))
    results = done(tier)
    assert (results[2].success, results[2].successful_keys) == (False, (key(1), key(3)))
    assert (results[3].success, results[3].successful_keys) == (False, None)
    assert np.array_equal(primary[[4, 6]], drawn)
    assert not primary[[5, 7]].any()


def test_a_chunk_that_is_not_in_the_memory_fails_its_job_alone(tier: Any, primary: np.ndarray) -> None:
    fill(primary, 7)
    tier.submit_store(job(1, [key(1)], [8]))
    tier.submit_store(job(2, [key(2)], [7]))
    tier.submit_load(job(3, [key(2)], [-1], load=True))
    results = done(tier)
    assert [results[number].success for number in (1, 2, 3)] == [False, True, False]


def test_chunks_are_there_after_a_restart_for_the_same_model_alone(tmp_path: Path, primary: np.ndarray) -> None:
    drawn = fill(primary, 0)
    first = tier_in(tmp_path, primary)
    first.submit_store(job(1, [key(1)], [0]))
    first.shutdown()
    for other in (spec("org/other"), spec(dtype="float16"), spec(rank=1), spec()):
        target = memory()
        again = tier_in(tmp_path, target, other)
        expected = other == spec()
        assert found(again, key(1)) == [expected]
        again.submit_load(job(2, [key(1)], [3], load=True))
        assert done(again)[2].success == expected
        assert np.array_equal(target[3], drawn[0]) == expected
        again.shutdown()


def test_damage_on_disk_is_a_failed_load(tmp_path: Path, primary: np.ndarray) -> None:
    fill(primary, 0)
    first = tier_in(tmp_path, primary)
    first.submit_store(job(1, [key(1)], [0]))
    first.shutdown()
    for file in tmp_path.glob("*/segments/*"):
        data = bytearray(file.read_bytes())
        data[3000::4096] = bytes(x ^ 0x55 for x in data[3000::4096])
        file.write_bytes(data)
    again = tier_in(tmp_path, memory())
    again.submit_load(job(2, [key(1)], [0], load=True))
    assert not done(again)[2].success
    assert found(again, key(1)) == [False]
    again.shutdown()


def test_a_tier_says_where_it_is(tmp_path: Path, primary: np.ndarray) -> None:
    made = tier_in(tmp_path, primary, locality="REMOTE")
    assert (made.medium, made.locality) == (Medium.STORAGE, Locality.REMOTE)
    made.shutdown()
    with pytest.raises(ValueError, match="Locality"):
        tier_in(tmp_path, primary, locality="remote")


def test_settings_that_do_not_fit_and_a_folder_in_use_are_told(tmp_path: Path, tier: Any, primary: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="'root_dir' is not known"):
        tier_in(tmp_path, primary, root_dir="x")
    fill(primary, 0)
    tier.submit_store(job(1, [key(1)], [0]))
    assert done(tier)[1].success
    with pytest.raises(StoreLocked):
        tier_in(tmp_path, primary)
