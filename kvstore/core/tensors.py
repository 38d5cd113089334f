"""Tensors that pretend: what must be known of one before anything below torch reads its memory."""

from __future__ import annotations

from collections.abc import Sequence
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

    Attributes:
        shape, strides: of the tensor, in elements.
        item_bytes: of one number.
        is_cpu: whether it is on the CPU.

    Example:
        >>> import torch
        >>> alike = Alike(torch.zeros(1, 2))
        >>> alike.view(torch.ones(1, 2)), alike.view(torch.ones(2, 1)), alike.view(torch.zeros(1, 2, device="meta"))
        (tensor([[1., 1.]]), None, None)
    """

    __slots__ = (
        "_batch",
        "_complex",
        "_dtype",
        "_needed",
        "_offset",
        "_type",
        "is_cpu",
        "item_bytes",
        "shape",
        "strides",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        self._type = type(tensor)
        self.shape, self._dtype = tensor.shape, tensor.dtype
        self.strides, self._offset = tensor.stride(), tensor.storage_offset()
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        self.item_bytes = tensor.element_size()
        self._needed = (self._offset + last + 1) * self.item_bytes
        self._batch, self._complex, self.is_cpu = tensor.ndim == 4, tensor.is_complex(), tensor.is_cpu

    def view(self, tensor: Any) -> torch.Tensor | None:
        """Return the tensor detached, without its batch of 1 if it has one; None if it is another kind of tensor, or
        lacks its memory, or has to be `resolved`."""
        if self.memory([tensor]) is None:
            return None
        found: torch.Tensor = tensor.squeeze(0) if self._batch else tensor.detach()
        return found.detach() if found.requires_grad else found  # that of a batch is a view already

    def memory(self, tensors: Sequence[Any]) -> tuple[list[torch.UntypedStorage], list[int]] | None:
        """Return what memory the tensors lie in, and where each begins; None where `view` returns None of one."""
        kind, shape, dtype, strides, is_cpu = self._type, self.shape, self._dtype, self.strides, self.is_cpu
        memory, addresses = list[Any](), list[int]()
        try:
            for tensor in tensors:
                if type(tensor) is not kind or tensor.shape != shape or tensor.dtype is not dtype:
                    return None
                if tensor.stride() != strides or tensor.storage_offset() != self._offset or _is_marked(tensor):
                    return None
                storage, address = tensor.untyped_storage(), tensor.data_ptr()
                if storage.nbytes() < self._needed or not address or tensor.is_cpu is not is_cpu:
                    return None
                memory.append(storage)
                addresses.append(address)
            if self._complex and any(tensor.is_conj() for tensor in tensors):
                return None
        except (RuntimeError, NotImplementedError):  # as in `why_unreadable`
            return None
        return memory, addresses

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the view that `view` returns of the tensor in this memory, whatever became of that tensor since."""
        import torch

        found = torch.empty(0, dtype=self._dtype, device=storage.device)
        return found.set_(storage, self._offset, self.shape[-3:], self.strides[-3:])


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its memory as its values are: a negation or conjugation that is only marked is done.

    Example:
        >>> import torch
        >>> lazy = torch._neg_view(torch.ones(1))
        >>> lazy.is_neg(), resolved(lazy).is_neg()
        (True, False)
    """
    tensor = tensor.resolve_neg()
    return tensor.resolve_conj() if tensor.is_conj() else tensor


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether a negation is only marked. `is_neg` says so, too, but lets go of Python's lock: threads of a program that
    is busy would wait for it at every tensor."""
    return tensor.resolve_neg() is not tensor


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
