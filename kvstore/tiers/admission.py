"""Which records a tier takes in from the tier below. Pure: no I/O."""

from __future__ import annotations

import threading
from collections import OrderedDict


class SecondRead:
    """Admits a record at its second read. Thread-safe.

    A session that is resumed once, or a scan over many, then neither pays for memory nor drives out what others use
    (the ghost queue of S3-FIFO, SOSP 2023).

    Args:
        remembered_bytes: the ids of records of about so many bytes are remembered, as many as the tier holds.

    Example:
        >>> admission = SecondRead(remembered_bytes=1 << 20)
        >>> admission.again(7, 4096), admission.again(7, 4096), admission.again(7, 4096)
        (False, True, False)
    """

    def __init__(self, remembered_bytes: int) -> None:
        self._limit = remembered_bytes
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self._torn = False  # a call was cut short: `_bytes` may be wrong
        self._lock = threading.Lock()

    def again(self, record_id: int, nbytes: int) -> bool:
        """Note that a record of `nbytes` was read. Return whether one is remembered, and forget that."""
        with self._lock:
            if self._torn:
                self._bytes = sum(self._seen.values())
            self._torn = True
            before = self._seen.pop(record_id, None)
            self._bytes -= before or 0
            if before is None:
                self._seen[record_id] = nbytes
                self._bytes += nbytes
                while self._bytes > self._limit:
                    self._bytes -= self._seen.popitem(last=False)[1]
            self._torn = False
            return before is not None
