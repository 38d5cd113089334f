"""Which devices run the kernels of one mode of a codec that needs a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvstore.codecs.device import device_of
from kvstore.codecs.launching import may_have_kernels
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch


class OnDevice(Protocol):
    """A model that was loaded on a device."""

    device: torch.device


Loaded = TypeVar("Loaded", bound=OnDevice)


class Devices(Generic[Loaded]):
    """Remembers of every device either the model there, which takes about the bytes of its weights, or that the CPU
    does the work. Thread-safe: `_lock` guards `_known`."""

    def __init__(self, layout: KVLayout, trial: Callable[[torch.device], Loaded | None]) -> None:
        """layout: of the model. trial: loads the model on a device that writes the bytes of the CPU, else None; it may
        raise `ImportError`."""
        self._layout, self._trial = layout, trial
        self._lock = Lock()
        self._known: dict[torch.device, Loaded | None] = {}  # None: the CPU codes for it

    def coder(self, device: torch.device) -> Loaded | None:
        """The model on `device` (a GPU with its index) if tensors are coded there.

        They are if values are bf16, triton is installed and can compile for the device, and the kernels wrote the bytes
        of the CPU in a trial. The first call makes the trial, which takes as long as the compiler does; others wait.
        """
        if self._layout.dtype != "bfloat16" or not may_have_kernels(device):
            return None
        with self._lock:
            if device not in self._known:
                try:
                    self._known[device] = self._trial(device)
                except ImportError:
                    self._known[device] = None
            return self._known[device]

    def coder_for(self, view: KVView) -> Loaded | None:
        """The same of the device that holds a view of the model's layout."""
        device = device_of(view)
        return self.coder(device) if device is not None and view.layout == self._layout else None

    @contextlib.contextmanager
    def watched(self, coder: Loaded) -> Iterator[None]:
        """What a device raises inside, besides errors of its callers and of the moment, is its last: kernels are
        compiled for more kinds of arguments than the trial has. The CPU goes on."""
        import torch

        try:
            yield
        except (CodecError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception:
            with self._lock:
                self._known[coder.device] = None
