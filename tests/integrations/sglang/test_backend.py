"""The contract of HiCache's storage backends, held by ours: made by SGLang's own factory.

Runs where SGLang 0.5.23 is installed without its dependencies: `make test-sglang`. The host pool is a tensor with the
page calls of SGLang's own, which needs CUDA to be imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvstore.errors import ConfigError, StoreLocked, UnsupportedModel

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 3, 2, 8, 6
KEYS = [f"{number:064x}" for number in range(PAGES)]


class Pool:
    """Pages of `[2, layers, tokens, heads, dim]`, or `[2, tokens, layers, heads, dim]` with layout page_first."""

    def __init__(self, layout: str, seed: int | None = None, page_size: int = PAGE) -> None:
        self.layout, self.page_size, self.layer_num, self.head_num, self.head_dim = (
            layout,
            page_size,
            LAYERS,
            HEADS,
            DIM,
        )
        tokens = PAGES * page_size
        dims = (2, tokens, LAYERS, HEADS, DIM) if layout == "page_first" else (2, LAYERS, tokens, HEADS, DIM)
        made = torch.Generator().manual_seed(seed or 0)
        self.data = torch.zeros(dims) if seed is None else torch.randn(dims, generator=made)
        self.data = self.data.bfloat16()

    def _page(self, index: int) -> torch.Tensor:
        end = index + self.page_size
        return self.data[:, index:end] if self.layout == "page_first" else self.data[:, :, index:end]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * self.page_size * HEADS * DIM).bfloat16()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self._page(index).copy_(page.view(self._page(index).shape))


def config(folder: Path, **fields: Any) -> Any:
    extra = {"backend_name": "kvstore", "module_path": "kvstore.integrations.sglang.backend"}
    extra |= {"class_name": "KVStoreHiCache", "path": str(folder), "disk_gb": 0.25, **fields.pop("extra", {})}
    given = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    given |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    return HiCacheStorageConfig(**{**given, "model_name": "org/model", "extra_config": extra, **fields})


def backend_of(settings: Any, pool: Any = None) -> Any:
    made = StorageBackendFactory.create_backend("dynamic", settings, pool)
    if pool is not None:
        made.register_mem_pool_host(pool)
        made.register_mem_host_pool_v2(pool, PoolName.KV)
    return made


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Any]:
    made = backend_of(config(tmp_path), Pool("layer_first", seed=1))
    yield made
    made.close()


def indices(pages: int, page_size: int = PAGE) -> torch.Tensor:
    return torch.arange(pages * page_size)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
def test_pages_come_back_by_both_interfaces_after_a_restart(tmp_path: Path, layout: str) -> None:
    pool = Pool(layout, seed=1)
    first = backend_of(config(tmp_path), pool)
    assert first.batch_set_v1(KEYS[:3], indices(3)) == [True] * 3
    assert first.batch_set_v2([PoolTransfer(PoolName.KV, indices(6)[3 * PAGE :], keys=KEYS[3:])]) == {
        PoolName.KV: [True] * 3
    }
    with pytest.raises(StoreLocked):
        backend_of(config(tmp_path))
    first.close()
    empty = Pool(layout)
    second = backend_of(config(tmp_path), empty)
    assert second.batch_exists([*KEYS, "f" * 64]) == PAGES
    assert second.batch_get_v2([PoolTransfer(PoolName.KV, indices(3), keys=KEYS[:3])]) == {PoolName.KV: [True] * 3}
    assert second.batch_get_v1(KEYS[3:], indices(6)[3 * PAGE :]) == [True] * 3
    assert torch.equal(empty.data, pool.data)
    second.close()


def test_the_generic_calls_share_pages_with_the_others(backend: Any) -> None:
    page = backend.mem_pool_host.get_data_page(0)
    assert backend.set(KEYS[0], page)
    assert backend.batch_set(KEYS[1:3], [page, page])
    assert backend.exists(KEYS[0])
    found = backend.batch_get([*KEYS[:2], KEYS[5]], [torch.zeros_like(page) for _ in range(3)])
    assert torch.equal(found[0], page)
    assert torch.equal(found[1], page)
    assert found[2] is None
    assert backend.get(KEYS[0], torch.zeros(7).bfloat16()) is None  # another size
    assert backend.get(KEYS[0]) is None  # of an unknown size
    assert backend.batch_get_v1(KEYS[:1], indices(1)) == [True]


def test_a_prefix_ends_at_the_first_missing_page(backend: Any) -> None:
    backend.batch_set_v1([KEYS[0], KEYS[1], KEYS[3]], indices(3))
    assert backend.batch_exists(KEYS) == 2
    assert backend.batch_get_v1(KEYS[:4], indices(4)) == [True, True, False, True]


def test_a_page_of_another_size_is_a_miss(backend: Any) -> None:
    backend.batch_set_v1(KEYS[:1], indices(1))
    backend.register_mem_pool_host(Pool("layer_first", page_size=32))
    assert backend.batch_get_v1(KEYS[:1], indices(1, 32)) == [False]


def test_indices_that_do_not_fit_change_nothing(backend: Any) -> None:
    assert backend.batch_set_v1(KEYS[:2], indices(1)) == [False, False]
    transfer = PoolTransfer(PoolName.MAMBA, indices(1), keys=KEYS[:1])
    assert backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [False]}  # no such pool
    assert backend.batch_exists(KEYS) == 0


def test_pools_beside_have_their_say(backend: Any) -> None:
    side = Pool("layer_first", seed=2)
    backend.register_mem_host_pool_v2(side, PoolName.MAMBA)
    backend.batch_set_v1(KEYS, indices(PAGES))
    there = PoolTransfer(PoolName.MAMBA, indices(2), keys=[KEYS[1], KEYS[3]])
    assert backend.batch_set_v2([there]) == {PoolName.MAMBA: [True, True]}
    assert backend.batch_exists_v2(KEYS).kv_hit_pages == PAGES

    trailing = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(KEYS, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: PAGES, PoolName.MAMBA: 4}

    every = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(KEYS, [every]).kv_hit_pages == 0
    with pytest.raises(ValueError, match="not supported"):
        backend.batch_exists_v2(KEYS, [replace(every, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


def test_ranks_and_models_do_not_share(tmp_path: Path) -> None:
    pool = Pool("layer_first", seed=1)
    one = backend_of(config(tmp_path, tp_size=2), pool)
    other = backend_of(config(tmp_path, tp_size=2, tp_rank=1), pool)
    one.batch_set_v1(KEYS[:1], indices(1))
    assert not other.exists(KEYS[0])
    one.close()
    other.close()
    renamed = backend_of(config(tmp_path, tp_size=2, model_name="org/other"), pool)
    assert not renamed.exists(KEYS[0])
    renamed.clear()
    renamed.close()
    again = backend_of(config(tmp_path, tp_size=2), pool)
    assert again.exists(KEYS[0])
    again.clear()
    assert not again.exists(KEYS[0])
    again.close()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'disk'"):
        backend_of(config(tmp_path, extra={"disk": 1}))
    with pytest.raises(UnsupportedModel, match="MLA"):
        backend_of(config(tmp_path, is_mla_model=True, tp_size=2))
