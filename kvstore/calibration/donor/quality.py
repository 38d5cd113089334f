"""What the donor codec makes of passages behind another beginning."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.calibration.donor.passages import passages
from kvstore.calibration.dump import KVDump
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.groups.model import model_of_section
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.view import KVView

Arrays = dict[str, Any]


def report(model: Any, dump: KVDump, arrays: Arrays, block: int = 64) -> dict[str, Any]:
    """Of the held-out windows, whole payloads: "bits_per_value" with the fit, "without" by the donor alone."""
    fitted = model_of_section(dump.layout, arrays)
    codecs = (DonorCodec(EntropyCodec(), groups=lambda: fitted), DonorCodec(EntropyCodec()))
    spent, values = [0, 0], 0
    for pair in passages(model, dump, list(dump.held_out)):
        stored = [(k[:, pair.start :], v[:, pair.start :]) for k, v in dump.tensors(pair.window)]
        donor = KVView.of_layers(dump.layout, stored)
        view = KVView.of_layers(dump.layout, [(k.contiguous(), v.contiguous()) for k, v in pair.layers])
        tokens = dump.tokens(pair.window)[pair.start :].astype(np.uint32)
        values += view.nbytes // dump.layout.item_bytes
        for begin in range(0, len(tokens), block):
            info = BlockInfo(dump.layout, tokens[begin : begin + block], pair.position + begin)
            span = Span(0, info.count, 0, 0, pair.position - pair.start)
            rows = [DonorRows.of(span, donor.narrow(begin, info.count))]
            for number, codec in enumerate(codecs):
                room = memoryview(bytearray(codec.bound(info)))
                sizes = codec.encode(info, view.narrow(begin, info.count), rows, room)
                assert sizes is not None  # it fits by the meaning of bound
                spent[number] += 8 * sum(sizes)
    return {"bits_per_value": spent[0] / values, "without": spent[1] / values}
