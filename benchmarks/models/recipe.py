"""A recipe: everything that a trained model follows from, and where its checkpoint is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path("build/models")
VERSION = 2  # of the trainer; one more if the same recipe no longer gives the same model


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        name: what `--model` takes.
        model_type, config: transformers' name of the family, and the fields of its config, without the vocabulary.
        steps, batch, length: optimiser steps, sequences a step, tokens a sequence.
        short: so many of the first steps take the first quarter of their sequences alone. What is learned early needs
            steps more than it needs context, and such a step takes a fifth of the time.
        rate: the highest learning rate; reached after `warmup` steps, then a cosine down to a tenth.
        decay: weight decay of matrices. clip: the largest norm of a step's gradient.
        seed: of the weights and of the order of the text.
        vocabulary: how many of SmolLM2's token ids are kept.
        characters: how much text is tokenised at the most.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    steps: int = 900
    short: int = 700
    batch: int = 1
    length: int = 1024
    rate: float = 1.5e-3
    warmup: int = 60
    decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    vocabulary: int = 8192
    characters: int = 6_000_000

    def quick(self, config: Mapping[str, Any]) -> Recipe:
        """The same family, so small that it trains in seconds: for tests. config: the fields that differ."""
        return replace(
            self,
            name=f"{self.name}-quick",
            config=dict(self.config) | dict(config),
            steps=8,
            short=4,
            batch=2,
            length=128,
            warmup=2,
            vocabulary=512,
            characters=40_000,
        )

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, the same for equal recipes and different for others."""
        text = json.dumps({"version": VERSION} | asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Where the checkpoint is, once it is trained."""
        return FOLDER / self.name / self.digest

    @property
    def is_trained(self) -> bool:
        """Whether the checkpoint is there; it appears whole or not at all."""
        return (self.folder / "config.json").exists()

    @property
    def tokens(self) -> int:
        """How many tokens training sees."""
        return sum(self.batch * self.length_at(step) for step in range(self.steps))

    def length_at(self, step: int) -> int:
        """How many tokens of each sequence step 0, 1, ... sees."""
        return self.length // 4 if step < self.short else self.length
