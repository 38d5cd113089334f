"""A model, a tokenizer and a text that are small enough to calibrate in a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny, tiny_of_kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvstore.calibration.calibrate import calibrate
from kvstore.calibration.dump import KVDump

WINDOWS, LENGTH = 9, 48


def tokenizer() -> Any:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def model(name: str = "llama", **changes: Any) -> Any:
    return tiny(name, vocab_size=256, **changes).to(torch.bfloat16)


def of_kind(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with windows, latents or states, of a token a byte."""
    made = tiny_of_kind(kind)
    made.resize_token_embeddings(256, mean_resizing=False)
    return made.to(dtype)


def text(characters: int = WINDOWS * LENGTH + 100) -> str:
    words = ["the ", "cache ", "of ", "a ", "model ", "holds ", "keys ", "and ", "values ", "for ", "every ", "token\n"]
    chosen = random.Random(7)
    return "".join(chosen.choice(words) for _ in range(characters))[:characters]


def dump(folder: Path) -> KVDump:
    """The model's caches of the text, written to a folder."""
    return KVDump.make(model(), tokenizer(), text(), folder, windows=WINDOWS, length=LENGTH)


def told(model: Any, path: Path) -> list[str]:
    """Calibrates the model on the text into a file; what that told."""
    found: list[str] = []
    sizes = {"windows": WINDOWS, "length": LENGTH}
    calibrate(model, tokenizer(), text(), path, **sizes, progress=lambda what, _a, _b: found.append(what))
    return found


def checkpoint(folder: Path) -> Path:
    """The model and its tokenizer, saved."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
