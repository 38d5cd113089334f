"""The text that the models learn from: ShareGPT's conversations but for those that benchmarks measure on.

Those are of usual sizes, and so are those for calibration. What is left are shorter and longer ones, of which there are
most: the models learn from neither half.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.conversations import held_out_conversations, held_out_text

LONGEST = 4000  # characters of a message
TELLING = 40  # a message of fewer characters ("thank you", "continue") may stand in both halves
HELD_OUT = 8  # windows of the text for tests that the loss is stated for

Ids = npt.NDArray[np.uint16]
Turns = list[dict[str, str]]


def for_training(source: Iterable[Turns], tests: Iterable[Turns]) -> Iterator[Turns]:
    """Those of `source` that share no message of `TELLING` characters with a conversation of `tests`."""
    taken = {turn["content"] for turns in tests for turn in turns if len(turn["content"]) >= TELLING}
    for turns in source:
        if taken.isdisjoint(turn["content"] for turn in turns):
            yield turns


def written(turns: Turns, chat: bool) -> str:
    """A conversation in ChatML's markup, or as paragraphs, which is how `held_out_text` has them."""
    if chat:
        return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return "\n\n".join(turn["content"] for turn in turns) + "\n\n"


def training_text(characters: int) -> Iterator[str]:
    """Conversations in file order, every second in ChatML, until they have `characters`."""
    longer = held_out_conversations(min_turns=1, max_characters=LONGEST)
    with contextlib.closing(held_out_conversations()) as tests, contextlib.closing(longer) as source:
        found = 0
        for number, turns in enumerate(for_training(source, tests)):
            if found >= characters:
                return
            text = written(turns, number % 2 == 0)
            found += len(text)
            yield text


def token_stream(tokenizer: Any, characters: int, folder: Path) -> Ids:
    """All of it as one stream of ids, `[n]`; kept in `folder` under a hash of the tokenizer. A minute at first."""
    what = tokenizer.backend_tokenizer.to_str() + f"{characters} {LONGEST} {TELLING}"
    path = folder / f"text-{hashlib.sha256(what.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        parts = [np.array(tokenizer(text, verbose=False).input_ids, np.uint16) for text in training_text(characters)]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{os.getpid()}.npy")
        np.save(partial, np.concatenate(parts))
        partial.rename(path)
    stream: Ids = np.load(path, allow_pickle=False)
    return stream


def held_out(tokenizer: Any, length: int) -> Ids:
    """Windows of the text for tests, `[8, length + 1]`."""
    count = HELD_OUT * (length + 1)
    ids = tokenizer(held_out_text(count * 8), verbose=False).input_ids[:count]
    return np.array(ids, np.uint16).reshape(HELD_OUT, length + 1)


def batch_of(stream: Ids, step: int, batch: int, length: int, seed: int) -> Ids:
    """The sequences of one step, `[batch, length + 1]`: the stream is cut in windows, which come in an order of their
    own in each pass. Follows from the arguments alone, so a run that was interrupted goes on with the same."""
    windows = (len(stream) - 1) // length
    rows = []
    for number in range(step * batch, (step + 1) * batch):
        turn, place = divmod(number, windows)
        start = int(np.random.default_rng([seed, turn]).permutation(windows)[place]) * length
        rows.append(stream[start : start + length + 1])
    return np.stack(rows)
