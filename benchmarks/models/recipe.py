"""A recipe: everything that a trained model follows from, and where its checkpoint is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path("build/models")
VERSION = 1  # of the trainer; one more if the same recipe no longer gives the same model


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        name: what `--model` takes.
        model_type, config: transformers' name of the family, and the fields of its config, without the vocabulary.
        steps, batch, length: optimiser steps, sequences a step, tokens a sequence.
        rate: the highest learning rate; reached after `warmup` steps, then a cosine down to a tenth.
        decay: weight decay of matrices. clip: the largest norm of a step's gradient.
        seed: of the weights and of the order of the text.
        vocabulary: how many of SmolLM2's token ids are kept.
        characters: how much text is tokenised at the most.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    steps: int = 1200
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
        return self.steps * self.batch * self.length
