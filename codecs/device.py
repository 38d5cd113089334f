"""Views of tensors that are not on the CPU: who codes them there, and how they come to the CPU and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kvstore.codecs.base import Codec
from kvstore.codecs.view import KVView
from kvstore.core.alike_layers import AlikeLayers
from kvstore.core.layout import KVLayers

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.delta import DeltaCodec


def device_of(view: KVView) -> torch.device | None:
    """Return the device that all tensors of a view are on; None for the CPU, or if they are on several devices."""
    return view.device if len(view.devices) == 1 else None


def codes_on_device(codec: Codec | DeltaCodec, view: KVView) -> bool:
    """Return whether the device that holds a view's tensors codes them; False for tensors on the CPU."""
    device = device_of(view)
    return device is not None and codec.codes_on(device, view.layout.dtype)


def decodes_on_device(
    codec: Codec | DeltaCodec, payload: memoryview, layer_sizes: Sequence[int], target: KVView
) -> bool:
    """Return whether the device that holds a target's tensors decodes this payload into them."""
    device = device_of(target)
    return device is not None and codec.decodes_on(device, target.layout.dtype, payload, layer_sizes)


def falls_back(codec: Codec | DeltaCodec, view: KVView) -> bool:
    """Return whether the CPU codes tensors that a device holds, although `codec` has kernels."""
    return codec.has_kernels and not view.on_cpu and not codes_on_device(codec, view)


def buffer_on_cpu(view: KVView) -> KVView:
    """Return new packed memory on the CPU for what a view on a device holds. Its contents are undefined."""
    return view.host_buffer()


def copy_on_cpu(view: KVView) -> KVView:
    """Return a copy, in packed memory on the CPU, of what a view of tensors on a device holds."""
    copy = buffer_on_cpu(view)
    view.copy_to(copy)
    return copy


def move(source: KVView, target: KVView) -> None:
    """Do `source.copy_to(target)`, finished on return wherever the two are. Mutates what `target` points to."""
    source.copy_to(target)
    if not target.on_cpu:
        wait_for(source.devices | target.devices)


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for the current streams of this thread, on each GPU among the devices."""
    import torch

    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def devices_of(layers: KVLayers) -> set[torch.device]:
    """Return where the tensors of a cache are."""
    if isinstance(layers, AlikeLayers):
        return {layers.device}
    return {tensor.device for pair in layers for tensor in pair}


def publish(devices: Iterable[torch.device]) -> None:
    """Make what a store's own threads do on the GPUs among the devices come after what this thread has launched there.

    They encode on a stream of their own (`own_stream`), which waits for what is computed now and for nothing that is
    launched later, so that a demotion runs beside what the model computes next. Their other work is on the default
    stream. Returns at once: nothing waits on the host.
    """
    for device, computing, default in _streams(devices):
        _own_stream(device).wait_stream(computing)
        if computing != default:
            default.wait_stream(computing)


def follow(devices: Iterable[torch.device]) -> None:
    """Make what this thread launches from now on come after what a store's own threads have copied of its tensors.

    They copy on the default stream what the program may write into.
    """
    for _, computing, default in _streams(devices):
        if computing != default:
            computing.wait_stream(default)


@contextlib.contextmanager
def own_stream(view: KVView) -> Iterator[None]:
    """Launch what is done inside with a published view on the store's own stream of each GPU that holds its tensors."""
    if view.on_cpu:
        yield
        return
    import torch

    with contextlib.ExitStack() as stack:
        for device in sorted(view.devices, key=str):
            if device.type == "cuda":
                stack.enter_context(torch.cuda.stream(_own_stream(device)))
        yield


def _streams(devices: Iterable[torch.device]) -> Iterator[tuple[torch.device, torch.cuda.Stream, torch.cuda.Stream]]:
    """Each GPU among the devices, this thread's current stream on it, and its default stream."""
    import torch

    for device in set(devices):
        if device.type == "cuda":
            yield device, torch.cuda.current_stream(device), torch.cuda.default_stream(device)


@lru_cache(maxsize=64)
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all stores and threads."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
