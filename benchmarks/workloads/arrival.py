"""One sequence of a workload, as it arrives at the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Arrival:
    """tokens: `[n]`, whose cache is computed and put. counterpart: whether an earlier arrival had the same content
    under another prefix, so that there is something to save beyond the prefix. following: tokens that come next,
    for what a loss does to the model's predictions; None where nothing is predicted."""

    tokens: Ids
    counterpart: bool
    following: Ids | None = None

    @classmethod
    def of(cls, tokens: list[int], counterpart: bool, following: list[int] | None = None) -> Arrival:
        after = None if following is None else np.array(following, np.uint32)
        return cls(np.array(tokens, np.uint32), counterpart, after)
