"""The splitzip kernels, compiled for GPUs that are not there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kernelruns import FULL, HANGS_S, Compiled, needs_triton

pytestmark = needs_triton
SCRIPT = "compiled.py"


@pytest.mark.slow
def test_compiled_kernels_keep_everything_in_registers(compiled: Compiled) -> None:
    compiled.keep_everything_in_registers(24 if FULL else 6)


def test_compiled_kernels_of_aligned_bf16_let_four_programs_share_a_multiprocessor(compiled: Compiled) -> None:
    for row in compiled.rows:
        if row["dtype"] == "bfloat16" and row["layout"] in ("flat", "strided", "uneven"):
            assert row["registers"] <= 64, row
            assert row["shared_bytes"] <= 16 << 10, row
            # 16 values a thread are two loads of 16 bytes (decoding: one of the plane, and half a one of the codes).
            assert row["wide_loads"] >= (2 if row["kernel"] == "splitzip/encode" else 1), row
            assert row["wide_stores"] >= (1 if row["kernel"] == "splitzip/encode" else 2), row


def test_predecessors_are_read_by_one_load(compiled: Compiled) -> None:
    """Two would let threads of one program see different states, and go different ways."""
    assert {row["polls"] for row in compiled.rows if row["kernel"] == "splitzip/encode"} == {1}


def test_the_package_imports_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import kvstore, kvstore.codecs.splitzip.kernels"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=HANGS_S)
