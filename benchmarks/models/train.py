"""Trains a recipe: AdamW, warm-up and cosine, bfloat16 where matrices are multiplied and float32 elsewhere.

What varies: on one machine with one number of threads two runs give the same losses. Another number of threads, another
processor or a GPU adds the same numbers in another order: losses then differ in the third digit or so, and the weights
with them. A run that was interrupted and one that was not are the same.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models.recipe import FOLDER, Recipe
from benchmarks.models.text import Ids, batch_of, held_out, token_stream

POINTS = 50  # of the loss curve
HELD_OUT_EVERY = 10  # points
SAVE_S = 120.0  # between two copies of the state
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

Curve = list[dict[str, float]]
"""Points of the loss: step, seconds of training so far, loss (nats a token, mean since the point before), and at some
of them held_out (of text that nothing is trained on)."""


def config_of(recipe: Recipe) -> Any:
    """The transformers config of a recipe."""
    from transformers import AutoConfig

    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return AutoConfig.for_model(recipe.model_type, **recipe.config, **ends, vocab_size=recipe.vocabulary)


def new_model(recipe: Recipe) -> Any:
    """The model before its first step, float32 on the CPU; seeded."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(config_of(recipe), dtype=torch.float32)


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of step 0, 1, ..."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / recipe.steps))
    return recipe.rate * min(1.0, (step + 1) / max(1, recipe.warmup)) * cosine


class Run:
    """A training that can be left and taken up again.

    stream: the text, `[n]` ids. tests: windows of text that nothing is trained on, `[windows, length + 1]`.

    Attributes:
        model: in training; float32 weights.
        step: how many are done. seconds: that they took. curve: the loss so far.
    """

    def __init__(self, recipe: Recipe, stream: Ids, tests: Ids, device: str = "cpu") -> None:
        self.recipe, self.device, self.stream, self.tests = recipe, torch.device(device), stream, tests
        self.model = new_model(recipe).to(self.device).train()
        named = dict(self.model.named_parameters())
        matrices = [x for x in named.values() if x.ndim > 1]
        others = [x for x in named.values() if x.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), fused=True)
        self.step, self.seconds = 0, 0.0
        self.curve: Curve = []
        self._sum, self._count = 0.0, 0

    @property
    def is_done(self) -> bool:
        return self.step >= self.recipe.steps

    def advance(self) -> None:
        """One optimiser step, and a point of the curve where one is due."""
        begin, recipe = time.perf_counter(), self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(recipe, self.step)
        ids = batch_of(self.stream, self.step, recipe.batch, recipe.length, recipe.seed)
        loss = self.loss(ids[:, : recipe.length_at(self.step) + 1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._sum, self._count = self._sum + float(loss.detach()), self._count + 1
        self.step += 1
        self.seconds += time.perf_counter() - begin
        if self.step % max(1, recipe.steps // POINTS) == 0 or self.is_done:
            self._note()

    def loss(self, ids: Ids) -> torch.Tensor:
        """Nats a token, mean over all; ids: `[sequences, length + 1]`."""
        rows = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(rows[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def held_out(self) -> float:
        """Nats a token of text that nothing is trained on."""
        self.model.eval()
        found = [float(self.loss(self.tests[i : i + 1])) for i in range(len(self.tests))]
        self.model.train()
        return sum(found) / len(found)

    def _note(self) -> None:
        point = {"step": self.step, "seconds": round(self.seconds, 1), "loss": round(self._sum / self._count, 4)}
        self._sum, self._count = 0.0, 0
        if len(self.curve) % HELD_OUT_EVERY == 0 or self.is_done:
            point["held_out"] = round(self.held_out(), 4)
        self.curve.append(point)

    def save(self, path: Path) -> None:
        """Everything that the next step follows from, in one file that appears whole."""
        from safetensors.torch import save_file

        tensors = {f"weights/{name}": x.detach() for name, x in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for moment in MOMENTS if self.step else ():
                tensors[f"{moment}/{name}"] = self.optimizer.state[parameter][moment]
        facts = {"step": self.step, "seconds": self.seconds, "curve": self.curve, "mean": [self._sum, self._count]}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, partial, {"run": json.dumps(facts)})
        partial.rename(path)

    def restore(self, path: Path) -> None:
        """Goes on where `save` was called."""
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["run"])
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(file.get_tensor(f"weights/{name}"))
                for moment in MOMENTS if facts["step"] else ():
                    tensor = file.get_tensor(f"{moment}/{name}").to(self.device)
                    self.optimizer.state[parameter][moment] = tensor
        self.step, self.seconds, self.curve = facts["step"], facts["seconds"], facts["curve"]
        self._sum, self._count = facts["mean"]


def train(
    recipe: Recipe,
    tokenizer: Any,
    device: str = "cpu",
    minutes: float = math.inf,
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> bool:
    """Makes the checkpoint of a recipe, unless it is there; whether it is there now.

    tokenizer: of `small_tokenizer`. minutes: after so many the state is saved, and the next call goes on from it; a
    process that is killed loses up to two minutes.
    """
    if recipe.is_trained:
        return True
    state = recipe.folder.with_name(f"{recipe.digest}.state")
    stream = token_stream(tokenizer, recipe.characters, FOLDER)
    run = Run(recipe, stream, held_out(tokenizer, recipe.length), device)
    if state.exists():
        run.restore(state)
        note(f"{recipe.name}: goes on at step {run.step}")
    begin = saved = time.monotonic()
    while not run.is_done:
        if time.monotonic() - begin > 60 * minutes:
            run.save(state)
            note(f"{recipe.name}: stopped at step {run.step} of {recipe.steps}; the same command goes on")
            return False
        points = len(run.curve)
        run.advance()
        if len(run.curve) > points:
            note(f"{recipe.name}: {json.dumps(run.curve[-1])}")
        if time.monotonic() - saved > SAVE_S:
            run.save(state)
            saved = time.monotonic()
    keep(run, tokenizer, device)
    state.unlink(missing_ok=True)
    return True


def keep(run: Run, tokenizer: Any, device: str) -> None:
    """The checkpoint in bfloat16, its recipe and its curve, in a folder that appears whole."""
    recipe = run.recipe
    partial = recipe.folder.with_name(f"{recipe.digest}.{os.getpid()}")
    model = run.model.cpu().to(torch.bfloat16).eval()
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    where = {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
    facts = {"parameters": sum(x.numel() for x in model.parameters()), "seconds": run.seconds, "text": len(run.stream)}
    (partial / "recipe.json").write_text(json.dumps(asdict(recipe) | where | facts, indent=1) + "\n")
    (partial / "curve.json").write_text(json.dumps(run.curve, indent=1) + "\n")
    try:
        partial.rename(recipe.folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
