"""Models to measure on besides SmolLM2, trained here: `python -m benchmarks.models [NAME ...] [--quick] [--json FILE]`

Three families in small, each a file: `llama3` (rotary type llama3, 4 KV heads of 64), `gemma3` (sliding windows and
full layers), `deepseek3` (latents). They learn from
ShareGPT's conversations, those that benchmarks calibrate or measure on left out, with the first 8,192 ids of SmolLM2's
vocabulary. They are here so that caches of other shapes are not random; nothing else is claimed of them, and their
losses are stated.

The command trains what is not trained yet, one model after the other, and prints the loss curves. It can be stopped and
goes on; `--minutes` bounds it. Checkpoints are kept in build/models/NAME/HASH, where the hash is the recipe's: who
changes a recipe gets another model. Benchmarks take `--model NAME`, too:

    python -m benchmarks.models
    python -m benchmarks.codecs --model llama3
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models import deepseek3, gemma3, llama3
from benchmarks.models.recipe import Recipe

_FAMILIES = (llama3, gemma3, deepseek3)
RECIPES: dict[str, Recipe] = {family.RECIPE.name: family.RECIPE for family in _FAMILIES}
QUICK: dict[str, Recipe] = {family.QUICK.name: family.QUICK for family in _FAMILIES}
NAMES = ("smollm2", *RECIPES, *QUICK)
"""What `load`, and `--model` of the benchmarks, take."""


def checkpoint(name: str) -> Path | None:
    """The checkpoint of a name in `NAMES`; None is the installed SmolLM2.

    Ends the program with a plain message if the name is unknown or the model is not trained yet.
    """
    if name not in NAMES:
        raise SystemExit(f"model: expected a folder or one of {', '.join(NAMES)}, found {name!r}")
    recipe = RECIPES.get(name) or QUICK.get(name)
    if recipe is None:
        return None
    if not recipe.is_trained:
        base, _, quick = name.partition("-")
        raise SystemExit(
            f"{name} is not trained yet; run `python -m benchmarks.models {base}{' --quick' * bool(quick)}`"
        )
    return recipe.folder


def load(name: str) -> tuple[Any, Any]:
    """(model, tokenizer) by a name in `NAMES`, bfloat16 on the CPU, in evaluation mode; see `checkpoint`."""
    from benchmarks.conversations import load_model

    return load_model(checkpoint(name), stored=False)
