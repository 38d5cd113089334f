"""The levels of the exact predictor on the GPU that holds the cache, as `predictive` is measured beside this.

A program codes a block, group after group, so that a call of one block leaves most of a GPU idle; 32 do less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common import Rows
from benchmarks.device.machine import Machine
from benchmarks.device.predictive import MADE, Blocks, made_block, measure_threads, trial
from kvstore.codecs import KVView
from kvstore.codecs.predictive.codec import LevelModes, PredictiveCodec
from kvstore.codecs.predictive.levels.model import LEVELS


def measure(machine: Machine, rows: Rows) -> None:
    from kvstore.codecs.predictive.kernels import blocks

    if machine.dry:
        blocks.TRIAL_TOKENS = 4  # the interpreter takes its time
    for level in machine.choose(LEVELS, LEVELS, LEVELS[:1]):
        measure_level(machine, rows, level)


def measure_level(machine: Machine, rows: Rows, level: int) -> None:
    import levelcases
    import predictcases

    from kvstore.codecs.predictive.levels.kernels import blocks as kernels
    from kvstore.codecs.predictive.levels.kernels import launch
    from kvstore.codecs.predictive.levels.mode import LevelMode, native_model

    shapes = [machine.choose((8, 128, 128), (8, 128, 128), (1, 8, 8))] * machine.choose(8, 4, 2)
    model, name = levelcases.model_of(shapes, True, level, 5), f"levels/{level}"
    made = [made_block(machine, model, number, levelcases) for number in range(machine.choose(MADE, MADE, 1))]
    levels = LevelModes((level,), lambda _: model)
    codec = PredictiveCodec(predictcases.model_of(shapes, True, 5), levels=levels, level=level)
    trial(machine, rows, name, codec, model, made[0])
    native = native_model(model)

    def encoded(tokens: np.ndarray[Any, Any], view: KVView) -> list[bytes]:
        return levelcases.encoded(native, tokens, 0, view, "scalar")

    device = kernels.load(model, machine.device)
    for count in machine.choose((1, 8, 32), (1, 8), (1,)):
        Blocks(name, device, launch, encoded, made).measure(machine, rows, count)
    measure_threads(machine, rows, name, LevelMode(model), made[0])
