"""What the measurements of one paper are given: rows to add to, and the model and texts, loaded when needed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.common import Rows
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import cut, test_text


@dataclass
class Paper:
    """name: of the paper, which the cases of its rows begin with. args: quick, model, text, windows."""

    name: str
    rows: Rows
    args: argparse.Namespace

    @cached_property
    def model(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        found: tuple[Any, Any] = load_model(self.args.model)
        return found

    def test_windows(self, usual: int) -> torch.Tensor:
        """Windows of held-out text, int64 `[windows, 1024]`: as many as asked for, or `usual`; 1 if quick."""
        count = self.args.windows or (1 if self.args.quick else usual)
        return cut(self.model[1], test_text(self.args.text, None, count), count)

    def row(self, case: str, metric: str, value: float, unit: str, published: float | None = None) -> None:
        """Adds the row `<paper>/<case>`. published: the figure of the paper, if it has one."""
        peer = (None, None) if published is None else ("paper", value / published)
        self.rows.add(f"{self.name}/{case}", metric, value, unit, *peer)
