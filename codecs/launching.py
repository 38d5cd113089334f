"""What every kernel is launched with: who may, on which device, and how tables get there."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

# Triton compiles at the first launch, and interprets, with state that all threads and all kernels share. Nothing waits
# for the device while it is held.
LAUNCH = threading.Lock()


def may_have_kernels(device: torch.device) -> bool:
    """Return whether to try kernels for tensors on `device`. Ask this first: importing triton takes long."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels run on the current device: make `device` that."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def send(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy on the device, for which nothing waits."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
