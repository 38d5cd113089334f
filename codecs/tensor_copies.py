"""Copies between tensors that are not on the CPU: by a kernel where one device holds both, else tensor by tensor."""

from __future__ import annotations

from kvstore.codecs.launching import may_have_kernels
from kvstore.codecs.tensor_memory import TensorMemory, row_shapes
from kvstore.core.layout import KVLayout


def copy_tensors(
    layout: KVLayout, tokens: int, source: TensorMemory, start: int, target: TensorMemory, target_start: int
) -> None:
    """Copy the rows of so many tokens of all tensors of a layout, and mutate what `target` points to.

    The copy may still be under way on return, on the current stream.

    Args:
        start, target_start: the first token in each.
    """
    if not _copied_by_kernel(layout, tokens, source, start, target, target_start):
        for to, tensor in zip(target.cut(target_start, tokens), source.cut(start, tokens), strict=True):
            to.copy_(tensor)


def _copied_by_kernel(
    layout: KVLayout, tokens: int, source: TensorMemory, start: int, target: TensorMemory, target_start: int
) -> bool:
    devices = source.devices | target.devices
    if len(devices) != 1:
        return False
    (device,) = devices
    if not may_have_kernels(device):
        return False
    places, to = source.places_from(start), target.places_from(target_start)
    if places is None or to is None:
        return False
    try:
        from kvstore.codecs.copy_kernels import launch
    except ImportError:  # triton is not installed
        return False
    heads, row_bytes = row_shapes(layout)
    if not launch.fits(heads, row_bytes, tokens) or not launch.works(device):
        return False
    launch.copy_rows(places, to, heads, row_bytes, tokens, device)
    return True
