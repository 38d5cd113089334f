"""Who launches kernels: one thread at a time."""

from __future__ import annotations

import threading

# Triton compiles at the first launch, and interprets, with state that all threads and all kernels share. Nothing waits
# for the device while it is held.
LAUNCH = threading.Lock()
