"""`put_batch` and `get_batch`: batch caches of programs that run the model themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny
from transformers import StaticCache

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.core.results import PutResult
from kvstore.errors import LayoutMismatch, UnsupportedCache
from kvstore.integrations.transformers import cache_layers, generate, get_batch, put_batch

MIB = 1 << 20
CONFIG = StoreConfig(
    host=TierConfig(16 * MIB, "raw"), disk=TierConfig(16 * MIB, "zstd"), segment_bytes=MIB, block_tokens=16
)
LENGTHS, COLUMNS = (30, 21, 34), 34
MASK = torch.stack([(torch.arange(COLUMNS) >= COLUMNS - n).long() for n in LENGTHS])
IDS = torch.randint(1, 190, (3, COLUMNS), generator=torch.Generator().manual_seed(0)) * MASK
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7, "return_dict_in_generate": True}


@pytest.fixture(params=["llama", "gpt2", "gpt_neox"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.fixture
def store(tmp_path: Path, model: Any) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", ModelIdentity.from_transformers(model), CONFIG) as opened:
        yield opened


@torch.no_grad()
def _cache(model: Any, past: Any = None) -> Any:
    positions = (MASK.cumsum(1) - 1).clamp_min(0)
    return model(IDS, attention_mask=MASK, position_ids=positions, past_key_values=past, use_cache=True).past_key_values


def _row(row: int, columns: int = COLUMNS) -> list[int]:
    found: list[int] = IDS[row, COLUMNS - LENGTHS[row] : columns].tolist()
    return found


def test_each_row_is_stored_by_itself_and_comes_back_bit_for_bit(store: KVStore, model: Any) -> None:
    layers = cache_layers(_cache(model))
    done = put_batch(store, IDS, _cache(model), attention_mask=MASK)
    assert [result.tokens for result in done] == list(LENGTHS)
    for row, length in enumerate(LENGTHS):
        hit = store.get(_row(row))
        assert hit is not None
        assert hit.tokens == length
        for pair, other in zip(hit.layers, layers, strict=True):
            for tensor, batch in zip(pair, other, strict=True):
                assert torch.equal(tensor[0], batch[row, :, COLUMNS - length :])


def test_a_batch_comes_back_as_model_generate_takes_it(store: KVStore, model: Any) -> None:
    """And goes on as with the cache in memory."""
    cache = _cache(model)
    put_batch(store, IDS, cache, attention_mask=MASK)
    hit = get_batch(store, IDS, attention_mask=MASK)
    assert hit is not None
    assert (hit.columns, hit.tokens) == (33, (29, 20, 33))
    for layer, other in zip(hit.cache.layers, cache_layers(cache), strict=True):
        for tensor, batch in zip((layer.keys, layer.values), other, strict=True):
            assert torch.equal(tensor, batch[:, :, :33] * MASK[:, None, :33, None])
    cache.crop(-1)
    want = model.generate(IDS, attention_mask=MASK, past_key_values=cache, **GREEDY).sequences
    got = model.generate(IDS, attention_mask=MASK, past_key_values=hit.cache, **GREEDY).sequences
    assert torch.equal(got, want)


def test_the_row_of_which_the_least_is_stored_decides(store: KVStore, model: Any) -> None:
    layers = cache_layers(_cache(model))
    for row, count in enumerate((29, 5, 20)):  # they end in columns 33, 18 and 20
        begin = COLUMNS - LENGTHS[row]
        part = [
            (k[row : row + 1, :, begin : begin + count], v[row : row + 1, :, begin : begin + count]) for k, v in layers
        ]
        store.put(_row(row)[:count], part)
    hit = get_batch(store, IDS, attention_mask=MASK)
    assert hit is not None
    assert (hit.columns, hit.tokens) == (18, (14, 5, 18))
    assert hit.cache.get_seq_length() == 18


def test_a_batch_in_which_one_row_is_not_stored_may_have_nothing(store: KVStore, model: Any) -> None:
    put_batch(store, IDS[:2], [(k[:2], v[:2]) for k, v in cache_layers(_cache(model))], attention_mask=MASK[:2])
    assert get_batch(store, IDS, attention_mask=MASK) is None
    assert get_batch(store, IDS[:2], attention_mask=MASK[:2], namespace=b"other") is None


def test_what_generate_returned_may_be_put_with_the_mask_of_its_tokens(store: KVStore, model: Any) -> None:
    """Its cache holds a column less than its sequences; a row that ended early has padding behind it, too."""
    out = model.generate(IDS, attention_mask=MASK, **GREEDY)
    mask = torch.cat([MASK, torch.ones(3, 7, dtype=torch.int64)], 1)
    mask[1, COLUMNS + 3 :] = 0
    done = put_batch(store, out.sequences, out.past_key_values, attention_mask=mask, ttl=100, pin=True)
    assert [result.tokens for result in done] == [30 + 6, 21 + 3, 34 + 6]
    assert all(result.pinned for result in done)
    assert store.contains(out.sequences[1, 13:].tolist()) == 24
    again = generate(model, out.sequences, store=store, attention_mask=mask, **GREEDY) if mask.all() else None
    assert again is None


def test_a_static_cache_is_cut_to_the_columns_it_holds(store: KVStore, model: Any) -> None:
    put_batch(store, IDS, _cache(model, StaticCache(config=model.config, max_cache_len=64)), attention_mask=MASK)
    assert [store.contains(_row(row)) for row in range(3)] == list(LENGTHS)


def test_rows_that_are_padding_in_the_columns_of_the_cache_are_left_out(store: KVStore, model: Any) -> None:
    first = [(k[:, :, :10], v[:, :, :10]) for k, v in cache_layers(_cache(model))]
    done = put_batch(store, IDS, first, attention_mask=MASK)
    assert [result.tokens for result in done] == [6, 10]
    assert store.contains(_row(1)) == 0


def _put(store: KVStore, layers: Any, mask: torch.Tensor = MASK) -> list[PutResult]:
    return put_batch(store, IDS, layers, attention_mask=mask)


def test_what_does_not_fit_is_refused_and_nothing_is_stored(store: KVStore, model: Any) -> None:
    layers = cache_layers(_cache(model))
    with pytest.raises(LayoutMismatch, match=r"K of layer 0: expected \[rows=3"):
        _put(store, [(k[:2], v[:2]) for k, v in layers])
    with pytest.raises(LayoutMismatch, match="V of layer 0: expected"):
        _put(store, [(k, v[:, :, 1:]) for k, v in layers])
    with pytest.raises(LayoutMismatch, match="1 to 34 tokens"):
        _put(store, [(torch.cat([k, k], 2), torch.cat([v, v], 2)) for k, v in layers])
    with pytest.raises(LayoutMismatch, match="layers"):
        _put(store, layers[:1])
    with pytest.raises(LayoutMismatch, match="dtype"):
        _put(store, [(k.half(), v.half()) for k, v in layers])
    with pytest.raises(ValueError, match="padding between"):
        _put(store, layers, MASK.index_fill(1, torch.tensor([30]), 0))
    cache = _cache(model)
    cache.is_approximate = True
    with pytest.raises(UnsupportedCache, match="approximate"):
        _put(store, cache)
    assert store.stats()["index"]["tokens"] == 0
