"""The splitzip kernels without a GPU: interpreted against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from kernelruns import compiled_by, run_script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
GROUPS = ["lengths", "contents", "strides", "dtypes", "prefixes", "hostile", "look_back"]


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_give_the_reference_s_bytes_and_values(group: str) -> None:
    run_script("interpreted.py", group)


def test_an_unknown_group_fails() -> None:
    with pytest.raises(AssertionError, match="KeyError"):
        run_script("interpreted.py", "nothing")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compiled_by(tmp_path_factory, "compiled.py")


def test_compiled_kernels_keep_everything_in_registers(compiled: dict[str, Any]) -> None:
    assert len(compiled["kernels"]) == 24
    for row in compiled["kernels"]:
        assert (row["stack_bytes"], row["spill_bytes"], row["local_bytes"]) == (0, 0, 0), row


def test_spills_would_be_seen(compiled: dict[str, Any]) -> None:
    control = compiled["control"]
    assert control["stack_bytes"] > 0
    assert control["spill_bytes"] > 0


def test_compiled_kernels_of_aligned_bf16_let_four_programs_share_a_multiprocessor(compiled: dict[str, Any]) -> None:
    for row in compiled["kernels"]:
        if row["dtype"] == "bfloat16" and row["layout"] in ("flat", "strided", "uneven"):
            assert row["registers"] <= 64, row
            assert row["shared_bytes"] <= 16 << 10, row
            # 16 values a thread are two loads of 16 bytes (decoding: one of the plane, and half a one of the codes).
            assert row["wide_loads"] >= (2 if row["kernel"] == "splitzip/encode" else 1), row
            assert row["wide_stores"] >= (1 if row["kernel"] == "splitzip/encode" else 2), row


def test_predecessors_are_read_by_one_load(compiled: dict[str, Any]) -> None:
    """Two would let threads of one program see different states, and go different ways."""
    assert {row["polls"] for row in compiled["kernels"] if row["kernel"] == "splitzip/encode"} == {1}


def test_the_package_imports_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import kvstore, kvstore.codecs.splitzip.kernels"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
