"""The kernels of the predictive and the donor codec: compiled for GPUs that are not there, and on one that is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from kernelruns import FULL, Compiled, needs_triton, on_a_gpu, the_gpu_codes_as_the_cpu
from predictcases import VOCABULARY, block_of, encoded, model_of, native, view_of

pytestmark = needs_triton
SCRIPT = "compiled_predict.py"
OF_GROUPS = [f"predict/{kernel}" for kernel in ("join", "split_groups", "pack_groups")]
OF_GROUPS += [f"donor/{kernel}" for kernel in ("foretell", "split", "join")]
WITH_PRODUCTS = [f"predict/{kernel}" for kernel in ("dense", "sums", "join", "split_groups")]
WITH_PRODUCTS += ["donor/foretell", "donor/join", "lossy/sums"]
WITH_FLOATS = [f"predict/{kernel}" for kernel in ("dense", "split", "finish", "join", "split_groups")]
WITH_FLOATS += [f"donor/{kernel}" for kernel in ("foretell", "measure_rows", "measure_columns", "correct", "join")]
WITH_FLOATS += [f"lossy/{kernel}" for kernel in ("take", "values", "finish")]


@pytest.mark.slow
def test_compiled_kernels_keep_everything_in_registers(compiled: Compiled) -> None:
    compiled.keep_everything_in_registers(198 if FULL else 4)
    for row in compiled.rows:
        # Of 64 Ki registers, two programs of a product, and four of any other, have their share; of groups, for which
        # there is a program a block, one.
        share = 1 if row["kernel"] in OF_GROUPS else 2 if row["kernel"] in WITH_PRODUCTS else 4
        assert row["registers"] * 32 * row["warps"] * share <= 1 << 16, row
        assert row["shared_bytes"] <= 80 << 10, row


def test_fused_operations_would_be_seen(compiled: Compiled) -> None:
    assert compiled.control["fused"] > 0


def test_products_of_bytes_are_made_by_the_matrix_units(compiled: Compiled) -> None:
    kinds = {"sm_80": ["mma.sync"], "sm_90": ["wgmma.mma_async"], "sm_100": ["tcgen05.mma"]}
    for row in compiled.rows:
        product = row["kernel"] in WITH_PRODUCTS and not row.get("FIRST", not row.get("GROUPED", True))
        assert row["products"] == (kinds[row["arch"]] if product else []), row


def test_every_floating_point_operation_is_rounded_by_itself(compiled: Compiled) -> None:
    """As on the CPU: nothing fused, small numbers not flushed to zero."""
    for row in compiled.rows:
        assert (row["fused"], row["flushed"]) == (0, 0), row
        if row["kernel"] in WITH_FLOATS:
            assert row["multiplications"] > 0, row


def test_the_launch_code_refuses_devices_that_run_no_kernels() -> None:
    from kvstore.codecs.predictive.kernels.launch import DeviceModel
    from kvstore.errors import CodecError

    with pytest.raises(CodecError, match="kernels"):
        DeviceModel(model_of([(1, 4, 4)], True, 0), "cpu")


@on_a_gpu
@pytest.mark.parametrize("kind", ["predicted", "special"])
@pytest.mark.parametrize("shapes", [[(8, 128, 128)] * 4, [(2, 64, 64)] * 3, [(3, 80, 48)] * 3, [(1, 2, 1)] * 2])
def test_the_gpu_s_bytes_are_the_cpu_s(shapes: list[tuple[int, int, int]], kind: str) -> None:
    from kvstore.codecs.predictive.kernels.launch import DeviceModel, decode_blocks, encode_blocks

    model = model_of(shapes, True, 5)
    device, coder = DeviceModel(model, "cuda"), native(model)
    counts, starts = [64, 64, 37, 1], [0, 64, 4000, 7000]
    tokens = [np.random.default_rng(n).integers(0, VOCABULARY + 20, n).astype(np.int64) for n in counts]
    views = [view_of(model, block_of(model, kind, *of, 5)) for of in zip(tokens, starts, strict=True)]
    right = [encoded(coder, *of, "scalar") for of in zip(tokens, starts, views, strict=True)]
    encode = partial(encode_blocks, device)
    the_gpu_codes_as_the_cpu(encode, partial(decode_blocks, device), tokens, starts, views, right)
