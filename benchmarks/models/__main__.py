"""Trains the models; see `benchmarks.models`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows
from benchmarks.conversations import load_tokenizer
from benchmarks.models import QUICK, RECIPES
from benchmarks.models.recipe import Recipe
from benchmarks.models.train import train
from benchmarks.models.vocabulary import small_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="Trains the models to measure on.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)} (all)")
    parser.add_argument("--quick", action="store_true", help="so small that they train in seconds: NAME-quick")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows to FILE, as an array")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(a GPU if there is one)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of each model; the next call goes on (no bound)"
    )
    args = parser.parse_args()
    names = args.names or list(RECIPES)
    if unknown := set(names) - set(RECIPES):
        parser.error(f"NAME: expected of {', '.join(RECIPES)}, found {', '.join(sorted(unknown))}")
    rows, tokenizer, done = Rows("models", args.json), None, True
    for name in names:
        recipe = QUICK[f"{name}-quick"] if args.quick else RECIPES[name]
        if not recipe.is_trained:
            tokenizer = tokenizer or load_tokenizer()
            done &= train(recipe, small_tokenizer(tokenizer, recipe.vocabulary), args.device, args.minutes)
        if recipe.is_trained:
            report(rows, recipe)
    rows.main_exit(done)


def report(rows: Rows, recipe: Recipe) -> None:
    """Rows of a model that is trained: its size, what it saw, its curve."""
    facts: dict[str, Any] = json.loads((recipe.folder / "recipe.json").read_text())
    rows.add(recipe.name, "parameters", facts["parameters"], "numbers")
    rows.add(recipe.name, "trained_tokens", recipe.tokens, "tokens")
    rows.add(recipe.name, "text_tokens", facts["text"], "tokens")
    rows.add(recipe.name, "train_s", facts["seconds"], f"s on {facts['device']}")
    for point in json.loads((recipe.folder / "curve.json").read_text()):
        for metric in ("loss", "held_out"):
            if metric in point:
                rows.add(f"{recipe.name}/step{point['step']}", metric, point[metric], "nats a token")


if __name__ == "__main__":
    main()
