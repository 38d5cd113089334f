"""The kernel that copies rows, on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernelruns import needs_triton, on_a_gpu

from kvstore.codecs import KVView
from kvstore.codecs.device import copy_on_cpu, move
from kvstore.core.layout import KVLayout

pytestmark = needs_triton


def _cache(layout: KVLayout, tokens: int, seed: int, gap: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def tensor(heads: int, dim: int) -> torch.Tensor:
        values = torch.randn(heads, tokens + gap, dim, device="cuda", generator=generator)
        return values.to(getattr(torch, layout.dtype))[:, :tokens]

    return [(tensor(x.heads, x.key_dim), tensor(x.heads, x.value_dim)) for x in layout.layers]


@on_a_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(8, 128, 64), (3, 80, 37), (1, 5, 1), (4, 64, 9000)])
def test_rows_go_from_cache_to_cache_to_the_host_and_back(heads: int, dim: int, tokens: int, dtype: str) -> None:
    from kvstore.codecs.copy_kernels import launch

    gpu = torch.device("cuda", torch.cuda.current_device())
    assert launch.works(gpu)
    layout = KVLayout.uniform(5, heads, dim, dtype)
    kv, out = _cache(layout, tokens, 1, gap=3), _cache(layout, tokens, 2, gap=1)
    source, target = KVView.of_layers(layout, kv), KVView.of_layers(layout, out)
    assert source.places is not None
    assert source.devices == {gpu}
    move(source, target)
    assert all(torch.equal(a, b) for pair, other in zip(kv, out, strict=True) for a, b in zip(pair, other, strict=True))
    at, count = tokens // 3, tokens - tokens // 3
    packed = memoryview(bytearray(count * layout.bytes_per_token))
    source.narrow(at, count).pack(packed)
    copied = copy_on_cpu(source.narrow(at, count))
    again = memoryview(bytearray(len(packed)))
    copied.pack(again)
    assert packed == again
    back = _cache(layout, count, 3)
    move(copied, KVView.of_layers(layout, back))
    for pair, other in zip(kv, back, strict=True):
        assert all(torch.equal(a[:, at:], b) for a, b in zip(pair, other, strict=True))


@on_a_gpu
def test_threads_copy_at_the_same_time() -> None:
    layout = KVLayout.uniform(6, 2, 64)
    caches = [_cache(layout, 100 + n, n) for n in range(16)]

    def copied(kv: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
        torch.cuda.current_stream().synchronize()
        move(KVView.of_layers(layout, kv), KVView.of_layers(layout, out))
        return out

    with ThreadPoolExecutor(8) as pool:
        for kv, out in zip(caches, pool.map(copied, caches), strict=True):
            pairs = zip(kv, out, strict=True)
            assert all(torch.equal(a, b) for pair, other in pairs for a, b in zip(pair, other, strict=True))
