"""Prompts whose tokens were computed before behind others: three kinds of contexts, by turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import KVDump
from kvstore.core.approximate import Candidate
from kvstore.core.layout import KVLayout
from kvstore.core.rope import can_move
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.transformers.recompute import check_model

Tokens = npt.NDArray[np.int64]
LEAST = 256  # tokens of a window
ALIKE = 8  # tokens that all prompts begin with, as those of an application do: what attention leans on is the same
HEADS = ((12, 6), (16, 48))  # tokens of the prompt's own beginning, and of the donor's: near alike, and not


@dataclass(frozen=True)
class Case:
    """A prompt, what comes after it, and the prompts that were computed before; int64 `[tokens]` each.

    pieces: what the prompt has in common with those, behind the first ALIKE tokens; `donor` is the number of one.
    """

    prompt: Tokens
    after: Tokens
    before: tuple[Tokens, ...]
    pieces: tuple[Candidate, ...]


def check_cases(model: Any, layout: KVLayout, length: int) -> None:
    """Check that cases can be made of windows of `length` tokens.

    Raises:
        ConfigError: they are too short.
        UnsupportedModel: single positions cannot be recomputed (layers with windows, say), or keys cannot be moved to
            another position.
    """
    if length < LEAST:
        raise ConfigError(f"length: approximate needs windows of {LEAST} tokens, found {length}; make them longer")
    try:
        check_model(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"approximate: {error}; leave approximate out") from error
    if not can_move(layout):
        raise UnsupportedModel(
            f"approximate: keys with the rotary embedding {layout.rope} cannot be moved; leave approximate out"
        )


def cases(dump: KVDump, windows: Sequence[int]) -> Iterator[Case]:
    """One for each window, by turns: behind a beginning a little longer, passages in other company, behind another
    beginning, and other company again, where most is lost."""
    apart = max(1, dump.windows // 5)  # neighbours often are of one conversation, and lose less
    after, alike = dump.length // 8, dump.tokens(0)[:ALIKE]
    for number, window in enumerate(windows):
        # They may be windows of any kind, for they give context alone.
        others = [dump.tokens((window + apart * (1 + i)) % dump.windows) for i in range(4)]
        own = dump.tokens(window)
        if number % 2 == 0:
            here, there = HEADS[number // 2 % len(HEADS)]
            count = dump.length - after - max(here, there)
            yield Case(
                np.concatenate([alike, others[0][:here], own[:count]]),
                own[count : count + after],
                (np.concatenate([alike, others[1][:there], own[:count]]),),
                (Candidate(ALIKE + here, count, 0, here - there, 0, ALIKE + there),),
            )
            continue
        size = (dump.length - after) // 3
        passages = [x[:size] for x in others]
        yield Case(
            np.concatenate([alike, passages[0], passages[1], own[:size]]),
            own[size : size + after],
            (
                np.concatenate([alike, passages[1], passages[2], own[:size]]),
                np.concatenate([alike, passages[3], passages[0], passages[2]]),
            ),
            (
                Candidate(ALIKE, size, 0, -size, 1, ALIKE + size),
                Candidate(ALIKE + size, size, 0, size, 0, ALIKE),
                Candidate(ALIKE + 2 * size, size, 0, 0, 0, ALIKE + 2 * size),
            ),
        )
