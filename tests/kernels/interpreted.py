"""The splitzip kernels in triton's interpreter against the reference: `python interpreted.py GROUP...`.

The interpreter is chosen before triton is imported, for a whole process; its programs run one after the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from length import FULL as AT_LENGTH

from kvstore.codecs.splitzip import reference
from kvstore.codecs.splitzip.kernels.encode import OWN, TOTAL, _before
from kvstore.codecs.splitzip.kernels.launch import decode_block, encode_block, plan_block
from kvstore.errors import CodecError

Layers = list[tuple[torch.Tensor, torch.Tensor]]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2]


def units(tensor: torch.Tensor) -> list[reference.Values]:
    item = tensor.element_size()
    integers = tensor.contiguous().view(INTEGERS[item]).numpy()
    return [head.reshape(-1).view(reference.UNSIGNED[item]) for head in integers]


def name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(units(a), units(b), strict=True))


def encoded(layers: Layers) -> list[bytes]:
    """What the kernel makes of the layers, after a check that it is what the reference makes."""
    plan = plan_block(layers)
    buffer, sizes = encode_block(layers, plan)
    coded = []
    for number, ((keys, values), begin, size) in enumerate(zip(layers, plan.offsets, sizes.tolist(), strict=False)):
        coded.append(buffer[begin : begin + size].numpy().tobytes())
        expected = reference.encode_layer(units(keys) + units(values), name(keys))
        assert coded[-1] == expected, f"layer {number} of {keys.shape} {keys.dtype}"
        assert size <= plan.offsets[number + 1] - begin
    return coded


def decoded(coded: Sequence[bytes], tokens: int, out: Layers) -> torch.Tensor:
    payload = torch.from_numpy(np.frombuffer(b"".join(coded), np.uint8).copy())
    offsets = np.cumsum([0, *(len(layer) for layer in coded)]).tolist()
    return decode_block(payload, offsets, tokens, out)


def round_trip(layers: Layers) -> list[bytes]:
    coded = encoded(layers)
    out = [(torch.empty_like(k), torch.empty_like(v)) for k, v in layers]
    assert not decoded(coded, layers[0][0].shape[1], out).any()
    for pair, other in zip(layers, out, strict=True):
        assert all(same_bits(a, b) for a, b in zip(pair, other, strict=True))
    return coded


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Like a cache: every channel (last dimension) has its own scale."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(shape[-1], generator=generator).exp()
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def bits(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Every bit pattern alike: exponents that no window covers, so that chunks are stored raw."""
    item = torch.empty((), dtype=dtype).element_size()
    values = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * item), dtype=np.uint8)
    return torch.from_numpy(values).view(dtype)


def header(layer: bytes) -> tuple[int, int, int, int]:
    mode, chunks, escapes, raw = reference.HEADER.unpack_from(layer)
    return mode, chunks, escapes, raw


def lengths() -> None:
    for length in (0, 1, 31, 32, 33, 4095, 4096, 4097, 8200) if AT_LENGTH else (0, 1, 33, 4097):
        round_trip([(normal(1, length, 1, seed=length), normal(1, length, 1, seed=length + 1))])
    for tokens in (1, 5, 64):
        round_trip([(normal(2, tokens, 64), normal(2, tokens, 64, seed=1)) for _ in range(2)])
    assert plan_block([(normal(2, 64, 64), normal(2, 64, 64))]).aligned
    # Keys and values of different widths, layers of different shapes.
    round_trip([(normal(1, 130, 8), normal(1, 130, 40)), (normal(3, 130, 33), normal(3, 130, 7))])


def contents() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, -1, 128)
    assert header(round_trip([(every, every.flip(1))])[0])[3] > 0
    shuffled = every.flatten()[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))][: 3 * 4096]
    assert header(round_trip([(shuffled.view(1, -1, 64), shuffled.view(1, -1, 64))])[0])[3] == 6
    zeros = torch.zeros(1, 64, 64, dtype=torch.bfloat16)
    assert header(round_trip([(zeros, -zeros)])[0])[2:] == (0, 0)
    some = normal(1, 128, 64)
    some[0, ::7] = 0
    some[0, 3, 5], some[0, 9, 1] = float("nan"), 1e-30
    coded = round_trip([(some, -some)])[0]
    (end,) = struct.unpack_from("<I", coded, 16 + 3 * 8192)
    assert end & reference.ZERO_FLAG, "code 0 must stand for exponent 0 here"
    assert header(coded)[2] > 0
    # More than a 64th far below the largest: the window is chosen by how many lie above it, and some do.
    above = (1e-20 * torch.linspace(1, 100, 4096)).view(1, 64, 64).bfloat16()
    above[0, :4, :2] = 1e20
    coded = round_trip([(above, above)])[0]
    exponents, _, _ = reference.split(units(above)[0], "bfloat16")
    base, _ = reference.window(exponents)
    assert base + reference.CODES <= exponents.max()
    assert 0 < header(coded)[2] < 200
    # A chunk at the limit between a list and raw: 3 bytes an escape against half a byte a value.
    for count in (9, 10, 11, 12):
        near = torch.full((1, 63, 1), 1.0, dtype=torch.bfloat16)
        near[0, :count] = 1e-30
        near[0, count : count + 4] = 1e30
        round_trip([(near, near)])


def strides() -> None:
    for heads, tokens, dim, seed in ((2, 70, 64, 0), (3, 50, 96, 1), (2, 40, 40, 2), (2, 9, 1, 3)):
        by_token = [normal(tokens + 8, heads, dim, seed=seed + i) for i in range(2)]
        transposed = [tensor.transpose(0, 1)[:, 3 : 3 + tokens] for tensor in by_token]
        assert plan_block([tuple(transposed)]).dim == dim  # type: ignore[list-item]
        round_trip([tuple(transposed)])  # type: ignore[list-item]
    wide = normal(2, 20, 3 * 16)
    round_trip([(wide[..., 16:32], wide[..., 5:21])])
    mixed = [(normal(30, 2, 24).transpose(0, 1), normal(30, 2, 56).transpose(0, 1))]
    assert plan_block(mixed).dim == 0  # type: ignore[arg-type]
    round_trip(mixed)  # type: ignore[arg-type]


def dtypes() -> None:
    for dtype in DTYPES:
        round_trip([(normal(2, 70, 64, dtype=dtype), normal(2, 70, 64, dtype=dtype, seed=1))])
        round_trip([(normal(1, 37, 3, dtype=dtype), bits(1, 37, 3, dtype=dtype))])
        # Outliers: escapes whose mantissas come out of the other planes.
        outliers = normal(1, 128, 33, dtype=dtype)
        outliers[0, ::40, 3] = 1e-7 if dtype == torch.float16 else 1e-5 if dtype == torch.float8_e5m2 else 1e-30
        outliers[0, 1, 1] = 3e4
        assert header(round_trip([(outliers, outliers)])[0])[2] > 0
        strided = normal(40, 2, 32, dtype=dtype).transpose(0, 1)
        round_trip([(strided, strided)])
    with pytest.raises(CodecError, match="float64"):
        plan_block([(normal(1, 4, 4).double(), normal(1, 4, 4).double())])


def prefixes() -> None:
    """The first tokens of a block, into a slice of a larger cache: nothing around it changes."""
    tokens, heads, dim = 130, 2, 40
    layers: Layers = [(normal(heads, tokens, dim), bits(heads, tokens, dim))]
    layers[0][0][0, 100, 7] = 1e-30
    layers[0][0][0, 20, 7] = 1e-30
    coded = encoded(layers)
    assert header(coded[0])[2] > 0
    for wanted in (1, 64, 103, 130):
        for order in ((0, 1, 2), (1, 0, 2)):
            shape = [(heads, 200, dim)[axis] for axis in order]
            caches = [torch.full(shape, 7.0, dtype=torch.bfloat16).permute(*order) for _ in range(2)]
            slices = [cache[:, 11 : 11 + wanted] for cache in caches]
            assert not decoded(coded, tokens, [(slices[0], slices[1])]).any()
            for cache, original in zip(caches, layers[0], strict=True):
                assert same_bits(cache[:, 11 : 11 + wanted], original[:, :wanted])
                assert (cache[:, :11] == 7).all()
                assert (cache[:, 11 + wanted :] == 7).all()


def hostile() -> None:
    """A changed byte: refused, or decoded as the reference does; memory beyond the payload is never touched."""
    heads, tokens, dim = 1, 100, 50
    keys = normal(heads, tokens, dim)
    keys[0, ::9, 3] = 1e-30
    coded = encoded([(keys, bits(heads, tokens, dim))])[0]
    # The payload ends where unreadable memory begins.
    room = -(-len(coded) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
    payload = torch.from_numpy(np.frombuffer(memory, np.uint8, len(coded), room - len(coded)))
    planes = 16 + 2 * (5024 // 2 + 5024)
    random = np.random.default_rng(0)
    places = [*range(12), *range(planes, planes + 18), *random.integers(planes + 18, len(coded), 6).tolist()]
    guarded = [torch.full((heads, tokens + 2, dim), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    out = [(guarded[0][:, 1:-1], guarded[1][:, 1:-1])]
    refused = 0
    for place in places:
        for change in (0x01, 0x80):
            damaged = bytearray(coded)
            damaged[place] ^= change
            payload.numpy()[:] = np.frombuffer(damaged, np.uint8)
            found = decode_block(payload, [0, len(coded)], tokens, out)
            assert all((g[:, 0] == 7).all() and (g[:, -1] == 7).all() for g in guarded)
            try:
                expected = reference.decode_layer(bytes(damaged), [tokens * dim] * 2, "bfloat16")
            except CodecError:
                refused += 1
                assert found.tolist() == [1], f"byte {place} ^ {change:#x}: the reference refuses it"
                continue
            assert found.tolist() == [0], f"byte {place} ^ {change:#x}: the reference accepts it"
            for tensor, unit in zip(out[0], expected, strict=True):
                assert np.array_equal(units(tensor)[0], unit), f"byte {place} ^ {change:#x}"
    assert 20 < refused < 2 * len(places)
    for offsets in ([0, len(coded) - 4096], [16, len(coded)], [0, len(coded) + 16], [0], [-16, len(coded) - 16]):
        with pytest.raises(CodecError):
            decode_block(payload, offsets, tokens + 20 * (offsets[0] > 0), out)


@triton.jit
def _look(states, number, result):
    tl.store(result, _before(states, tl.load(number), 256))


def look_back() -> None:
    """Here no program waits for another, so its states are given: own bytes only, over several windows."""
    random = np.random.default_rng(0)
    for number in (0, 1, 255, 256, 257, 1000):
        for known in {0, number // 2, max(0, number - 1), max(0, number - 256)}:
            own = random.integers(0, 2048, number + 1) | (random.integers(0, 2, number + 1) << 32)
            states = (own << 2) | OWN.value
            states[known] = (int(own[: known + 1].sum()) << 2) | TOTAL.value
            states[:known] = 0  # nothing before the nearest sum matters
            result = torch.zeros(1, dtype=torch.int64)
            _look[(1,)](torch.from_numpy(states), torch.tensor([number], dtype=torch.int32), result)
            assert result.item() == int(own[:number].sum()), (number, known)


if __name__ == "__main__":
    kernelgroups.run({f.__name__: f for f in (lengths, contents, strides, dtypes, prefixes, hostile, look_back)})
