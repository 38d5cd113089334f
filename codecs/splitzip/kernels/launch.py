"""splitzip on the device that holds the tensors: what the kernels are launched with.

No call here waits for the device, and none but `plan_block` and `decode_block` (which send a table of addresses) moves
anything between host and device, so that coding can be captured in a CUDA graph. Kernels are compiled once for a dtype
and a dim (once in all where the tokens of a head lie without gaps), never for a length.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore.codecs.splitzip.kernels.chunks import COLUMNS
from kvstore.codecs.splitzip.kernels.decode import decode_kernel
from kvstore.codecs.splitzip.kernels.encode import encode_kernel
from kvstore.codecs.splitzip.reference import CHUNK, DTYPES, GROUP, HEADER, raw_bytes
from kvstore.errors import CodecError

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]

# 16 values a thread: two 16-byte loads of bf16 each. With 64 registers four programs fit a multiprocessor, 32 KiB of
# bf16 on their way at once; left alone the compiler takes a few more and fits three. The other variants would spill.
WARPS = 8
REGISTERS = 64
OTHER_REGISTERS = 128
ALIGN = 16
MOST_ESCAPE_BYTES = 1 << 31
UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}


@dataclass(frozen=True, eq=False)
class Plan:
    """What a block's tensors need, computed once: reusable as long as the tensors stay where they are.

    table: `[layers, COLUMNS]` int64 on their device; offsets: where each layer begins in the coded buffer, and the
    buffer's length last; known: bytes of each layer's planes, ends and bases, which its escapes follow; chunks: of each
    layer. The other fields select a compiled kernel.
    """

    table: torch.Tensor
    offsets: tuple[int, ...]
    known: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    dim: int
    aligned: bool

    @property
    def grid(self) -> tuple[int, int]:
        return max(1, *self.chunks), len(self.chunks)


def supports(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype are coded here."""
    return _name(dtype) in DTYPES


def layer_bytes(heads: int, tokens: int, key_dim: int, value_dim: int, dtype: str) -> tuple[int, int, int]:
    """(chunks, bytes before the escapes, the most bytes in all) of a coded layer."""
    _, low_bytes, rest_bits = DTYPES[dtype]
    chunks = values = escapes = 0
    for run in (tokens * key_dim, tokens * value_dim):
        full, rest = divmod(run, CHUNK)
        chunks += heads * (full + (rest > 0))
        values += heads * (-(-run // GROUP) * GROUP)
        # Escapes that would take more than this are not listed, the chunk is stored raw.
        escapes += heads * (full * raw_bytes(CHUNK, dtype) + raw_bytes(rest, dtype))
    if escapes >= MOST_ESCAPE_BYTES:
        raise CodecError(f"splitzip: a layer of {values} values is too large; code fewer tokens at once")
    known = HEADER.size + values // 2 + values * rest_bits // 8 + values * low_bytes + 5 * chunks
    return chunks, known, -(-(known + escapes) // ALIGN) * ALIGN


def constants(dtype: str, dim: int, aligned: bool) -> dict[str, Any]:
    """What both kernels are compiled for; dim and aligned: see `chunks.pointers`."""
    item, low_bytes, rest_bits = DTYPES[dtype]
    names = {"TYPE": UNSIGNED[item], "LOW_BYTES": low_bytes, "REST_BITS": rest_bits}
    return {**names, "DIM": dim, "ALIGNED": aligned}


def options(dtype: str, dim: int, aligned: bool) -> dict[str, Any]:
    """How the compiler is told to do it. Chosen so that nothing spills: see benchmarks/results/kernels-static.json."""
    registers = REGISTERS if aligned and dtype == "bfloat16" else OTHER_REGISTERS
    # There are no floats to fuse, but triton warns where this is not said.
    return {"num_warps": WARPS, "maxnreg": registers, "enable_fp_fusion": False}


def plan_block(layers: Layers) -> Plan:
    """A plan to encode `layers`, each (K, V) of `[heads, tokens, dim]`, strided, the last dimension contiguous.

    All of one device, dtype and number of tokens; heads and dims may differ from layer to layer. Raises `CodecError`
    for a dtype that is not coded here (the message names it), and for tensors of other shapes.
    """
    tokens = _check(layers)
    dtype = _name(layers[0][0].dtype)
    shapes = [layer_bytes(k.shape[0], tokens, k.shape[2], v.shape[2], dtype) for k, v in layers]
    offsets = [0]
    for _, _, most in shapes:
        offsets.append(offsets[-1] + most)
    return _plan(layers, tokens, offsets, [most for _, _, most in shapes])


def encode_block(layers: Layers, plan: Plan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes a block of all layers in one launch, without waiting for it.

    layers: as for `plan_block`; `plan` is theirs. Returns (buffer, sizes) on the tensors' device: uint8, layer i from
    `plan.offsets[i]` on, and int64 `[layers]`, the bytes of each, multiples of 16. What lies in the buffer between
    layers is undefined. The bytes are the format's, the same on every device.
    """
    plan = plan or plan_block(layers)
    device = plan.table.device
    buffer = torch.empty(plan.offsets[-1], dtype=torch.uint8, device=device)
    sizes = torch.empty(len(plan.chunks), dtype=torch.int64, device=device)
    # Tickets of the layers, then a state for each chunk.
    work = torch.zeros(sum(1 + max(1, chunks) for chunks in plan.chunks), dtype=torch.int64, device=device)
    with _on(device):
        encode_kernel[plan.grid](
            plan.table,
            work,
            buffer,
            sizes,
            **constants(plan.dtype, plan.dim, plan.aligned),
            LOOK=32 * WARPS,
            **options(plan.dtype, plan.dim, plan.aligned),
        )
    return buffer, sizes


def decode_block(payload: torch.Tensor, layer_offsets: Sequence[int], tokens: int, out: Layers) -> torch.Tensor:
    """Decodes the first tokens of a block of `tokens` into `out`, in one launch, without waiting for it.

    payload: uint8, contiguous, on the device of `out`, its address a multiple of 16; layer_offsets: `[layers + 1]`
    multiples of 16, layer i lies between i and i + 1 (which may leave room behind it). out: (K, V) a layer, each
    `[heads, at most `tokens`, dim]`, strided, last dimension contiguous: mutated, nothing else is.

    Returns int32 `[layers]` on the device, not 0 where a layer is not what the encoder wrote: `out` holds undefined
    values there. Raises `CodecError` where the layers cannot be what they are said to be. No payload makes the kernel
    read or write outside of `payload` and `out`.
    """
    wanted = _check(out)
    plan = _decode_plan(payload, layer_offsets, tokens, wanted, out)
    damaged = torch.zeros(len(out), dtype=torch.int32, device=payload.device)
    if max(plan.chunks) == 0:
        return damaged
    with _on(payload.device):
        decode_kernel[plan.grid](
            plan.table,
            payload,
            damaged,
            **constants(plan.dtype, plan.dim, plan.aligned),
            **options(plan.dtype, plan.dim, plan.aligned),
        )
    return damaged


def _decode_plan(payload: torch.Tensor, offsets: Sequence[int], tokens: int, wanted: int, out: Layers) -> Plan:
    if payload.dtype != torch.uint8 or not payload.is_contiguous() or payload.data_ptr() % ALIGN:
        raise CodecError("splitzip: the payload must be contiguous bytes at a multiple of 16")
    if payload.device != out[0][0].device:
        raise CodecError(f"splitzip: the payload is on {payload.device}, the cache on {out[0][0].device}")
    if len(offsets) != len(out) + 1 or offsets[0] < 0 or offsets[-1] > payload.numel():
        raise CodecError(f"splitzip: {len(offsets)} offsets for {len(out)} layers in {payload.numel()} bytes")
    if wanted > tokens:
        raise CodecError(f"splitzip: a block of {tokens} tokens cannot be decoded into {wanted}")
    sizes = [end - begin for begin, end in itertools.pairwise(offsets)]
    plan = _plan(out, tokens, offsets, sizes)
    for begin, size, known in zip(offsets, sizes, plan.known, strict=False):
        if begin % ALIGN or size < known:
            raise CodecError(f"splitzip: {size} bytes at {begin} cannot hold a layer of at least {known}")
    return plan


def _plan(layers: Layers, tokens: int, offsets: Sequence[int], sizes: Sequence[int]) -> Plan:
    """`tokens` of the block; the tensors may hold fewer."""
    dtype, device = _name(layers[0][0].dtype), layers[0][0].device
    tensors = [tensor for pair in layers for tensor in pair]
    limit = tensors[0].shape[1]
    rows, known, chunks, state = [], [], [], len(layers)
    for (keys, values), offset, size in zip(layers, offsets, sizes, strict=False):
        count, before, _ = layer_bytes(keys.shape[0], tokens, keys.shape[2], values.shape[2], dtype)
        row = [*_place(keys), *_place(values), keys.shape[0], tokens, limit, offset, size, state]
        rows.append(row)
        known.append(before)
        chunks.append(count)
        state += max(1, count)
    flat = all(token == dim for _, _, token, dim in map(_place, tensors))
    dims = {tensor.shape[2] for tensor in tensors}
    common = dims.pop() if len(dims) == 1 else 0
    aligned = all(_aligned(tensor, tokens, flat) for tensor in tensors)
    table = torch.tensor(rows, dtype=torch.int64)
    assert table.shape[1] == COLUMNS.value
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return Plan(table, tuple(offsets), tuple(known), tuple(chunks), dtype, -1 if flat else common, aligned)


def _place(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, strides of heads and tokens in values, dim. The stride of a single token means nothing."""
    dim = tensor.shape[2]
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1) if tensor.shape[1] > 1 else dim, dim


def _aligned(tensor: torch.Tensor, tokens: int, flat: bool) -> bool:
    """Whether all chunks consist of whole 16-byte accesses."""
    address, head, token, dim = _place(tensor)
    runs = (tokens * dim, tensor.shape[1] * dim)
    gaps = flat or (token % ALIGN == 0 and dim % ALIGN == 0)
    return gaps and address % ALIGN == 0 and head % ALIGN == 0 and not any(run % GROUP for run in runs)


def _check(layers: Layers) -> int:
    """The tokens of every tensor. Raises `CodecError` where the tensors are not of one kind."""
    if not layers:
        raise CodecError("splitzip: no layers")
    first = layers[0][0]
    if not supports(first.dtype):
        raise CodecError(f"splitzip: tensors of {first.dtype} are not coded on a device; code them on the CPU")
    if first.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise CodecError(f"splitzip: tensors on {first.device} are not coded by kernels; code them on the CPU")
    for keys, values in layers:
        if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
            raise CodecError(f"splitzip: expected [heads, tokens, dim], found {keys.shape} and {values.shape}")
        for tensor in (keys, values):
            if (tensor.dtype, tensor.device, tensor.shape[1]) != (first.dtype, first.device, first.shape[1]):
                raise CodecError("splitzip: the layers of a block differ in dtype, device or tokens")
            if tensor.stride(2) != 1 and tensor.shape[2] > 1:
                raise CodecError("splitzip: the last dimension must be contiguous")
    return first.shape[1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels run on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
