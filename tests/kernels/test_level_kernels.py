"""The kernels of the predictive codec's levels on a GPU. What compiling them takes is in test_predict_kernels.py."""

from __future__ import annotations

from functools import partial

import levelcases
import numpy as np
import pytest
import torch
from kernelruns import needs_triton, on_a_gpu, the_gpu_codes_as_the_cpu
from predictcases import VOCABULARY, view_of
from predictcases import model_of as first_model_of

from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.predictive.codec import LevelModes, PredictiveCodec
from kvstore.codecs.predictive.levels.mode import LevelMode, native_model
from kvstore.codecs.predictive.levels.model import LEVELS
from kvstore.errors import CodecError

pytestmark = needs_triton
SHAPES = [[(8, 128, 128)] * 3, [(2, 64, 64)] * 3, [(3, 80, 48)] * 3, [(1, 2, 1)] * 2]


def test_the_launch_code_refuses_devices_that_run_no_kernels() -> None:
    from kvstore.codecs.predictive.levels.kernels.launch import DeviceLevelModel

    model = levelcases.model_of([(1, 4, 4)], True, 1, 0)
    with pytest.raises(CodecError, match="kernels"):
        DeviceLevelModel(model, "cpu")
    assert not LevelMode(model).codes_on(torch.device("cpu"))


@on_a_gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_gpu_s_bytes_are_the_cpu_s(shapes: levelcases.Shapes, level: int) -> None:
    from kvstore.codecs.predictive.levels.kernels.launch import DeviceLevelModel, decode_blocks, encode_blocks

    model = levelcases.model_of(shapes, True, level, 5)
    device, coder = DeviceLevelModel(model, "cuda"), native_model(model)
    counts, starts, kinds = [64, 70, 37, 1], [0, 64, 4000, 7000], ["predicted", "special", "random", "special"]
    tokens = [np.random.default_rng(n).integers(0, VOCABULARY + 20, n).astype(np.int64) for n in counts]
    made = [levelcases.block_of(model, *of, 5) for of in zip(kinds, tokens, starts, strict=True)]
    views = [view_of(model, block) for block in made]
    right = [levelcases.encoded(coder, *of, "scalar") for of in zip(tokens, starts, views, strict=True)]
    encode = partial(encode_blocks, device)
    the_gpu_codes_as_the_cpu(encode, partial(decode_blocks, device), tokens, starts, views, right)


@on_a_gpu
@pytest.mark.parametrize("level", LEVELS)
def test_a_codec_of_a_level_codes_on_the_gpu(level: int) -> None:
    shapes, gpu = SHAPES[1], torch.device("cuda", 0)
    model, first = levelcases.model_of(shapes, True, level, 5), first_model_of(shapes, True, 5)
    levels = LevelModes((level,), lambda _: model)
    codec, plain = PredictiveCodec(first, levels=levels, level=level), PredictiveCodec(first, levels=levels)
    assert codec.codes_on(gpu, "bfloat16")
    tokens = np.arange(37, dtype=np.uint32)
    view = view_of(model, levelcases.block_of(model, "predicted", tokens, 100, 5))
    info, tensors = BlockInfo(model.layout, tokens, 100), [tensor.cuda() for tensor in view.tensors()]
    there = list(zip(tensors[::2], tensors[1::2], strict=True))
    outs = [memoryview(bytearray(codec.bound(info))) for _ in range(2)]
    pair = zip((view, KVView.of_layers(info.layout, there)), outs, strict=True)
    sizes, again = [codec.encode(info, of, out) for of, out in pair]
    assert sizes is not None
    assert sizes == again
    payload = outs[0][: sum(sizes)]
    assert outs[1][: len(payload)] == payload
    for one in (codec, plain):
        assert one.decodes_on(gpu, "bfloat16", payload, sizes)
        room = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in there]
        one.decode(info, payload, sizes, KVView.of_layers(info.layout, room))
        found = [tensor for pair in room for tensor in pair]
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, tensors, strict=True))
        assert one.decodes_on(gpu, "bfloat16", payload, sizes)
