"""Keys and values in vLLM's paged memory: what is read out is what was written, in whatever order a page has them."""

from __future__ import annotations

import pytest
import torch

from kvstore import UnsupportedModel
from kvstore.integrations.vllm.paged import PagedCache, PageOrder, order_of, paged_cache

HEADS, DIM, ROWS, BLOCKS = 3, 4, 8, 6
SHUFFLED = torch.randperm(ROWS * DIM, generator=torch.Generator().manual_seed(3))
# For each place of a page, which number of [rows, dim] it has.
PAGES = {
    "rows": torch.arange(ROWS * DIM),
    "columns": torch.arange(ROWS * DIM).view(ROWS, DIM).t().flatten(),
    "any": SHUFFLED,
}


def order(kind: str) -> PageOrder:
    return PageOrder.of(PAGES[kind], ROWS, DIM)


def sequence(tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two layers, `[heads, tokens, dim]`."""
    made = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(HEADS, tokens, DIM, generator=made).bfloat16() for _ in "kv") for _ in "ab"]  # type: ignore[misc]


def cache(orders: tuple[PageOrder, PageOrder] | None, block_tokens: int = ROWS, strided: bool = False) -> PagedCache:
    shape = (BLOCKS * block_tokens // ROWS, HEADS, ROWS, 2 * DIM)
    made = {}
    for name in ("a", "b"):
        if strided:  # tokens before heads, as on a GPU
            made[name] = torch.zeros(shape[0], ROWS, HEADS, 2 * DIM).bfloat16().transpose(1, 2)
        else:
            made[name] = torch.zeros(shape).bfloat16()
    return paged_cache(made, ["a", "b"], block_tokens, orders)


@pytest.mark.parametrize("kind", PAGES)
def test_the_order_of_a_page_is_found_by_trial(kind: str) -> None:
    def write(keys: torch.Tensor, values: torch.Tensor, into: torch.Tensor) -> None:
        page = into.view(into.shape[0], HEADS, -1)
        page[0, :, : ROWS * DIM] = keys.transpose(0, 1).flatten(1)[:, PAGES[kind]]
        page[0, :, ROWS * DIM :] = values.transpose(0, 1).flatten(1)

    keys, values = order_of(write, (2, HEADS, ROWS, 2 * DIM), torch.bfloat16)
    assert (keys.kind, values.kind) == (kind, "rows")


def test_a_page_that_loses_numbers_is_refused() -> None:
    def write(keys: torch.Tensor, values: torch.Tensor, into: torch.Tensor) -> None:
        into[0] = 1.0

    with pytest.raises(UnsupportedModel, match="do not have each number"):
        order_of(write, (2, HEADS, ROWS, 2 * DIM), torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="only 16-bit types"):
        order_of(write, (2, HEADS, ROWS, 2 * DIM), torch.float32)


@pytest.mark.parametrize("kind", [*PAGES, "gpu", "gpu-strided"])
@pytest.mark.parametrize("block_tokens", [ROWS, 3 * ROWS])
def test_what_is_written_is_read(kind: str, block_tokens: int) -> None:
    """Also where a block of the scheduler is several pages, and the blocks lie anywhere."""
    orders = (order(kind), order("rows")) if kind in PAGES else None
    paged, tokens = cache(orders, block_tokens, strided=kind == "gpu-strided"), sequence(3 * block_tokens)
    batched = [(k[None], v[None]) for k, v in tokens]
    paged.write([4, 0, 5], batched, 0, 3 * block_tokens)
    for start, end in ((0, 3 * block_tokens), (block_tokens, 2 * block_tokens), (3, 2 * block_tokens - 1), (9, 10)):
        blocks = [4, 0, 5][start // block_tokens : -(-end // block_tokens)]
        for (k, v), (wanted_k, wanted_v) in zip(paged.read(blocks, start, end), tokens, strict=True):
            assert torch.equal(k, wanted_k[:, start:end])
            assert torch.equal(v, wanted_v[:, start:end])
            assert k.is_contiguous()


@pytest.mark.parametrize("kind", ["columns", "any", "gpu"])
def test_only_the_named_blocks_are_written(kind: str) -> None:
    paged = cache((order(kind), order(kind)) if kind in PAGES else None)
    paged.write([2], [(k[None], v[None]) for k, v in sequence(3 * ROWS)], ROWS, 2 * ROWS)
    for layer in paged.layers:
        untouched = layer.cache[[0, 1, 3, 4, 5]]
        assert not untouched.any()
        assert layer.cache[2].any()
    (k, _), _ = paged.read([2], ROWS, 2 * ROWS)
    assert torch.equal(k, sequence(3 * ROWS)[0][0][:, ROWS : 2 * ROWS])


def test_copies_do_not_follow_what_is_written_later() -> None:
    """The next step overwrites the blocks while the store still takes what was read."""
    paged = cache(None)
    paged.write([1], [(k[None], v[None]) for k, v in sequence(ROWS)], 0, ROWS)
    (k, _), _ = paged.read([1], 0, ROWS)
    paged.write([1], [(k[None], v[None]) for k, v in sequence(ROWS, seed=1)], 0, ROWS)
    assert torch.equal(k, sequence(ROWS)[0][0])


@pytest.mark.parametrize("bad", [None, torch.zeros(4, 8, 16), torch.zeros(4, 3, 8, 7), torch.zeros(4, 3, 5, 8)])
def test_caches_of_other_shapes_are_refused_by_name(bad: torch.Tensor | None) -> None:
    with pytest.raises(UnsupportedModel, match="b: expected a cache"):
        paged_cache({"a": torch.zeros(4, 3, 8, 8), "b": bad}, ["a", "b"], ROWS, None)


def test_bytes_of_a_token() -> None:
    assert cache(None).bytes_per_token == 2 * HEADS * 2 * DIM * 2
