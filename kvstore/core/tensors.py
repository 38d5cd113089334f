"""Tensors that pretend: what must be known of one before anything below torch reads its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import LayoutMismatch

if TYPE_CHECKING:
    import torch


def why_unreadable(tensor: torch.Tensor) -> str:
    """Say what keeps the memory of a tensor from being read; "" if nothing does. Reads no values.

    Example:
        >>> import torch
        >>> why_unreadable(torch.zeros(2)), why_unreadable(torch.zeros(2, device="meta"))
        ('', 'it is on the meta device and holds no values')
    """
    try:
        storage = tensor.untyped_storage()
        found = storage.nbytes()
        address = 0 if storage.device.type == "meta" else storage.data_ptr()  # a FakeTensor's says nothing of it
        shape, strides = tensor.shape, tensor.stride()  # a nested tensor has none
        last = tensor.storage_offset()
        if tensor.is_contiguous():  # as usual, and a put looks at every tensor
            last += tensor.numel() - 1
        else:
            last += sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        needed = (last + 1) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # sparse, nested, or inside of a transformation of torch
        return f"expected a dense tensor with memory of its own, found a {_kind(tensor)}"
    if (address and found >= needed) or tensor.numel() == 0:
        return ""
    if tensor.device.type == "meta":
        return "it is on the meta device and holds no values"
    if found >= needed:
        return f"a {_kind(tensor)} holds no values"
    return f"its storage was resized to {found} bytes, but it needs {needed}"


class Alike:
    """What a tensor is like that was checked: another one of which the same is true needs no other check. Immutable.

    Example:
        >>> import torch
        >>> alike = Alike(torch.zeros(1, 2))
        >>> alike.view(torch.ones(1, 2)), alike.view(torch.ones(2, 1)), alike.view(torch.zeros(1, 2, device="meta"))
        (tensor([[1., 1.]]), None, None)
    """

    __slots__ = ("_batch", "_complex", "_dtype", "_needed", "_offset", "_shape", "_strides", "_type")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._type = type(tensor)
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._strides, self._offset = tensor.stride(), tensor.storage_offset()
        last = sum((size - 1) * stride for size, stride in zip(self._shape, self._strides, strict=True))
        self._needed = (self._offset + last + 1) * tensor.element_size()
        self._batch, self._complex = tensor.ndim == 4, tensor.is_complex()

    def view(self, tensor: Any) -> torch.Tensor | None:
        """Return the tensor detached, without its batch of 1 if it has one; None if it is another kind of tensor, or
        lacks its memory, or has to be `resolved`."""
        if type(tensor) is not self._type:
            return None
        try:
            if tensor.shape != self._shape or tensor.dtype is not self._dtype or tensor.stride() != self._strides:
                return None
            storage = tensor.untyped_storage()
            whole = storage.nbytes() >= self._needed and storage.data_ptr() != 0
            if not whole or tensor.storage_offset() != self._offset or tensor.is_neg():
                return None
            if self._complex and tensor.is_conj():
                return None
        except (RuntimeError, NotImplementedError):  # as in `why_unreadable`
            return None
        found: torch.Tensor = tensor.squeeze(0) if self._batch else tensor.detach()
        return found.detach() if found.requires_grad else found  # that of a batch is a view already


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its memory as its values are: a negation or conjugation that is only marked is done.

    Example:
        >>> import torch
        >>> lazy = torch._neg_view(torch.ones(1))
        >>> lazy.is_neg(), resolved(lazy).is_neg()
        (True, False)
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.resolve_conj() if tensor.is_conj() else tensor


def as_array(tensor: torch.Tensor) -> Any:
    """Return the values of a tensor as a numpy array on the CPU; small floats, which numpy does not know, as float32.

    Raises:
        LayoutMismatch: the tensor has no memory of its own.

    Example:
        >>> import torch
        >>> as_array(torch.tensor([1.5]).bfloat16())
        array([1.5], dtype=float32)
    """
    if problem := why_unreadable(tensor):
        raise LayoutMismatch(problem)
    tensor = resolved(tensor.detach())
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).cpu().numpy()


def _kind(tensor: torch.Tensor) -> str:
    layout = str(tensor.layout).removeprefix("torch.")
    return type(tensor).__name__ if layout == "strided" else f"{layout} {type(tensor).__name__}"
