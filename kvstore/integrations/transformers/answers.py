"""What `model.generate` leaves in the cache of a batch: which rows and columns are the tokens of which sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore.integrations.transformers.padding import Rows


@dataclass(frozen=True)
class Held:
    """Tokens whose cache is to be stored.

    Attributes:
        row: of the batch cache.
        begin: the column of the first token.
        then: what follows them, and the cache lacks.
    """

    tokens: list[int]
    row: int
    begin: int
    then: list[int]


def prompts(rows: Rows, copies: int) -> list[Held]:
    """Return the prompts of a batch, of which each has `copies` rows in the cache. Beams move from row to row, and
    nobody says which tokens they stand for; but up to the last token of the prompt those of a prompt are alike."""
    spans = zip(rows.tokens, rows.begins, strict=True)
    return [Held(tokens, number * copies, begin, []) for number, (tokens, begin) in enumerate(spans)]


def answered(rows: Rows, sequences: torch.Tensor, eos: list[int], pad: list[int]) -> list[Held]:
    """Return what `model.generate` returned, row by row; the cache lacks the last of each. eos, pad: of `ends`."""
    copies = len(sequences) // len(rows.tokens)
    held = []
    for row, tokens in enumerate(sequences.tolist()):
        begin = rows.begins[row // copies]
        end = rows.columns + answer_length(tokens[rows.columns :], eos, pad) if len(sequences) > 1 else len(tokens)
        held.append(Held(tokens[begin : end - 1], row, begin, tokens[end - 1 : end]))
    return held


def answer_length(answer: list[int], eos: list[int], pad: list[int]) -> int:
    """Return how many tokens there are before the padding that follows a row's end while others go on. It follows the
    first of `eos`; or what other criteria ended, and then only where there is an `eos` at all.

    Example:
        >>> answer_length([5, 6, 2, 0], eos=[2], pad=[0]), answer_length([5, 6, 0, 0], eos=[2], pad=[0])
        (3, 2)
    """
    ends = [place for place, token in enumerate(answer) if token in eos]
    if ends:
        return ends[0] + 1
    length = len(answer)
    while eos and length > 1 and answer[length - 1] in pad:
        length -= 1
    return length


def setting(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Return what `model.generate` takes for one of its settings: from the call, its config, or the model's."""
    if name in kwargs:
        return kwargs[name]
    found = [getattr(config, name, None) for config in (kwargs.get("generation_config"), model.generation_config)]
    return next((value for value in found if value is not None), None)


def ends(model: Any, kwargs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids that end an answer, and those that stand behind its end."""
    found = [setting(model, kwargs, name) for name in ("eos_token_id", "pad_token_id")]
    eos, pad = ([] if ids is None else torch.as_tensor(ids).reshape(-1).tolist() for ids in found)
    return eos, pad
