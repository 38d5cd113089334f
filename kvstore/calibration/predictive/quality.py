"""What the exact mode of the predictive codec makes of windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.calibration.dump import KVDump
from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.group_sections import arrays_of
from kvstore.codecs.predictive.codec import LevelModes, PredictiveCodec
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.words import KEPT_BITS
from kvstore.core.layout import ITEM_BYTES

Arrays = dict[str, np.ndarray[Any, Any]]


def report(dump: KVDump, arrays: Arrays) -> dict[str, Any]:
    """Bits a value, and the ratio to what values take, of windows that `fit` did not see."""
    bits = over_groups(dump, lambda part, number: bits_per_value(part, part_of(dump, arrays, number), dump.held_out))
    bits += KEPT_BITS[dump.dtype]
    return {"bits_per_value": bits, "ratio": 8 * ITEM_BYTES[dump.dtype] / bits}


def part_of(dump: KVDump, arrays: Mapping[str, Any], number: int) -> Arrays:
    """Those of a section's arrays that group `number` of a dump has."""
    return arrays_of(arrays, number) if dump.layout.is_grouped else dict(arrays)


def over_groups(dump: KVDump, bits: Callable[[KVDump, int], float]) -> float:
    """Bits a value of all layers, by those of each group of them."""
    parts = dump.groups()
    widths = [part.layout.bytes_per_token for part in parts]
    return sum(width * bits(part, i) for i, (part, width) in enumerate(zip(parts, widths, strict=True))) / sum(widths)


def bits_per_value(dump: KVDump, arrays: Arrays, windows: Sequence[int], block: int = 64) -> float:
    """What the codec makes of these windows, of words or float8, all-in but for records: payload bits a value."""
    return _bits(PredictiveCodec(PredictiveModel.from_arrays(dump.coded_layout, arrays)), dump, windows, block)


def level_bits(
    dump: KVDump, lossless: Arrays, levels: Mapping[str, Any], level: int, windows: Sequence[int] | None = None
) -> float:
    """The same of one level. windows: by default those that no fit saw."""
    model = PredictiveModel.from_arrays(dump.layout, lossless)
    modes = LevelModes((level,), lambda number: LevelModel.from_arrays(dump.layout, number, lossless, levels))
    codec = PredictiveCodec(model, levels=modes, level=level)
    return _bits(codec, dump, dump.held_out if windows is None else windows, 64)


def _bits(codec: PredictiveCodec, dump: KVDump, windows: Sequence[int], block: int) -> float:
    spent = values = 0
    for window in windows:
        tokens, pairs = dump.tokens(window).astype(np.uint32), dump.tensors(window)
        values += sum(x.numel() for pair in pairs for x in pair)
        view = KVView.of_layers(dump.coded_layout, pairs)
        for start in range(0, len(tokens), block):
            info = BlockInfo(dump.coded_layout, tokens[start : start + block], start)
            room = memoryview(bytearray(codec.bound(info)))
            sizes = codec.encode(info, view.narrow(start, info.count), room)
            assert sizes is not None  # it fits by the meaning of bound
            spent += 8 * sum(sizes)
    return spent / values
