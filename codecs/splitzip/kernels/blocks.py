"""Blocks of the store, coded by the device that holds them: views in, coded bytes out, and back.

Every call returns when the device is done with it, and may be made by any thread. The work is done on a stream of its
own, so that it does not wait in line with what a model launches meanwhile; it begins after what was launched before on
the calling thread's stream.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from kvstore.codecs.launching import LAUNCH
from kvstore.codecs.splitzip.kernels.launch import (
    ALIGN,
    Coded,
    decode_blocks,
    encode_block,
    layer_bytes,
    plan_block,
)
from kvstore.codecs.splitzip.kernels.places import Layers, Places
from kvstore.codecs.splitzip.reference import HEADER, MODE_FIXED
from kvstore.codecs.together import Together
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError

# What threads code at the same time is one launch: its table and its results cost the host as much as those of one.
MOST_TOGETHER = 32
MOST_TOKENS = 1024


@lru_cache(maxsize=64)
def works(device: torch.device, dtype: str) -> bool:
    """Whether a few values of `dtype` can be coded on `device` and come back. Tried once: triton needs a GPU that it
    knows and a C compiler, and says so only when it is used."""
    try:
        with beside(device):
            values = torch.arange(512, device=device).view(1, 32, 16).to(getattr(torch, dtype))
            back = torch.zeros_like(values)
            payload, sizes = _encode([(values, values)])
            _decode(payload, sizes, 32, [(back, back)])
            return torch.equal(values, back)
    except Exception:  # whatever the compiler and the driver raise: the CPU writes the same bytes
        return False


def encode(view: KVView) -> tuple[torch.Tensor, tuple[int, ...]]:
    """(the coded layers one after the other, uint8, in memory of their own on the view's device; bytes of each)."""
    with beside(view.device):
        return _encode(Places.of_view(view) or readable(view))


def encode_into(view: KVView, out: memoryview) -> tuple[int, ...] | None:
    """The same into memory on the host, as `Codec.encode` does it. Nothing but coded bytes leaves the device."""
    with beside(view.device):
        payload, sizes = _encode(Places.of_view(view) or readable(view))
        if payload.numel() > len(out):
            return None
        torch.from_numpy(np.frombuffer(out, np.uint8, payload.numel())).copy_(payload)
        return sizes


def decode(payload: torch.Tensor, layer_sizes: Sequence[int], count: int, out: KVView) -> None:
    """Decodes the first tokens of a block of `count` into `out`, on whose device the payload is.

    payload: what `encode` returned. Raises `CodecError` where it is not; `ValueError` where the last dimension of a
    tensor of `out` is not contiguous.
    """
    with beside(out.device):
        _decode(payload, layer_sizes, count, Places.of_view(out) or writable(out))


def decode_from(payload: memoryview, layer_sizes: Sequence[int], count: int, out: KVView) -> None:
    """The same from memory on the host, which may hold anything: see `Codec.decode`."""
    check_layers(payload, layer_sizes, count, out)
    array = np.frombuffer(payload, np.uint8)
    source = torch.from_numpy(array if array.flags.writeable else array.copy())
    device = out.device
    with beside(device):
        coded = torch.empty(len(array), dtype=torch.uint8, device=device)
        coded.copy_(source, non_blocking=True)
        _decode(coded, layer_sizes, count, Places.of_view(out) or writable(out))


def check_layers(payload: memoryview, layer_sizes: Sequence[int], count: int, out: KVView) -> None:
    """Raises `CodecError` where the headers do not fit the sizes; what lies behind them is the kernel's to check."""
    begin = 0
    for number, (shape, size) in enumerate(zip(out.layout.layers, layer_sizes, strict=True)):
        chunks, known, _ = layer_bytes(shape.heads, count, shape.key_dim, shape.value_dim, out.layout.dtype)
        if size < known:
            raise CodecError(f"splitzip: {size} bytes cannot hold layer {number}, which takes at least {known}")
        mode, found, escape_bytes, _ = HEADER.unpack_from(payload, begin)
        if mode != MODE_FIXED or found != chunks or size != -(-(known + escape_bytes) // ALIGN) * ALIGN:
            raise CodecError(f"splitzip: the header does not fit layer {number}")
        begin += size


def _encode(layers: Layers | Places) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Together with the blocks of other threads; `layers` are good until it returns."""
    places = layers if isinstance(layers, Places) else Places.of_layers(layers)
    return encoding(places.device)(places)


def _encode_all(blocks: Sequence[Places]) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    found: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
    for numbers in _alike(blocks):
        places = Places.of_blocks([blocks[i] for i in numbers])
        with LAUNCH:
            plan = plan_block(places)
            buffer, sizes = encode_block(places, plan)
        layer_sizes = sizes.tolist()  # waits
        ends = zip(itertools.pairwise(plan.offsets), layer_sizes, strict=True)
        gaps = [end - begin - size for (begin, end), size in ends]
        pieces = torch.split(buffer, [size for pair in zip(layer_sizes, gaps, strict=True) for size in pair])[::2]
        at = 0
        for i in numbers:
            end = at + blocks[i].layers
            found[i] = torch.cat(pieces[at:end]), tuple(layer_sizes[at:end])
            at = end
    return [found[i] for i in range(len(blocks))]


def _decode(payload: torch.Tensor, layer_sizes: Sequence[int], count: int, out: Layers | Places) -> None:
    """Together with the blocks of other threads."""
    places = out if isinstance(out, Places) else Places.of_layers(out)
    wrong = decoding(places.device)(Coded(payload, list(itertools.accumulate(layer_sizes, initial=0)), count, places))
    if any(wrong):
        raise CodecError(f"splitzip: layer {wrong.index(1)} is damaged")


def _decode_all(blocks: Sequence[Coded]) -> list[list[int]]:
    """Of each block, which layers are damaged."""
    found: dict[int, list[int]] = {}
    for numbers in _alike([block.out for block in blocks]):
        with LAUNCH:
            damaged = decode_blocks([blocks[i] for i in numbers])
        wrong, at = damaged.tolist(), 0  # waits
        for i in numbers:
            found[i] = wrong[at : at + blocks[i].out.layers]
            at += blocks[i].out.layers
    return [found[i] for i in range(len(blocks))]


def _alike(blocks: Sequence[Places]) -> list[list[int]]:
    """The numbers of blocks that one launch can code. Long ones go alone: a launch has as many programs for every layer
    as the longest needs."""
    alike: dict[str | int, list[int]] = {}
    for number, block in enumerate(blocks):
        key = block.dtype if int(block.tokens.max(initial=0)) <= MOST_TOKENS else number
        alike.setdefault(key, []).append(number)
    return list(alike.values())


@lru_cache(maxsize=64)
def encoding(device: torch.device) -> Together[Places, tuple[torch.Tensor, tuple[int, ...]]]:
    """What joins the blocks of threads that are on one device: `beside` is a stream of that device alone."""
    return Together(_encode_all, MOST_TOGETHER)


@lru_cache(maxsize=64)
def decoding(device: torch.device) -> Together[Coded, list[int]]:
    """The same of blocks to decode."""
    return Together(_decode_all, MOST_TOGETHER)


def readable(view: KVView) -> Layers:
    """Tensors that kernels can read, which copies those whose last dimension has gaps."""
    tensors = [t if _is_contiguous(t) else t.contiguous() for t in view.tensors()]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def writable(view: KVView) -> Layers:
    """The tensors of a view that kernels can write to. Raises `ValueError` for others."""
    tensors = view.tensors()
    if not all(_is_contiguous(t) for t in tensors):
        raise ValueError(
            "decode: the last dimension of every tensor of the target must be contiguous; decode into contiguous "
            "tensors and copy"
        )
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.stride(2) == 1 or tensor.shape[2] == 1


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Runs what is launched inside on a stream of its own, and waits for it at the end."""
    if device.type != "cuda":
        yield
        return
    after_caller(device)
    stream = _stream(device)
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def after_caller(device: torch.device) -> None:
    """Makes what is launched beside from now on, by any thread, come after what this thread has launched so far."""
    if device.type == "cuda":
        _stream(device).wait_stream(torch.cuda.current_stream(device))


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all threads: memory that torch has handed out on a stream is used again on that stream only.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
