"""The splitzip kernels on a GPU: the CPU's bytes at full size, graphs, and coding beside what the GPU computes."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvstore.codecs.splitzip.codec import SplitZipCodec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def _layers(count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Layers:
    generator = torch.Generator("cuda").manual_seed(count + tokens)

    def tensor() -> torch.Tensor:
        scale = torch.randn(dim, device="cuda", generator=generator).exp()
        values = torch.randn(heads, tokens, dim, device="cuda", generator=generator) * scale
        values.view(-1)[::1009] = 1e-7  # escapes
        values.view(-1)[::5003] = 0
        return values.to(dtype)

    return [(tensor(), tensor()) for _ in range(count)]


def _on_cpu(layers: Layers) -> list[bytes]:
    """What the CPU's codec makes of the layers."""
    from kvstore.codecs import BlockInfo, KVView
    from kvstore.core.layout import KVLayout, LayerLayout

    shapes = tuple(LayerLayout(k.shape[0], k.shape[2], v.shape[2]) for k, v in layers)
    layout = KVLayout(shapes, str(layers[0][0].dtype).removeprefix("torch."))
    info = BlockInfo(layout, np.arange(layers[0][0].shape[1], dtype=np.uint32), 0)
    out = bytearray(SplitZipCodec().bound(info))
    sizes = SplitZipCodec().encode(
        info, KVView.of_layers(layout, [(k.cpu(), v.cpu()) for k, v in layers]), memoryview(out)
    )
    assert sizes is not None
    ends = list(itertools.accumulate(sizes))
    return [bytes(out[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _coded(buffer: torch.Tensor, offsets: Sequence[int], sizes: torch.Tensor) -> list[bytes]:
    layers = zip(offsets, sizes.tolist(), strict=False)
    return [buffer[begin : begin + size].cpu().numpy().tobytes() for begin, size in layers]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "heads", "tokens", "dim"), [(36, 8, 64, 128), (5, 3, 1000, 96), (1, 1, 1 << 19, 64)])
def test_the_gpu_s_bytes_are_the_cpu_s(count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> None:
    from kvstore.codecs.splitzip.kernels.launch import decode_block, encode_block, plan_block

    layers = _layers(count, heads, tokens, dim, dtype)
    plan = plan_block(layers)
    expected = _on_cpu(layers)
    for _ in range(3):  # programs run in another order each time
        buffer, sizes = encode_block(layers, plan)
        found = _coded(buffer, plan.offsets, sizes)
        assert found == expected
    out = [(torch.empty_like(k), torch.empty_like(v)) for k, v in layers]
    assert not decode_block(buffer, plan.offsets, tokens, out).any()
    for pair, other in zip(layers, out, strict=True):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(pair, other, strict=True))


def test_a_tensor_of_a_quarter_of_a_billion_values_comes_back() -> None:
    from kvstore.codecs.splitzip.kernels.launch import decode_block, encode_block, plan_block

    layers = _layers(1, 1, 1 << 20, 128)
    plan = plan_block(layers)
    buffer, sizes = encode_block(layers, plan)
    out = [(torch.empty_like(k), torch.empty_like(v)) for k, v in layers]
    assert not decode_block(buffer, plan.offsets, 1 << 20, out).any()
    assert torch.equal(out[0][0].view(torch.int16), layers[0][0].view(torch.int16))
    assert torch.equal(out[0][1].view(torch.int16), layers[0][1].view(torch.int16))
    assert sizes.item() < 0.77 * 4 * (1 << 27)


def test_encoding_can_be_captured_in_a_graph() -> None:
    from kvstore.codecs.splitzip.kernels.launch import encode_block, plan_block

    layers = _layers(4, 2, 64, 64)
    plan = plan_block(layers)
    encode_block(layers, plan)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer, sizes = encode_block(layers, plan)
    for tensor in itertools.chain.from_iterable(layers):
        tensor.copy_(tensor.flip(1))
    graph.replay()
    graph.replay()
    found = _coded(buffer, plan.offsets, sizes)
    assert found == _on_cpu(layers)


def test_a_block_is_coded_and_copied_to_the_host_while_the_device_computes() -> None:
    """What a demotion is: it waits for nothing that is launched on other streams."""
    from kvstore.codecs import KVView
    from kvstore.codecs.splitzip.kernels.blocks import encode_into
    from kvstore.core.layout import KVLayout

    layers = _layers(6, 2, 64, 64)
    expected = b"".join(_on_cpu(layers))
    view = KVView.of_layers(KVLayout.uniform(6, 2, 64), layers)
    out = torch.empty(2 * len(expected), dtype=torch.uint8, pin_memory=True)
    assert encode_into(view, memoryview(out.numpy())) is not None  # compiles
    out.zero_()
    computing = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(computing):
        torch.cuda._sleep(4_000_000_000)  # clock cycles: seconds
        done = computing.record_event()
    sizes = encode_into(view, memoryview(out.numpy()))
    assert not done.query(), "the demotion waited for the computation, or that took no time"
    assert sizes is not None
    assert out.numpy()[: sum(sizes)].tobytes() == expected
    torch.cuda.synchronize()
