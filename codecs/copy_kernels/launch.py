"""What the kernel is launched with: which rows go where, as integers as wide as all of them allow."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from kvstore.codecs.copy_kernels.rows import COLUMNS, copy_rows_kernel
from kvstore.codecs.launching import LAUNCH, on, send
from kvstore.codecs.tensor_memory import RowTable, TensorMemory

UNITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
TILE = 2048
WARPS = 4
MOST_PROGRAMS = 64  # a tensor; each has several tiles where there are more
MOST_UNITS = 1 << 31


@lru_cache(maxsize=64)
def works(device: torch.device) -> bool:
    """Whether the kernel can be compiled for `device`, and copies. Tried once: triton needs a GPU that it knows and a C
    compiler, and says so only when it is used."""
    try:
        source = torch.arange(3 * 5 * 8, device=device, dtype=torch.int16).view(3, 5, 8)
        target = torch.zeros(5, 3, 8, device=device, dtype=torch.int16).transpose(0, 1)
        places = [TensorMemory([tensor]).places for tensor in (source, target)]
        assert places[0] is not None
        assert places[1] is not None
        copy_rows(places[0], places[1], np.array([3]), np.array([16]), 5, device)
        return torch.equal(source, target)
    except Exception:  # whatever the compiler and the driver raise: torch copies tensor by tensor
        return False


def fits(heads: npt.NDArray[np.uint32], row_bytes: npt.NDArray[np.uint32], tokens: int) -> bool:
    """Whether the kernel can count the units of every tensor, however small they are."""
    return int((heads.astype(np.int64) * row_bytes).max(initial=0)) * tokens < MOST_UNITS


def copy_rows(
    source: RowTable,
    target: RowTable,
    heads: npt.NDArray[np.uint32],
    row_bytes: npt.NDArray[np.uint32],
    tokens: int,
    device: torch.device,
) -> None:
    """Copy the rows of all tensors on the current stream, without waiting for it. Mutates what `target` points to.

    source, target: of the same tensors on `device`, which do not overlap and stay where they are until the device is
    done. heads, row_bytes: `[tensors]`, as of `tensor_memory.row_shapes`.
    """
    if not tokens or not len(heads):
        return
    rows = row_bytes.astype(np.int64)
    # Tokens that lie without gaps in both are one long row.
    joined = tokens == 1 or bool((source[2] == rows).all() and (target[2] == rows).all())
    table = np.empty((len(heads), COLUMNS.value), np.int64)
    table[:, :3], table[:, 3:6], table[:, 6] = source.T, target.T, heads
    table[:, 7], table[:, 8] = (1, rows * tokens) if joined else (tokens, rows)
    if joined:
        table[:, [2, 5]] = 0
    table[heads == 1, 1] = table[heads == 1, 4] = 0  # the stride of a single head means nothing
    unit = int(np.gcd.reduce(table[:, [0, 1, 2, 3, 4, 5, 8]], axis=None))
    unit = min(unit & -unit, 8)
    table[:, [1, 2, 4, 5, 8]] //= unit
    most = int((table[:, 6] * table[:, 7] * table[:, 8]).max())
    sent = send(table, device)
    grid = (len(table), max(1, min(MOST_PROGRAMS, -(-most // TILE))))
    with LAUNCH, on(device):
        copy_rows_kernel[grid](sent, UNIT=UNITS[unit], TILE=TILE, num_warps=WARPS, enable_fp_fusion=False)
