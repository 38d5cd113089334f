"""What the first layer of a group holds of every token, as far as the token alone says.

Layer 0 of a model sees nothing but the token, so its weights say it (`KVDump.first_layer`). Where the first layer of a
group is another one, it is estimated from the windows: by ridge regression on the token's embedding, and what that
leaves of a token in the mean, the less of it the fewer times the token was seen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.calibration.dump import Bits, Floats, KVDump, floats, nearest_bits
from kvstore.calibration.targets import NO_SINKS, target

_DAMP = 1e-2  # of the mean diagonal of the Gram matrix
_SEEN = 2.0  # times that a token must have been seen for half of what the regression leaves of it
_STEP = 4096  # tokens of the vocabulary at a time


def token_rows(dump: KVDump) -> Bits:
    """bf16 bits of K before the rotation, in `rope.pair_order`, then of V, `[vocabulary, C of K + C of V]`, of layer 0
    of a dump, or of a group of one."""
    return dump.first_layer if dump.group is None or dump.group[0] == 0 else _estimated(dump)


def _estimated(dump: KVDump) -> Bits:
    weight, middle, mean = _regression(dump)
    seen, counts = np.unique(
        np.concatenate([dump.tokens(window)[NO_SINKS] for window in dump.fit_windows]), return_counts=True
    )
    own = np.zeros((len(seen), len(mean)), np.float32)
    for window in dump.fit_windows:
        tokens, y = _rows(dump, window)
        np.add.at(own, np.searchsorted(seen, tokens), y - mean - (_units(dump.embedding[tokens]) - middle) @ weight)
    found = np.empty((len(dump.embedding), len(mean)), np.uint16)
    for begin in range(0, len(found), _STEP):
        rows = (mean + (_units(dump.embedding[begin : begin + _STEP]) - middle) @ weight).astype(np.float32)
        here = slice(*np.searchsorted(seen, (begin, begin + _STEP)))
        rows[seen[here] - begin] += own[here] / (counts[here] + _SEEN)[:, None].astype(np.float32)
        found[begin : begin + _STEP] = nearest_bits(rows)
    return found


def _regression(dump: KVDump) -> tuple[Floats, Floats, Floats]:
    """(weights `[hidden, C]`, mean of the inputs, mean of the rows)."""
    hidden, shape = dump.embedding.shape[1], dump.layout.layers[0]
    width = shape.heads * (shape.key_dim + shape.value_dim)
    gram, moment = np.zeros((hidden, hidden)), np.zeros((hidden, width))
    inputs, sums, count = np.zeros(hidden), np.zeros(width), 0
    for window in dump.fit_windows:
        tokens, y = _rows(dump, window)
        x = _units(dump.embedding[tokens])
        gram, moment = gram + x.T @ x, moment + x.T @ y
        inputs, sums, count = inputs + x.sum(0), sums + y.sum(0), count + len(x)
    middle, mean = inputs / count, sums / count
    gram -= count * np.outer(middle, middle)
    gram += _DAMP * gram.diagonal().mean() * np.eye(hidden)
    weight = np.linalg.solve(gram, moment - count * np.outer(middle, mean))
    return weight.astype(np.float32), middle.astype(np.float32), mean.astype(np.float32)


def _rows(dump: KVDump, window: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The tokens of a window but for its sinks, and layer 0 of them."""
    return dump.tokens(window)[NO_SINKS], np.concatenate([target(dump, 0, which, window) for which in range(2)], 1)


def _units(embedding: Bits) -> Floats:
    """Embeddings of a mean square of one, as a layer's norm makes them."""
    x = floats(np.asarray(embedding))
    found: Floats = x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-12)
    return found
