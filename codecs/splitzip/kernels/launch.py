"""splitzip on the device that holds the tensors: what the kernels are launched with.

No call here waits for the device, and none but `plan_block` and `decode_block` (which send a table of addresses) moves
anything between host and device, so that coding can be captured in a CUDA graph. Kernels are compiled once for a dtype
and a dim (once in all where the tokens of a head lie without gaps), never for a length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl

from kvstore.codecs.launching import on, send
from kvstore.codecs.splitzip.kernels.chunks import COLUMNS
from kvstore.codecs.splitzip.kernels.decode import decode_kernel
from kvstore.codecs.splitzip.kernels.encode import encode_kernel
from kvstore.codecs.splitzip.kernels.places import Array, Layers, Places, name_of
from kvstore.codecs.splitzip.reference import CHUNK, DTYPES, GROUP, HEADER, raw_bytes
from kvstore.errors import CodecError

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
    layer; words: int64 of the encoder's work, tickets of the layers and then a state for each chunk. The other fields
    select a compiled kernel.
    """

    table: torch.Tensor
    offsets: tuple[int, ...]
    known: tuple[int, ...]
    chunks: tuple[int, ...]
    words: int
    dtype: str
    dim: int
    aligned: bool

    @property
    def grid(self) -> tuple[int, int]:
        return max(1, *self.chunks), len(self.chunks)


def supports(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype are coded here."""
    return name_of(dtype) in DTYPES


@lru_cache(maxsize=4096)
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


def plan_block(layers: Layers | Places) -> Plan:
    """A plan to encode `layers`, each (K, V) of `[heads, tokens, dim]`, strided, the last dimension contiguous; or the
    places of such.

    All of one device, dtype and number of tokens; heads and dims may differ from layer to layer. Raises `CodecError`
    for a dtype that is not coded here (the message names it), and for tensors of other shapes.
    """
    places = _places(layers)
    tokens = places.tokens[::2]
    sizes = _sizes(places, tokens)
    most = [most for _, _, most in sizes]
    return _plan(places, tokens, sizes, list(itertools.accumulate(most, initial=0)), most)


def encode_block(layers: Layers | Places, plan: Plan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes a block of all layers in one launch, without waiting for it.

    layers: as for `plan_block`; `plan` is theirs. Returns (buffer, sizes) on the tensors' device: uint8, layer i from
    `plan.offsets[i]` on, and int64 `[layers]`, the bytes of each, multiples of 16. What lies in the buffer between
    layers is undefined. The bytes are the format's, the same on every device.
    """
    plan = plan or plan_block(layers)
    device = plan.table.device
    buffer = torch.empty(plan.offsets[-1], dtype=torch.uint8, device=device)
    sizes = torch.empty(len(plan.chunks), dtype=torch.int64, device=device)
    work = torch.zeros(plan.words, dtype=torch.int64, device=device)
    with on(device):
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


def decode_block(
    payload: torch.Tensor, layer_offsets: Sequence[int], tokens: int, out: Layers | Places
) -> torch.Tensor:
    """Decodes the first tokens of a block of `tokens` into `out`, in one launch, without waiting for it.

    payload: uint8, contiguous, on the device of `out`, its address a multiple of 16; layer_offsets: `[layers + 1]`
    multiples of 16, layer i lies between i and i + 1 (which may leave room behind it). out: (K, V) a layer, each
    `[heads, at most `tokens`, dim]`, strided, last dimension contiguous: mutated, nothing else is.

    Returns int32 `[layers]` on the device, not 0 where a layer is not what the encoder wrote: `out` holds undefined
    values there. Raises `CodecError` where the layers cannot be what they are said to be. No payload makes the kernel
    read or write outside of `payload` and `out`.
    """
    return decode_blocks([Coded(payload, layer_offsets, tokens, _places(out))])


@dataclass(frozen=True, eq=False)
class Coded:
    """A block to decode: the arguments of `decode_block`."""

    payload: torch.Tensor
    offsets: Sequence[int]
    tokens: int
    out: Places


def decode_blocks(blocks: Sequence[Coded]) -> torch.Tensor:
    """The same of several blocks, of one dtype and on one device: of the layers of all, one after the other."""
    first = blocks[0].payload
    plan = _decode_plan(blocks)
    damaged = torch.zeros(len(plan.chunks), dtype=torch.int32, device=first.device)
    if max(plan.chunks) == 0:
        return damaged
    with on(first.device):
        decode_kernel[plan.grid](
            plan.table,
            first,
            damaged,
            **constants(plan.dtype, plan.dim, plan.aligned),
            **options(plan.dtype, plan.dim, plan.aligned),
        )
    return damaged


def _decode_plan(blocks: Sequence[Coded]) -> Plan:
    begins, sizes, tokens = list[int](), list[int](), list[int]()
    for block in blocks:
        payload, offsets, layers = block.payload, block.offsets, block.out.layers
        if payload.dtype != torch.uint8 or not payload.is_contiguous() or payload.data_ptr() % ALIGN:
            raise CodecError("splitzip: the payload must be contiguous bytes at a multiple of 16")
        if payload.device != block.out.device:
            raise CodecError(f"splitzip: the payload is on {payload.device}, the cache on {block.out.device}")
        if len(offsets) != layers + 1 or offsets[0] < 0 or offsets[-1] > payload.numel():
            raise CodecError(f"splitzip: {len(offsets)} offsets for {layers} layers in {payload.numel()} bytes")
        if int(block.out.tokens.max()) > block.tokens:
            raise CodecError(
                f"splitzip: a block of {block.tokens} tokens cannot be decoded into {int(block.out.tokens.max())}"
            )
        # The kernel finds a layer by its distance from the first payload.
        begins += [payload.data_ptr() - blocks[0].payload.data_ptr() + begin for begin in offsets[:-1]]
        sizes += [end - begin for begin, end in itertools.pairwise(offsets)]
        tokens += [block.tokens] * layers
    places, of_blocks = Places.of_blocks([block.out for block in blocks]), np.array(tokens, np.int64)
    plan = _plan(places, of_blocks, _sizes(places, of_blocks), begins, sizes)
    for begin, size, known in zip(begins, sizes, plan.known, strict=True):
        if begin % ALIGN or size < known:
            raise CodecError(f"splitzip: {size} bytes at {begin} cannot hold a layer of at least {known}")
    return plan


def _plan(
    places: Places,
    tokens: Array,
    coded: Sequence[tuple[int, int, int]],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> Plan:
    """tokens: of the block of each layer; the tensors may hold fewer. coded: `_sizes` of these."""
    dims = places.dims
    chunks, known, _ = zip(*coded, strict=True)
    layers, states = len(chunks), np.maximum(1, chunks)
    flat = bool((places.token_strides == dims).all())
    table = np.empty((layers, COLUMNS.value), np.int64)
    columns = (places.addresses, places.head_strides, places.token_strides, dims)
    table[:, :8] = np.stack(columns, -1).reshape(layers, 8)
    table[:, 8], table[:, 9], table[:, 10] = places.heads[::2], tokens, places.tokens[::2]
    table[:, 11], table[:, 12], table[:, 13] = offsets[:layers], sizes, layers + np.cumsum(states) - states
    # All chunks consist of whole 16-byte accesses.
    whole = [places.addresses, places.head_strides, *([] if flat else [places.token_strides, dims])]
    runs = [np.repeat(tokens, 2) * dims, places.tokens * dims]
    aligned = not any((x % ALIGN).any() for x in whole) and not any((run % GROUP).any() for run in runs)
    common = int(dims[0]) if (dims == dims[0]).all() else 0
    sent, words = send(table, places.device), layers + int(states.sum())
    return Plan(sent, tuple(offsets), known, chunks, words, places.dtype, -1 if flat else common, aligned)


def _sizes(places: Places, tokens: Array) -> list[tuple[int, int, int]]:
    """`layer_bytes` of each layer."""
    dims = places.dims.tolist()
    shapes = zip(places.heads[::2].tolist(), tokens.tolist(), dims[::2], dims[1::2], strict=True)
    return [layer_bytes(heads, count, key_dim, value_dim, places.dtype) for heads, count, key_dim, value_dim in shapes]


def _places(layers: Layers | Places) -> Places:
    return layers if isinstance(layers, Places) else Places.of_layers(layers)
