"""How fast are the levels of the exact predictor as caches get wider? `python -m benchmarks.wide [--quick]`

Levels 1 to 3 at KV widths of 192, 512 and 1,024 columns of K and as many of V, blocks of 64 tokens, one thread. Models
and blocks are made up: random weights, and values that are the prediction plus noise, so that all work is done that a
real cache would need; `ratio` says no more than that. `decode` is of one block, `decode_run` of as many as a get
decodes together where a prefix is long. `int8_peak` is what this core multiplies and adds in 8-bit integers, in
registers, with the instructions that the codec uses; it and the levels are measured in turns. `*_share_of_peak` is the
multiply-adds that a level makes, divided by the time of all that it does, over the peak. Times are processor time of
the thread, so that other work beside it tells less.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Rows, arguments, interleave
from kvstore import KVLayout
from kvstore.codecs import KVView
from kvstore.codecs.in_order import TOGETHER
from kvstore.codecs.predictive import _levels
from kvstore.codecs.predictive.levels import reference
from kvstore.codecs.predictive.levels.mode import native_model
from kvstore.codecs.predictive.levels.model import LEVELS, REACH, LevelModel, packed_size
from kvstore.codecs.predictive.model import CLASSES, ESCAPE, OFFSET, SYMBOLS
from kvstore.codecs.rans.coder import quantise
from kvstore.core.rope import fixed_point

Arrays = dict[str, npt.NDArray[Any]]
WIDTHS = (192, 512, 1024)
DIM, TOKENS, VOCABULARY = 64, 64, 256
TIMED = ("encode", "decode", "decode_run")
ROUNDS, PRODUCTS = 1 << 21, 1 << 32  # the most of the peak's loop; what follows must not find a hot processor
ROPE = '{"rope_theta": 10000.0, "rope_type": "default"}'


@dataclass(frozen=True)
class Case:
    """A level at a width: a model for the C++, a block, and what it is coded to."""

    model: _levels.Model
    view: KVView
    found: list[KVView]  # to decode to, memory that was written before, as what is coded to
    room: bytearray
    payload: bytes
    sizes: tuple[int, ...]
    multiply_adds: float  # a value

    @classmethod
    def of(cls, level: int, width: int, layers: int) -> Case:
        layout = KVLayout.uniform(num_layers=layers, heads=width // DIM, head_dim=DIM, rope=ROPE)
        lossless, levels = arrays_of(layers, width, level)
        model = LevelModel.from_arrays(layout, level, lossless, levels)
        native, view = native_model(model), _block(model)
        out = bytearray(2 * view.nbytes)
        sizes = _levels.encode(native, np.arange(TOKENS), 0, view.rows, out)
        assert isinstance(sizes, tuple)
        parts = [part for pair in model.parts[1:] for part in pair]
        made = sum((0 if p.weight is None else p.weight.size) + packed_size(p.width) for p in parts)
        found = []
        for _ in range(TOGETHER):
            tensors = [torch.zeros_like(tensor) for tensor in view.tensors()]
            found.append(KVView.of_layers(layout, list(zip(tensors[::2], tensors[1::2], strict=True))))
        return cls(native, view, found, out, bytes(out[: sum(sizes)]), sizes, made / (2 * width * layers))

    def encode(self) -> float:
        """Seconds of processor time."""
        begin = time.thread_time()
        _levels.encode(self.model, np.arange(TOKENS), 0, self.view.rows, self.room)
        return time.thread_time() - begin

    def decode(self) -> float:
        return self._decode(self.found[:1])

    def decode_run(self) -> float:
        """Seconds for one of the blocks."""
        return self._decode(self.found) / len(self.found)

    def _decode(self, targets: list[KVView]) -> float:
        for tensor in (tensor for target in targets for tensor in target.tensors()):
            tensor.zero_()
        begin, tokens, layers = time.thread_time(), np.arange(TOKENS), len(self.sizes)
        blocks = [
            _levels.in_order(self.model, tokens, 0, self.payload, self.sizes, target.rows, TOKENS) for target in targets
        ]
        wrong = _levels.InOrder.until(blocks, layers)
        seconds = time.thread_time() - begin
        assert wrong == [None] * len(targets)
        for target in targets:
            same = zip(target.tensors(), self.view.tensors(), strict=True)
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in same)
        return seconds


def arrays_of(layers: int, width: int, level: int) -> tuple[Arrays, Arrays]:
    """Random sections "lossless", as far as levels use it, and "levels"."""
    rng, levels = np.random.default_rng([width, level]), Arrays()
    likely = (1e6 * np.exp(-np.abs(np.arange(SYMBOLS) - OFFSET) / 12)).astype(np.int64) + 1
    likely[ESCAPE] = 300
    levels[f"{level}.freqs"] = quantise(np.tile(likely, (2 * CLASSES, 1)), 12, floor=True)
    for number in range(layers):
        for which in range(2):
            shared = f"{number}.{'kv'[which]}."
            own = f"{level}.{shared}"
            levels[shared + "fix"] = np.full(width, 8, np.int8)
            levels[shared + "gain"] = np.full(width, 1 << 11, np.int16)
            if number == 0:
                levels[shared + "row"] = np.full(width, 1 << 9, np.int16)
            levels[own + "narrow"] = np.full(width, 1 << 13, np.int16)
            levels[own + "shift"] = np.full(width, 6, np.int8)
            levels[own + "bias"] = rng.integers(-20_000, 20_000, width).astype(np.int32)
            levels[own + "scale"] = rng.integers(-16, -8, width).astype(np.int16)
            levels[own + "adapt"] = np.zeros(3, np.int32)
            inputs = width * (2 * min(number, REACH[level]) + which)
            if number and inputs:
                levels[own + "weight"] = rng.integers(-30, 31, (inputs, width)).astype(np.int8)
            if number:
                levels[own + "group"] = rng.integers(-30, 31, packed_size(width)).astype(np.int8)
    radians = 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    lossless = {
        "token_kv": rng.integers(-128, 128, (VOCABULARY, 2 * width)).astype(np.int8),
        "rope_fine": fixed_point(np.arange(128)[:, None] * radians),
        "rope_coarse": fixed_point(128 * np.arange(2)[:, None] * radians),
    }
    return lossless, levels


def _block(model: LevelModel) -> KVView:
    """What the model predicts of the tokens 0, 1, ..., with noise of the expected size."""
    rng, walk = np.random.default_rng(1), reference.Walk(model, torch.arange(TOKENS), 0)
    layers = []
    for number, (shape, pair) in enumerate(zip(model.layout.layers, model.parts, strict=True)):
        tensors = []
        for which, part in enumerate(pair):
            bits = torch.zeros(TOKENS, part.width, dtype=torch.long)

            def values(at: slice, mu: torch.Tensor, part: Any = part, bits: torch.Tensor = bits) -> torch.Tensor:
                mean = (mu << 16).int().view(torch.float32)
                noise = torch.from_numpy(rng.normal(0, 1, mu.shape) * np.exp2(part.scale[at] / 4))
                bits[:, at] = (mean + noise).bfloat16().view(torch.int16).long() & 0xFFFF
                return reference.fixed(part, bits, walk.rotation)[:, at]

            reference.walk_groups(part, walk.sums(number, which), walk.rotation, values)
            walk.take(number, which, reference.fixed(part, bits, walk.rotation))
            cached = reference.as_cached(bits, part, walk.rotation)
            rows = cached.to(torch.int16).view(torch.bfloat16).view(TOKENS, shape.heads, DIM)
            tensors.append(rows.transpose(0, 1).contiguous())
        layers.append((tensors[0], tensors[1]))
    return KVView.of_layers(model.layout, layers)


def peak(rounds: int) -> float:
    """Seconds of processor time for so many rounds of the peak's loop."""
    begin = time.thread_time()
    _levels.multiply(rounds)
    return time.thread_time() - begin


def main() -> None:
    parser = arguments("Speed of the levels of the exact predictor by the width of the cache; one thread.")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help=f"multiples of {DIM}")
    args = parser.parse_args()
    rows, layers, repeats = Rows("wide", args.json), 3 if args.quick else 6, 5 if args.quick else 15
    per_round = _levels.multiply(1)
    rounds = min(ROUNDS, PRODUCTS // per_round)
    for width in args.widths:
        cases = {level: Case.of(level, width, layers) for level in LEVELS}
        timed = {f"{what} {level}": getattr(case, what) for level, case in cases.items() for what in TIMED}
        seconds = interleave({"peak": lambda: peak(rounds), **timed}, repeats)
        most = per_round * rounds / seconds["peak"]
        rows.add(f"int8/{width}", "int8_peak", most / 1e9, "G multiply-adds/s")
        for level, case in cases.items():
            name, raw = f"predictive:{level}/{width}", case.view.nbytes
            rows.add(name, "ratio", raw / len(case.payload), "x")
            rows.add(name, "multiply_adds", case.multiply_adds, "a value")
            for what in TIMED:
                speed = raw / seconds[f"{what} {level}"]
                rows.add(name, f"{what}_GBps", speed / 1e9, "GB/s")
                rows.add(name, f"{what}_share_of_peak", case.multiply_adds * speed / 2 / most, "share")
    rows.main_exit()


if __name__ == "__main__":
    main()
