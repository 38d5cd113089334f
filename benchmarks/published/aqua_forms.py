"""AQUA-KV with its parts changed one by one: backbone, predictors, first layer, sinks, dropped tokens. Plain numpy.

A form is fitted layer by layer in closed loop, as the codec is, and codes whole windows. Bits count everything but what
is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers.quality.data import Pairs
from kvstore.calibration.aqua.fit import Ridge, Windows
from kvstore.codecs.aqua.codec import BACKBONES
from kvstore.codecs.aqua.higgs import Floats
from kvstore.codecs.aqua.predictors import predict, rounded
from kvstore.core.rope import rotate

EXACT_BITS = 16  # of a value as it is
HIDDEN, STEPS, BATCH, RATE = 128, 100, 512, 4e-3  # of the predictor with a hidden layer
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Form:
    """backbone: name of the codec's. first: bits of the first layer, 16: as it is. sinks: first tokens that are as they
    are. kind: of predictors, "linear", "rank" (of a quarter of the outputs), "mlp" or "none". keys, values: whether
    these are predicted. rotated: keys are predicted as the cache has them."""

    backbone: str = "higgs"
    bits: int = 2
    first: int = 4
    sinks: int = 4
    kind: str = "linear"
    keys: bool = True
    values: bool = True
    rotated: bool = False


class Map(Protocol):
    def __call__(self, inputs: list[Floats]) -> Floats: ...


@dataclass
class Linear:
    weights: Sums

    def __call__(self, inputs: list[Floats]) -> Floats:
        return predict(self.weights, inputs)


class Hidden:
    """A linear map, and a hidden layer for what it leaves."""

    def __init__(self, linear: Linear, inputs: Floats, targets: Floats) -> None:
        torch.manual_seed(0)
        self._linear, self._mean, self._scale = linear, inputs.mean(0), inputs.std(0) + 1e-6
        left = torch.from_numpy(targets - linear([inputs]))
        self._spread = left.std(0) + 1e-6
        x, y = torch.from_numpy((inputs - self._mean) / self._scale), left / self._spread
        self._net = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, y.shape[1])
        )
        torch.nn.init.zeros_(self._net[2].weight)
        optimiser = torch.optim.AdamW(self._net.parameters(), RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
        for _ in range(STEPS):
            rows = torch.randint(len(x), (BATCH,))
            loss = (self._net(x[rows]) - y[rows]).pow(2).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()

    @torch.no_grad()
    def __call__(self, inputs: list[Floats]) -> Floats:
        x = np.concatenate(inputs, axis=1)
        found = self._net(torch.from_numpy((x - self._mean) / self._scale)) * self._spread
        return self._linear([x]) + found.numpy()


class Fitted:
    """A form with its predictors; codes windows."""

    def __init__(self, form: Form, windows: Windows) -> None:
        self.form, self._layout = form, windows.layout
        self._backbone = BACKBONES[form.backbone]
        self.maps: list[tuple[Map | None, Map | None]] = [(None, None)]
        if form.kind == "none":
            self.maps *= len(self._layout.layers)
            return
        count = range(windows.windows)
        before = [self._known(self._layer(0, *self._rows(windows, 0, w), None)) for w in count]
        for number in range(1, len(self._layout.layers)):
            rows = [self._rows(windows, number, w) for w in count]
            keys = self._fit([[x[0]] for x in before], [k for k, _ in rows]) if form.keys else None
            guesses = [keys([x[0]]) if keys else None for x in before]
            found = [rounded(self._coded(k, guess)) for (k, _), guess in zip(rows, guesses, strict=True)]
            inputs = [[k, x[1]] for k, x in zip(found, before, strict=True)]
            values = self._fit(inputs, [v for _, v in rows]) if form.values else None
            self.maps.append((keys, values))
            before = [
                (k, rounded(self._coded(v, values(x) if values else None)))
                for k, x, (_, v) in zip(found, inputs, rows, strict=True)
            ]

    def bits(self, tokens: int) -> float:
        """Bits of all values of so many tokens, the sinks left out."""
        rows, total = tokens - self.form.sinks, 0
        for number, shape in enumerate(self._layout.layers):
            for width in (shape.heads * shape.key_dim, shape.heads * shape.value_dim):
                bits = self._bits_of(number)
                total += 2 * rows * width if bits == EXACT_BITS else self._backbone.size(rows, width, bits)
        return 8.0 * total / (rows * self._layout.bytes_per_token / 2)

    def code(self, pairs: Pairs) -> Pairs:
        """What a decoder has of a window, `[heads, tokens, dim]`; its first tokens are as they were."""
        found: Pairs = []
        before: tuple[Floats, Floats] | None = None
        for number, (k, v) in enumerate(pairs):
            layer = self._layer(number, *self._of_cache(k, v, number), before)
            before = self._known(layer)
            exact = self._bits_of(number) == EXACT_BITS
            found.append((k, v) if exact else self._to_cache(layer, k, v, number))
        return found

    # -- a layer -------------------------------------------------------------------------------------------------------

    def _rows(self, windows: Windows, number: int, window: int) -> tuple[Floats, Floats]:
        keys, values = (np.asarray(x, np.float32)[self.form.sinks :] for x in windows.layer(number, window))
        return self._turned(keys, number, -1), values

    def _of_cache(self, k: torch.Tensor, v: torch.Tensor, number: int) -> tuple[Floats, Floats]:
        keys, values = (x[:, self.form.sinks :].float().transpose(0, 1).flatten(1).numpy() for x in (k, v))
        return self._turned(keys, number, -1), values

    def _to_cache(
        self, layer: tuple[Floats, Floats], k: torch.Tensor, v: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for old, rows in ((k, self._turned(layer[0], number, 1)), (v, layer[1])):
            new = torch.from_numpy(rows).view(len(rows), old.shape[0], -1).transpose(0, 1).to(old.dtype)
            found.append(torch.cat([old[:, : self.form.sinks], new], dim=1))
        return found[0], found[1]

    def _turned(self, keys: Floats, number: int, sign: int) -> Floats:
        if self.form.rotated:
            return keys
        positions = self.form.sinks + np.arange(len(keys))
        return rotate(keys, self._layout.layers[number].heads, positions, self._layout.rope, sign)

    def _layer(
        self, number: int, keys: Floats, values: Floats, before: tuple[Floats, Floats] | None
    ) -> tuple[Floats, Floats]:
        """The decoded layer, before it is rounded to what a cache holds."""
        if self._bits_of(number) == EXACT_BITS:
            return keys, values
        guess_keys, guess_values = self.maps[number] if number < len(self.maps) else (None, None)
        bits = self._bits_of(number)
        found = self._coded(keys, guess_keys([before[0]]) if guess_keys and before else None, bits)
        inputs = [rounded(found), before[1]] if before else []
        return found, self._coded(values, guess_values(inputs) if guess_values else None, bits)

    def _bits_of(self, number: int) -> int:
        return self.form.first if number == 0 and self.form.kind != "none" else self.form.bits

    def _coded(self, target: Floats, guess: Floats | None, bits: int | None = None) -> Floats:
        bits = bits or self.form.bits
        data = self._backbone.encode(target if guess is None else target - guess, bits)
        if data is None:
            raise SystemExit("aqua: numbers that are not finite")
        decoded = self._backbone.decode(data, *target.shape, bits)
        return decoded if guess is None else guess + decoded

    def _known(self, layer: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """What the next layer is predicted from."""
        return rounded(layer[0]), rounded(layer[1])

    def _fit(self, inputs: list[list[Floats]], targets: list[Floats]) -> Map:
        ridge = Ridge()
        for x, y in zip(inputs, targets, strict=True):
            ridge.add(x, y)
        linear = Linear(ridge.solve().astype(np.float64))
        if self.form.kind == "linear":
            return linear
        x, y = np.concatenate([np.concatenate(part, axis=1) for part in inputs]), np.concatenate(targets)
        return reduced(linear, x, y.shape[1] // 4) if self.form.kind == "rank" else Hidden(linear, x, y)


def reduced(linear: Linear, inputs: Floats, rank: int) -> Linear:
    """Reduced-rank regression: the map on the directions in which its predictions vary most."""
    guess = predict(linear.weights, [inputs]).astype(np.float64)
    mean = guess.mean(0)
    _, _, across = np.linalg.svd(np.cov((guess - mean).T))
    keep = across[:rank].T @ across[:rank]
    weights = linear.weights @ keep
    weights[-1] += mean - mean @ keep
    return Linear(weights)


def heavy(weights: torch.Tensor, share: float) -> torch.Tensor:
    """The tokens that H2O keeps of a layer, int64 `[heads, kept]`, ascending: half of them the last ones, the others
    those that got most attention.

    weights: what each token got of all queries, `[heads, tokens]`. share: of tokens that are kept.
    """
    tokens = weights.shape[1]
    count = int(tokens * share)
    recent = count // 2
    most = weights[:, : tokens - recent].topk(count - recent).indices
    last = torch.arange(tokens - recent, tokens).expand(len(weights), -1)
    return torch.cat([most.sort().values, last], dim=1)
