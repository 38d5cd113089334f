"""What AQUA-KV makes of windows that its predictors were not fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.calibration.dump import KVDump
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.aqua.predictors import AquaPredictors
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.view import KVView

Arrays = Mapping[str, npt.NDArray[Any]]


def report(dump: KVDump, arrays: Arrays, bits: int) -> dict[str, Any]:
    """Of 2 bits; "error": mean square of what is lost, relative to the values', of K and of V."""
    codec = AquaCodec(AquaPredictors.from_arrays(dump.layout, arrays), bits)
    spent, lost, power = 0, np.zeros(2), np.zeros(2)
    for window in dump.held_out:
        info = BlockInfo(dump.layout, dump.tokens(window).astype(np.uint32), 0)
        layers = dump.tensors(window)
        decoded = [(torch.empty_like(k), torch.empty_like(v)) for k, v in layers]
        payload = memoryview(bytearray(codec.bound(info)))
        sizes = codec.encode(info, KVView.of_layers(dump.layout, layers), payload)
        assert sizes is not None
        spent += sum(sizes)
        codec.decode(info, payload[: sum(sizes)], sizes, KVView.of_layers(dump.layout, decoded))
        for pair, found in zip(layers, decoded, strict=True):
            for which in range(2):
                x = pair[which].double()
                lost[which] += (x - found[which].double()).pow(2).sum().item()
                power[which] += x.pow(2).sum().item()
    tokens = len(dump.held_out) * dump.length
    rate = 8 * spent / (tokens * dump.layout.bytes_per_token / dump.layout.item_bytes)
    return {"bits_per_value": rate, "error": (lost / power).tolist()}
