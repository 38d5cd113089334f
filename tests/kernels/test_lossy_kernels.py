"""The kernels of the lossy mode on a GPU. What compiling them takes is in test_predict_kernels.py."""

from __future__ import annotations

import lossycases
import numpy as np
import pytest
import torch
from kernelruns import needs_triton, on_a_gpu
from lossycases import SHAPES, Shapes, case_of

from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.lossy import LossyMode
from kvstore.errors import CodecError

pytestmark = needs_triton


def test_the_launch_code_refuses_devices_that_run_no_kernels() -> None:
    from kvstore.codecs.predictive.lossy_kernels.device import DeviceLossyModel

    model = lossycases.model_of([(1, 4, 4)], True, 0)
    with pytest.raises(CodecError, match="kernels"):
        DeviceLossyModel(model, "cpu")
    assert not LossyMode(model).decodes_on(torch.device("cpu"))


@on_a_gpu
@pytest.mark.parametrize("steps", [(0.02, 0.05), (0.2, 0.1), (1.5, 3.0)])
@pytest.mark.parametrize("shapes", [*SHAPES, [(8, 128, 128)] * 3])
def test_the_gpu_reads_what_the_scalar_loops_read(shapes: Shapes, steps: tuple[float, float]) -> None:
    gpu, case = torch.device("cuda", 0), case_of(shapes, True, 37, 2, steps, 5)
    codec = PredictiveCodec(case.model.base, case.model, steps)
    info = BlockInfo(case.model.layout, case.block.tokens.numpy().astype(np.uint32), case.block.start)
    payload, right = memoryview(b"".join(case.sections)), lossycases.decoded(case, "scalar")
    assert codec.decodes_on(gpu, "bfloat16", payload, case.sizes)
    for _ in range(3):  # programs run in another order each time
        tensors = [tensor.cuda() for tensor in lossycases.target_of(case.model, 37)[1]]
        codec.decode(
            info,
            payload,
            case.sizes,
            KVView.of_layers(case.model.layout, list(zip(tensors[::2], tensors[1::2], strict=True))),
        )
        found = [x.cpu().transpose(0, 1).flatten(1).contiguous().view(torch.int16).long() & 0xFFFF for x in tensors]
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert codec.decodes_on(gpu, "bfloat16", payload, case.sizes)  # nothing failed, so that the kernels did it
