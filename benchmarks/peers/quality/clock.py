"""Processor time of a part of the work, so that what else runs on the machine counts little."""

from __future__ import annotations

import time


class Clock:
    """`with clock:` adds to `seconds`, of all threads."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._began
