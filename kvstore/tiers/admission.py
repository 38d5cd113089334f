"""Which records a tier takes in from the tier below. Pure: no I/O."""

from __future__ import annotations

import threading
from collections import OrderedDict


class SecondRead:
    """A record is worth keeping when it is read again soon: what is read once passes by.

    A session that is resumed once, or a scan over many, then neither pays for memory nor drives out what others use
    (the ghost queue of S3-FIFO, SOSP 2023). Remembers the ids of about as many bytes of records as the tier holds.
    Thread-safe.
    """

    def __init__(self, remembered_bytes: int) -> None:
        self._limit = remembered_bytes
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def again(self, record_id: int, nbytes: int) -> bool:
        """Notes that a record of `nbytes` was read; whether it was before, in which case it is forgotten."""
        with self._lock:
            before = self._seen.pop(record_id, None)
            if before is not None:
                self._bytes -= before
                return True
            self._seen[record_id] = nbytes
            self._bytes += nbytes
            while self._bytes > self._limit:
                self._bytes -= self._seen.popitem(last=False)[1]
            return False
