"""The predictive codec on the device that holds the tensors: on a GPU where there is one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kernelruns import needs_triton, on_a_gpu
from kvcases import same_kv
from predictcases import VOCABULARY, block_of, model_of, view_of

from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.predictive.codec import PredictiveCodec

pytestmark = needs_triton


def test_without_the_interpreter_the_cpu_is_no_device() -> None:
    model = model_of([(1, 4, 4)], True, 0)
    assert not PredictiveCodec(model).codes_on(torch.device("cpu"), "bfloat16")


@on_a_gpu
@pytest.mark.parametrize("shapes", [[(8, 128, 128)] * 4, [(3, 80, 48)] * 3])
def test_the_gpu_passes_its_trial_and_writes_the_cpu_s_bytes(shapes: list[tuple[int, int, int]]) -> None:
    model = model_of(shapes, True, 5)
    codec = PredictiveCodec(model)
    assert codec.codes_on(torch.device("cuda", 0), "bfloat16")
    for count, start in ((64, 64), (37, 4000), (1, 7000)):
        tokens = np.random.default_rng(count).integers(0, VOCABULARY + 20, count).astype(np.uint32)
        view = view_of(model, block_of(model, "predicted", tokens, start, 5))
        info, tensors = BlockInfo(model.layout, tokens, start), [tensor.cuda() for tensor in view.tensors()]
        there = list(zip(tensors[::2], tensors[1::2], strict=True))
        outs = [memoryview(bytearray(codec.bound(info))) for _ in range(2)]
        sizes = [
            codec.encode(info, of, out)
            for of, out in zip((view, KVView.of_layers(info.layout, there)), outs, strict=True)
        ]
        assert sizes[0] == sizes[1]
        assert sizes[0] is not None
        payload = outs[0][: sum(sizes[0])]
        assert outs[1][: len(payload)] == payload
        room = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in there]
        codec.decode(info, payload, sizes[0], KVView.of_layers(info.layout, room))
        assert same_kv([(k.cpu(), v.cpu()) for k, v in room], [(k.cpu(), v.cpu()) for k, v in there])
        assert codec.codes_on(torch.device("cuda", 0), "bfloat16")


@on_a_gpu
def test_blocks_that_threads_code_at_the_same_time_are_coded_as_alone() -> None:
    model = model_of([(2, 64, 64)] * 3, True, 5)
    codec, gpu = PredictiveCodec(model), torch.device("cuda", 0)
    assert codec.codes_on(gpu, "bfloat16")
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 65, 40).tolist()

    def coded(number: int) -> bool:
        count = counts[number]
        tokens = np.random.default_rng(number).integers(0, VOCABULARY, count).astype(np.uint32)
        view = view_of(model, block_of(model, "predicted", tokens, 64 * number, number))
        info = BlockInfo(model.layout, tokens, 64 * number)
        tensors = [tensor.cuda() for tensor in view.tensors()]
        there = list(zip(tensors[::2], tensors[1::2], strict=True))
        torch.cuda.current_stream().synchronize()
        outs = [memoryview(bytearray(codec.bound(info))) for _ in range(2)]
        right, sizes = (
            codec.encode(info, view, outs[0]),
            codec.encode(info, KVView.of_layers(info.layout, there), outs[1]),
        )
        assert right is not None
        assert right == sizes
        payload = outs[1][: sum(right)]
        assert payload == outs[0][: len(payload)]
        room = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in there]
        torch.cuda.current_stream().synchronize()
        codec.decode(info, payload, right, KVView.of_layers(info.layout, room))
        return same_kv([(k.cpu(), v.cpu()) for k, v in room], [(k.cpu(), v.cpu()) for k, v in there])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(coded, range(len(counts))))
    assert codec.codes_on(gpu, "bfloat16")
