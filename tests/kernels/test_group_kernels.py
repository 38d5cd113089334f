"""The kernels of the donor codec's mode in groups on a GPU. What compiling them takes is in test_predict_kernels.py."""

from __future__ import annotations

import donorblocks
import groupcases
import pytest
import torch
from donorcases import Shapes, case_of
from kernelruns import needs_triton, on_a_gpu
from predictcases import laid_out

from kvstore.codecs import KVView
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.groups.mode import GroupsMode
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive.levels.model import LEVELS
from kvstore.errors import CodecError

pytestmark = needs_triton
SHAPES: list[Shapes] = [[(8, 128, 128)] * 3, [(2, 64, 64)] * 3, [(3, 80, 48)] * 3, [(1, 2, 1)] * 2]


def test_the_launch_code_refuses_devices_that_run_no_kernels() -> None:
    from kvstore.codecs.donor.groups.kernels.launch import DeviceGroupsModel

    model = groupcases.model_of([(1, 4, 4)], True, 1, 0)
    with pytest.raises(CodecError, match="kernels"):
        DeviceGroupsModel(model, "cpu")
    assert not GroupsMode(lambda: model).codes_on(torch.device("cpu"))


@on_a_gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_gpu_s_bytes_are_the_cpu_s(shapes: Shapes, level: int) -> None:
    gpu, model = torch.device("cuda", 0), groupcases.model_of(shapes, True, level, 5)
    codec = DonorCodec(EntropyCodec(), groups=lambda: model)
    assert codec.codes_on(gpu, "bfloat16")
    for number, (kind, count) in enumerate((("near", 64), ("special", 70), ("random", 37), ("same", 1))):
        case = donorblocks.apart(case_of(shapes, True, kind, count, number))
        info, (donors, keep) = donorblocks.info_of(case), donorblocks.wholes(case)
        rows = [DonorRows.of(span, donors[span.donor]) for span in case.table.spans]
        view = laid_out(case.layout, case.block)
        tensors = [tensor.cuda() for tensor in view.tensors()]
        there = list(zip(tensors[::2], tensors[1::2], strict=True))
        outs = [memoryview(bytearray(codec.bound(info))) for _ in range(2)]
        pair = zip((view, KVView.of_layers(case.layout, there)), outs, strict=True)
        sizes, again = [codec.encode(info, of, rows, out) for of, out in pair]
        assert sizes is not None
        assert sizes == again
        payload = outs[0][: sum(sizes)]
        assert outs[1][: len(payload)] == payload
        assert codec.decodes_on(gpu, "bfloat16", payload, sizes)
        room = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in there]
        codec.decode(info, payload, sizes, donors, KVView.of_layers(case.layout, room))
        found = [tensor for pair in room for tensor in pair]
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, tensors, strict=True))
        assert codec.codes_on(gpu, "bfloat16")  # nothing failed, so that the kernels did it
        del keep
