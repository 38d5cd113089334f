"""Scripts about GPU kernels, each in a process of its own: triton decides at its import whether it interprets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from length import FULL
from once import once

from kvstore.codecs import KVView

FOLDER = Path(__file__).parents[1] / "kernels"
HANGS_S = 3000.0  # what no machine takes, however loaded

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
_with_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def on_a_gpu(test: Any) -> Any:
    """Marks a test that needs a GPU: skipped where there is none, and run by `make gpu` where there is one."""
    return pytest.mark.gpu(_with_cuda(test))


def run_script(script: str, *arguments: str) -> str:
    """What a script of tests/kernels prints; `AssertionError` with what it says where it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Whoever uses the kernels would see every warning that compiling them gives.
    command = [sys.executable, "-W", "error", str(FOLDER / script), *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def the_gpu_codes_as_the_cpu(
    encode_blocks: Callable[..., Any],
    decode_blocks: Callable[..., Any],
    tokens: list[np.ndarray],
    starts: list[int],
    views: list[KVView],
    right: list[list[bytes]],
) -> None:
    """The launch code of a model on a GPU writes the layers that are right, decodes them, and sees a wrong bit.

    encode_blocks, decode_blocks: of the launch module, with the model.
    """
    blocks = [[t.cuda() for t in view.tensors()] for view in views]
    layers = [list(zip(of[::2], of[1::2], strict=True)) for of in blocks]
    for _ in range(3):  # programs run in another order each time
        payload, sizes = encode_blocks(layers, tokens, starts, [1 << 40] * 4)
        assert sizes == [tuple(map(len, of)) for of in right]
        assert payload.cpu().numpy().tobytes() == b"".join(b for of in right for b in of)
        out = [[(torch.empty_like(k), torch.empty_like(v)) for k, v in of] for of in layers]
        assert not decode_blocks(payload, [of for of in sizes if of], tokens, starts, out).any()
        for mine, theirs in zip(out, layers, strict=True):
            for pair, other in zip(mine, theirs, strict=True):
                assert all(
                    torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(pair, other, strict=True)
                )
    payload[payload.numel() // 2] ^= 1
    assert decode_blocks(payload, [of for of in sizes if of], tokens, starts, out).any()


class Compiled:
    """What a script that compiles kernels says of them: of all with KVSTORE_FAULTS=full, else of the most important."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = found["kernels"]
        self.control: dict[str, Any] = found["control"]

    @classmethod
    def of(cls, script: str, factory: pytest.TempPathFactory) -> Compiled:
        """Made once a run, for all workers."""

        def make(folder: Path) -> None:
            (folder / "found.json").write_text(run_script(script, *([] if FULL else ["--few"])))

        return cls(json.loads((once(factory, script, make) / "found.json").read_text()))

    def keep_everything_in_registers(self, count: int) -> None:
        """Fails unless there are `count` kernels, none with a stack; and unless the control shows one would be seen."""
        assert len(self.rows) == count
        for row in self.rows:
            assert (row["stack_bytes"], row["spill_bytes"], row["local_bytes"]) == (0, 0, 0), row
        assert self.control["stack_bytes"] > 0
        assert self.control["spill_bytes"] > 0
