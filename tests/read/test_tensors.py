"""Tensors in memory of the store: what keeps it, and until when."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from kvstore import KVLayout
from kvstore.read._tensors import capsules
from kvstore.read.result import allocate
from kvstore.tiers.buffers import Buffer, BufferPool

pytestmark = pytest.mark.native

HEADS, DIMS = np.array([2, 3], np.uint32), np.array([8, 4], np.uint32)
CAPACITY, ROWS, BF16 = 5, 3, (4, 16)


def places(buffer: Buffer) -> np.ndarray:
    return buffer.address + np.array([0, 2 * 8 * CAPACITY * 2], np.int64)


def made(buffer: Buffer, capacity: int = CAPACITY, rows: int = ROWS) -> list[object]:
    return capsules(buffer, places(buffer), HEADS, DIMS, capacity, rows, *BF16)


def test_tensors_are_where_they_should_be() -> None:
    buffer = BufferPool(0).take(4096)
    buffer.view[:] = bytes(4096)
    one, two = map(from_dlpack, made(buffer))
    assert (one.shape, one.stride(), one.dtype) == ((1, 2, ROWS, 8), (80, 40, 8, 1), torch.bfloat16)
    assert (two.shape, two.stride()) == ((1, 3, ROWS, 4), (60, 20, 4, 1))
    assert [one.data_ptr(), two.data_ptr()] == places(buffer).tolist()
    two[0, 1, 2, 3] = 1.0
    at = places(buffer)[1] - buffer.address + 2 * (20 + 2 * 4 + 3)
    assert bytes(buffer.view[at : at + 2]) == b"\x80\x3f"
    assert sum(map(bool, buffer.view)) == 2


def test_the_memory_stays_as_long_as_any_tensor_of_it() -> None:
    pool = BufferPool(keep_bytes=1 << 20)
    buffer = pool.take(4096)
    gone = weakref.ref(buffer)
    one, two = map(from_dlpack, made(buffer))
    part = two[:, 1:]
    del buffer, one, two
    gc.collect()
    assert gone() is not None
    assert pool.free_bytes == 0
    del part
    assert gone() is None
    assert pool.free_bytes == 4096


def test_capsules_that_nobody_used_keep_nothing() -> None:
    buffer = BufferPool(0).take(4096)
    gone, unused = weakref.ref(buffer), made(buffer)
    used = from_dlpack(unused.pop())
    del buffer
    assert gone() is not None
    del unused
    assert gone() is not None
    del used
    assert gone() is None


def test_another_thread_may_drop_the_last_tensor() -> None:
    buffer = BufferPool(0).take(4096)
    gone, held = weakref.ref(buffer), [from_dlpack(made(buffer)[0])]
    del buffer
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert gone() is None


@pytest.mark.parametrize(("capacity", "rows"), [(CAPACITY, CAPACITY + 1), (CAPACITY, -1), (1 << 62, 1)])
def test_tensors_that_cannot_be_are_refused(capacity: int, rows: int) -> None:
    buffer = BufferPool(0).take(4096)
    with pytest.raises(ValueError, match=r"expected 0 to as many|too many numbers"):
        made(buffer, capacity, rows)
    with pytest.raises(ValueError, match="expected the same length"):
        capsules(buffer, places(buffer)[:1], HEADS, DIMS, CAPACITY, ROWS, *BF16)
    gone = weakref.ref(buffer)
    del buffer
    assert gone() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_results_of_every_dtype_have_it(dtype: str) -> None:
    layout = KVLayout.uniform(2, 3, 16, dtype)
    out = allocate(layout, 5, 2, BufferPool(0))
    for tokens, tensors in ((7, out.tensors), (5, out.layers(5))):
        for pair in tensors:
            for tensor in pair:
                assert (tensor.shape, tensor.dtype) == ((1, 3, tokens, 16), getattr(torch, dtype))
    k = out.tensors[0][0]
    k.view(torch.uint8).fill_(7)
    assert bool((out.layers(5)[0][0].view(torch.uint8) == 7).all())


def test_tensors_may_outlive_the_interpreter() -> None:
    """As a program's last hit does, which a module holds."""
    program = (
        "import torch, kvstore\n"
        "from kvstore.read.result import allocate\n"
        "from kvstore.tiers.buffers import BufferPool\n"
        "layout = kvstore.KVLayout.uniform(4, 2, 16)\n"
        "torch.held = allocate(layout, 100, 3, BufferPool(1 << 20)); torch.held.tensors[0][0].fill_(1)\n"
        "torch.circle = [torch.held.tensors]; torch.circle.append(torch.circle)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
