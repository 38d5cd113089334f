"""When the first token of an answer is there."""

from __future__ import annotations

import time
from typing import Any

from transformers.generation import BaseStreamer


class Stopwatch(BaseStreamer):  # type: ignore[misc]
    """For `model.generate(streamer=...)`: seconds from its making to each token."""

    def __init__(self) -> None:
        self.begin, self._seconds = time.perf_counter(), list[float]()

    @property
    def first_token(self) -> float:
        return self._seconds[1]  # [0] is the prompt

    def put(self, value: Any) -> None:
        self._seconds.append(time.perf_counter() - self.begin)

    def end(self) -> None:
        pass
