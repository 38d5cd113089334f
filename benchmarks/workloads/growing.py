"""One cache that grows by a token a step, and is put at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.workloads.arrival import Ids
from benchmarks.workloads.text import Text

PROMPT, STEPS = 512, 1024
PROMPT_QUICK, STEPS_QUICK = 128, 64


@dataclass(frozen=True)
class Growing:
    """tokens: `[prompt + steps]`. Snapshot i, from 1, holds the first `prompt + i` of them."""

    tokens: Ids
    prompt: int
    steps: int

    @property
    def snapshot_tokens(self) -> int:
        """Tokens of all snapshots together: the sum of their lengths."""
        return self.steps * self.prompt + self.steps * (self.steps + 1) // 2


def growing(text: Text, quick: bool) -> Growing:
    prompt, steps = (PROMPT_QUICK, STEPS_QUICK) if quick else (PROMPT, STEPS)
    return Growing(np.array(text.take(prompt + steps), np.uint32), prompt, steps)
