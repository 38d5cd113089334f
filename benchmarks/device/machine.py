"""The GPU that is measured, or, in a dry run, the CPU that stands in for it: what the sections ask either for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import MIB, interleave
from kvstore.codecs import KVView
from kvstore.core.layout import KVLayout

L2_BYTES = 256 * MIB  # more than any L2
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class WrongBits(Exception):
    """What came back is not what went in: no figure is worth anything."""


class Machine:
    """A GPU; or with dry=True the CPU: kernels run in Triton's interpreter, sizes are tiny, and times mean nothing.

    Attributes:
        quick: fewer and smaller cases.
        heads, dim: of the caches that `cache` makes.
        published: folder with a clone of the published implementation of SplitZip; None: it is not compared.
    """

    def __init__(self, dry: bool, quick: bool, published: Path | None = None) -> None:
        self.dry = dry
        self.quick = quick
        self.published = published
        self.device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        self.heads, self.dim = (2, 16) if dry else (8, 128)
        self._filler = torch.empty(4096 if dry else L2_BYTES, dtype=torch.uint8, device=self.device)

    def choose(self, full: Any, quick: Any, dry: Any) -> Any:
        """The setting for this run."""
        return dry if self.dry else quick if self.quick else full

    @property
    def rounds(self) -> int:
        return int(self.choose(20, 10, 1))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes on the host that the device copies to and from by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self.dry)

    def cache(self, layers: int, tokens: int, dtype: str = "bfloat16", seed: int = 0) -> Layers:
        """Normal numbers, every channel with its own scale: `[heads, tokens, dim]`, K and V of each layer."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def tensor() -> torch.Tensor:
            scale = torch.randn(self.dim, device=self.device, generator=generator).exp()
            values = torch.randn(self.heads, tokens, self.dim, device=self.device, generator=generator)
            return (values * scale).to(getattr(torch, dtype))

        return [(tensor(), tensor()) for _ in range(layers)]

    def layout(self, layers: int, dtype: str = "bfloat16", rope: str = "none") -> KVLayout:
        return KVLayout.uniform(layers, self.heads, self.dim, dtype, rope=rope)

    def view(self, layout: KVLayout, layers: Layers) -> KVView:
        """A view that the device's kernels code; in a dry run, too, where a view of tensors on the CPU would be coded
        by the CPU's codec."""
        if not self.dry:
            return KVView.of_layers(layout, layers)
        tensors = [tensor for pair in layers for tensor in pair]
        return KVView(layout, tensors[0].shape[1], None, tensors, tensors)

    # ---- time --------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def wait_for_this_stream(self) -> None:
        if not self.dry:
            torch.cuda.current_stream(self.device).synchronize()

    def other_stream(self) -> Callable[[], Any]:
        """Makes contexts whose launches do not wait for those outside; all on one stream."""
        if self.dry:
            return contextlib.nullcontext
        stream = torch.cuda.Stream(self.device)
        return lambda: torch.cuda.stream(stream)

    def graph(self, function: Callable[[], object]) -> Callable[[], object]:
        """The same launches, without what it costs to launch them."""
        if self.dry:
            return function
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def on_device(self, function: Callable[[], object]) -> Callable[[], float]:
        """Seconds on the device, by its events, from an L2 that holds nothing of `function`'s."""

        def once() -> float:
            self._filler.zero_()
            begin, end = (_Event(self.dry) for _ in range(2))
            begin.record()
            kept = function()
            end.record()
            seconds = end.since(begin)
            del kept
            return seconds

        return self._warm(once)

    def by_clock(self, function: Callable[[], object]) -> Callable[[], float]:
        """Seconds of wall-clock time until the device is done."""

        return self._warm(lambda: self.by_clock_once(function))

    def by_clock_once(self, function: Callable[[], object]) -> float:
        """The same of one call."""
        self.wait()
        begin = time.perf_counter()
        kept = function()
        self.wait()
        seconds = time.perf_counter() - begin
        del kept
        return seconds

    def _warm(self, once: Callable[[], float]) -> Callable[[], float]:
        for _ in range(0 if self.dry else 3):
            once()  # compiles, and fills the allocators' pools
        return once

    def interleave(self, functions: dict[str, Callable[[], object]], rounds: int | None = None) -> dict[str, float]:
        """As `benchmarks.common.interleave`."""
        return interleave(functions, rounds or self.rounds)


class _Event:
    """A moment on the device."""

    def __init__(self, dry: bool) -> None:
        self._event: Any = None if dry else torch.cuda.Event(enable_timing=True)
        self._time = 0.0

    def record(self) -> None:
        if self._event is not None:
            self._event.record()
        self._time = time.perf_counter()

    def since(self, other: _Event) -> float:
        if self._event is None:
            return self._time - other._time
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1e3


def like(layers: Layers) -> Layers:
    """Tensors of the same shapes with zeros."""
    return [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in layers]


def nbytes(layers: Layers) -> int:
    return sum(tensor.nbytes for pair in layers for tensor in pair)


def on_cpu(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Layers:
    return [(k.cpu(), v.cpu()) for k, v in layers]


def check(found: Sequence[tuple[torch.Tensor, torch.Tensor]], expected: Layers, what: str) -> None:
    """Raises `WrongBits` unless all bits are equal; a batch of 1 is ignored."""
    for number, (pair, other) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(pair, other, strict=True):
            one, two = (t[0] if t.dim() == 4 else t for t in (a, b))
            integers = INTEGERS[b.element_size()]
            same = one.shape == two.shape and one.dtype == two.dtype
            if not same or not torch.equal(
                one.contiguous().view(integers), two.contiguous().to(one.device).view(integers)
            ):
                raise WrongBits(f"{what}: layer {number} that came back is not the one that went in")


def check_bytes(found: bytes, expected: bytes, what: str) -> None:
    """Raises `WrongBits` where the device wrote other bytes than the CPU."""
    if found != expected:
        place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
        raise WrongBits(f"{what}: {len(found)} bytes, the CPU writes {len(expected)}; the first to differ is {place}")
