"""Models of differences with random arrays, and what the donor codec's mode in groups makes of the cases of
`donorcases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import donorcases
import levelcases
import numpy as np
import predictcases
import torch
from donorcases import Block, Case, Shapes, longs
from predictcases import as_bits, laid_out

from kvstore.codecs import KVView
from kvstore.codecs.donor import _donor_groups
from kvstore.codecs.donor.groups import reference
from kvstore.codecs.donor.groups.model import model_of_section
from kvstore.codecs.in_order import Native
from kvstore.codecs.predictive.levels.model import LEVELS, LevelModel
from kvstore.errors import CodecError


def arrays_of(shapes: Shapes, rope: bool, level: int, seed: int, wild: float = 0.3) -> dict[str, np.ndarray]:
    """Random arrays of a section "donor" with one level."""
    gone = tuple(f"{other}." for other in LEVELS if other != level)
    found = levelcases.arrays_of(shapes, rope, seed, wild)
    kept = {name: x for name, x in found.items() if not name.startswith(gone) or name.count(".") == 2}
    angles = predictcases.arrays_of(shapes, rope, seed)[1]
    return kept | {name: x for name, x in angles.items() if name.startswith("rope")}


def model_of(shapes: Shapes, rope: bool, level: int, seed: int, wild: float = 0.3) -> LevelModel:
    return model_of_section(donorcases.layout_of(shapes, rope), arrays_of(shapes, rope, level, seed, wild))


def written(case: Case, model: LevelModel) -> list[bytes]:
    """The layers as the reference writes them."""
    block = [(longs(k[case.covered]), longs(v[case.covered])) for k, v in case.block]
    return reference.encode(donorcases.rows_of(case), model, block)


def referred(case: Case, model: LevelModel, layers: list[bytes]) -> Block:
    """What the reference decodes: the covered rows. Raises `CodecError`."""
    block = reference.decode(donorcases.rows_of(case), model, layers)
    return [(k.numpy().astype(np.uint16), v.numpy().astype(np.uint16)) for k, v in block]


def encoded(coder: _donor_groups.Coder, case: Case, level: str, room: int | None = None) -> list[bytes] | None:
    """The layers as a twin of the C++ writes them; None where `room` bytes do not do."""
    view = laid_out(case.layout, case.block)
    out = bytearray(100_000 + 8 * view.nbytes if room is None else room)
    (*given, _), views = donorcases.arguments(case, view.rows)
    sizes = _donor_groups.encode(coder, *given, out, level=level)
    del views
    return None if sizes is None else predictcases.layers_of(out, sizes)


def decoded(
    coder: _donor_groups.Coder, case: Case, layers: list[bytes], level: str, wanted: int | None = None
) -> Block:
    """What a twin makes of them, [wanted, C], 7.0 in rows that are not covered. Raises `CodecError`."""
    wanted = case.count if wanted is None else wanted
    tensors = _sevens(case, wanted)
    (*given, _), views = donorcases.arguments(case, KVView.of_layers(case.layout, tensors).rows)
    wrong = _donor_groups.decode(coder, *given, b"".join(layers), list(map(len, layers)), wanted, level)
    del views
    if wrong is not None:
        raise CodecError(wrong)
    return _bits_of(case, wanted, tensors)


def begun(
    coder: _donor_groups.Coder, case: Case, layers: list[bytes], level: str
) -> tuple[Native, Callable[[], Block]]:
    """What decodes them layer by layer, and what tells what was decoded, as `decoded` does."""
    tensors, payload = _sevens(case, case.count), b"".join(layers)
    view = KVView.of_layers(case.layout, tensors)
    (*given, _), views = donorcases.arguments(case, view.rows)
    block = _donor_groups.in_order(coder, *given, payload, list(map(len, layers)), case.count, level)
    return Native(block, payload, view, views), lambda: _bits_of(case, case.count, tensors)


def _sevens(case: Case, wanted: int) -> Any:
    return [
        tuple(torch.full((x.heads, wanted, dim), 7.0).bfloat16() for dim in (x.key_dim, x.value_dim))
        for x in case.layout.layers
    ]


def _bits_of(case: Case, wanted: int, tensors: Any) -> Block:
    seven = int(as_bits(torch.tensor([7.0]))[0])
    block: Any = [tuple(np.full((wanted, bits.shape[1]), seven, np.uint16) for bits in pair) for pair in case.block]
    predictcases.fill(block, tensors)
    found: Block = block
    return found
