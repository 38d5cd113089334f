"""The kernel that copies rows, in triton's interpreter, against torch: `python interpreted_copies.py GROUP...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import pytest
import torch

from kvstore.codecs import KVView
from kvstore.codecs.copy_kernels import launch
from kvstore.codecs.tensor_memory import TensorMemory, row_shapes
from kvstore.core.layout import KVLayout, LayerLayout

CPU = torch.device("cpu")
GUARD = 0x5A


def posing(layout: KVLayout, tensors: list[torch.Tensor]) -> KVView:
    """As of tensors on a device."""
    return KVView(layout, tensors[0].shape[1], None, tensors, tensors)


def inside(tensor: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory full of guards, a tensor of this shape somewhere in it, with the strides that its kind says)."""
    heads, tokens, dim = tensor.shape
    memory = torch.full(((heads + 2) * (tokens + 3) * (dim + 5) + 7,), GUARD, dtype=torch.uint8)
    memory = memory.repeat_interleave(tensor.element_size()).view(tensor.dtype)
    if kind == "packed":
        return memory, memory[: heads * tokens * dim].view(heads, tokens, dim)
    if kind == "odd":
        return memory, memory[3 : 3 + heads * tokens * dim].view(heads, tokens, dim)
    if kind == "by token":
        return memory, memory[: heads * tokens * dim].view(tokens, heads, dim).transpose(0, 1)
    return memory, memory[: (heads + 2) * (tokens + 3) * (dim + 5)].view(heads + 2, tokens + 3, dim + 5)[
        1 : heads + 1, 2 : tokens + 2, 4 : dim + 4
    ]


def strides() -> None:
    """Every row arrives, wherever it lies in either, and nothing else is written."""
    layout = KVLayout((LayerLayout(3, 16, 8), LayerLayout(1, 5, 7)), "bfloat16")
    shapes = [(x.heads, 9, dim) for x in layout.layers for dim in (x.key_dim, x.value_dim)]
    kinds = ("packed", "odd", "by token", "gaps")
    assert launch.works(CPU)
    for source_kind in kinds:
        for target_kind in kinds:
            values = [torch.randn(shape).bfloat16() for shape in shapes]
            sources, targets = ([inside(tensor, kind) for tensor in values] for kind in (source_kind, target_kind))
            for (_, tensor), value in zip(sources, values, strict=True):
                tensor.copy_(value)
            posing(layout, [t for _, t in sources]).copy_to(posing(layout, [t for _, t in targets]))
            for (memory, tensor), value in zip(targets, values, strict=True):
                assert torch.equal(tensor, value)
                rest = memory.clone()
                torch.as_strided(rest, tensor.shape, tensor.stride(), tensor.storage_offset()).view(torch.int16).fill_(
                    GUARD << 8 | GUARD
                )
                assert bool((rest.view(torch.uint8) == GUARD).all())


def dtypes() -> None:
    """Values of every width, in and out of packed memory, of parts of a cache and of none."""
    for dtype in ("float8_e5m2", "float16", "float32"):
        layout = KVLayout.uniform(2, 2, 24, dtype)
        bits = [torch.randint(256, (2, 11, 24 * layout.item_bytes), dtype=torch.uint8) for _ in range(4)]
        tensors = [x.view(getattr(torch, dtype)) for x in bits]
        for start, count in ((0, 11), (3, 5), (10, 1), (4, 0)):
            view = posing(layout, tensors).narrow(start, count)
            packed = memoryview(bytearray(view.nbytes))
            view.pack(packed)
            right = b"".join(x[:, start : start + count].contiguous().numpy().tobytes() for x in bits)
            assert bytes(packed) == right
            back = [torch.zeros_like(x).view(getattr(torch, dtype)) for x in bits]
            target = posing(layout, back).narrow(start, count)
            target.unpack(packed, count)
            found = b"".join(x.view(torch.uint8)[:, start : start + count].contiguous().numpy().tobytes() for x in back)
            assert found == right
            with pytest.raises(ValueError, match="read-only"):
                view.pack(memoryview(right))
            if count:
                with pytest.raises(ValueError, match=r"buffer|small"):
                    view.pack(packed[:-1])


def by_kernel() -> None:
    """It is the kernel that copies: of tensors whose last dimension has gaps torch does."""
    assert launch.works(CPU)
    layout, kept, seen = KVLayout.uniform(1, 2, 8), launch.copy_rows, list[object]()

    def counted(*arguments: object) -> None:
        seen.append(arguments)
        kept(*arguments)  # type: ignore[arg-type]

    launch.copy_rows = counted  # type: ignore[assignment]
    values = [torch.randn(2, 5, 8).bfloat16() for _ in range(2)]
    out = [torch.zeros_like(x) for x in values]
    posing(layout, values).copy_to(posing(layout, out))
    assert all(map(torch.equal, values, out))
    assert len(seen) == 1
    gaps = [torch.zeros(2, 5, 16).bfloat16()[..., ::2] for _ in range(2)]
    posing(layout, values).copy_to(posing(layout, gaps))
    assert all(map(torch.equal, values, gaps))
    assert len(seen) == 1
    assert TensorMemory(gaps).places is None
    assert not launch.fits(*row_shapes(layout), 1 << 28)


if __name__ == "__main__":
    kernelgroups.run({f.__name__: f for f in (strides, dtypes, by_kernel)})
