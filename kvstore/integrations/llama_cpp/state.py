"""States of sequences, as `llama_state_seq_get_data` and slot files have them: bytes to layers, and back.

    state:   streams u32, then for each stream: cells u32, and if that is not 0 the rest
    rest:    per cell: position i32, sequences u32 (1), sequence i32
             whether V is transposed u32, layers u32, in version 4 the widths that K and V are rotated in, u32 (0, 0)
             per layer: type of K i32, bytes of a row u64, rows of the cells
             per layer: type of V i32, bytes of a row u64, rows of the cells; or, transposed,
             type i32, bytes of a value u32, values of a cell u32, and for each of these the values of all cells

A sequence has one stream. Bytes are not trusted: every count is held against what is left and against the layout before
anything is allocated.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.layout import KVLayers, KVLayout, LayerLayout
from kvstore.errors import LayoutMismatch, MalformedState, UnsupportedCache
from kvstore.integrations.llama_cpp.fields import Fields
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.types import GGML_TYPES, type_name

Bytes = npt.NDArray[np.uint8]
_CELL = 12


class SequenceState(NamedTuple):
    """What a state holds.

    Attributes:
        tokens: how many tokens, 0 for an empty sequence.
        layers: per layer (K, V), `[heads, tokens, dim]`, views of the state's bytes where that can be.
        streams: how many streams the context has.
    """

    tokens: int
    layers: KVLayers
    streams: int


def parse_state(data: Any, form: StateForm, layout: KVLayout) -> SequenceState:
    """Read the state of one sequence.

    Args:
        data: bytes-like, without the magic and the number before it. Referenced by the result, unless it is read-only.
        form, layout: what the state must be like.

    Raises:
        MalformedState: counts and lengths do not fit each other, or positions are not 0, 1, 2, ...
        UnsupportedCache: K or V have a type that is not stored, or only some layers are in the state.
        LayoutMismatch: the state is of another model, or of a context with other settings.
    """
    # torch has no tensors that cannot be written
    fields = Fields(bytearray(data) if memoryview(data).readonly else data, "state")
    layers: KVLayers = ()
    streams, tokens = fields.number("I"), 0
    for _ in range(streams):
        cells = fields.number("I")
        if cells:
            if tokens:
                raise MalformedState("state: one sequence has cells in two streams")
            order = _order(fields.take(cells * _CELL), cells)
            tokens, layers = cells, _layers(fields, cells, order, form, layout)
    if fields.left:
        raise MalformedState(f"state: {fields.left} bytes follow its end; other caches beside it are not supported")
    return SequenceState(tokens, layers, streams)


def _order(raw: memoryview, cells: int) -> torch.Tensor | None:
    """Numbers of the cells by position; None if they are in this order."""
    rows = np.frombuffer(raw, "<i4").reshape(cells, 3)
    if (rows[:, 1] != 1).any():
        raise MalformedState(
            "state: expected cells of one sequence (positions of several dimensions are not supported)"
        )
    order, wanted = np.argsort(rows[:, 0], kind="stable"), np.arange(cells)
    if not np.array_equal(rows[order, 0], wanted):
        raise MalformedState("state: expected positions 0, 1, 2, ... without a gap; was the context shifted?")
    return None if np.array_equal(order, wanted) else torch.from_numpy(order)


def _layers(fields: Fields, cells: int, order: torch.Tensor | None, form: StateForm, layout: KVLayout) -> KVLayers:
    transposed, count = fields.number("I"), fields.number("I")
    if count != len(layout.layers):
        raise UnsupportedCache(
            f"the state has {count} layers and the model {len(layout.layers)}: layers with windows or recurrent states "
            "are kept apart, and are not supported"
        )
    if bool(transposed) == form.flash_attention or transposed > 1:
        found, meant = ("off", "on") if transposed else ("on", "off")
        raise LayoutMismatch(
            f"the state is of a context with flash attention {found}, the store's identity says {meant}"
        )
    if form.version >= 4 and (fields.number("I"), fields.number("I")) != (0, 0):
        raise UnsupportedCache("the state has K or V rotated for quantised types; use a cache of type f16")
    keys = [_keys(_rows(fields, cells, layer, layer.key_dim, "K", layout), order, form) for layer in layout.layers]
    columns = _columns if transposed else _rows
    values = [columns(fields, cells, layer, layer.value_dim, "V", layout) for layer in layout.layers]
    if order is not None:
        values = [v.index_select(1, order) for v in values]
    return tuple(zip(keys, values, strict=True))


def _check_type(fields: Fields, name: str, layout: KVLayout) -> None:
    kind = fields.number("i")
    if GGML_TYPES.get(kind) == layout.dtype:
        return
    if kind in GGML_TYPES:
        raise LayoutMismatch(f"{name} has type {type_name(kind)} in the state, the store's layout says {layout.dtype}")
    raise UnsupportedCache(f"{name} has type {type_name(kind)} in the state; only f16, bf16 and f32 are supported")


def _check_width(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise LayoutMismatch(f"{name} takes {found} bytes a token in the state, by the store's layout {wanted}")


def _rows(fields: Fields, cells: int, layer: LayerLayout, dim: int, name: str, layout: KVLayout) -> torch.Tensor:
    """`[heads, cells, dim]`."""
    _check_type(fields, name, layout)
    row = layer.heads * dim * layout.item_bytes
    _check_width(name, fields.number("Q"), row)
    return _tensor(fields.take(cells * row), layout).view(cells, layer.heads, dim).permute(1, 0, 2)


def _columns(fields: Fields, cells: int, layer: LayerLayout, dim: int, name: str, layout: KVLayout) -> torch.Tensor:
    _check_type(fields, name, layout)
    _check_width(name, fields.number("I") * fields.number("I"), layer.heads * dim * layout.item_bytes)
    raw = fields.take(cells * layer.heads * dim * layout.item_bytes)
    return _tensor(raw, layout).view(layer.heads, dim, cells).permute(0, 2, 1)


def _tensor(raw: memoryview, layout: KVLayout) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw, np.uint8)).view(getattr(torch, layout.dtype))


def _keys(keys: torch.Tensor, order: torch.Tensor | None, form: StateForm) -> torch.Tensor:
    """Keys by position, with the values of a pair half of the rotated part apart."""
    if order is not None:
        keys = keys.index_select(1, order)
    if not form.paired:
        return keys
    out = torch.empty(keys.shape, dtype=keys.dtype)
    _halves(out, form).copy_(_neighbours(keys, form).transpose(-1, -2))
    out[..., form.paired :] = keys[..., form.paired :]
    return out


def _neighbours(keys: torch.Tensor, form: StateForm) -> torch.Tensor:
    """`[..., pairs, 2]`: the rotated part of keys as llama.cpp has them."""
    return keys[..., : form.paired].view(*keys.shape[:-1], form.paired // 2, 2)


def _halves(keys: torch.Tensor, form: StateForm) -> torch.Tensor:
    """`[..., 2, pairs]`: the rotated part of keys as the store has them."""
    return keys[..., : form.paired].view(*keys.shape[:-1], 2, form.paired // 2)


def state_size(tokens: int, streams: int, form: StateForm, layout: KVLayout) -> int:
    """Return how many bytes `build_state` makes."""
    fixed = 4 + 4 * streams
    if not tokens:
        return fixed
    return fixed + _heading(form) + 24 * len(layout.layers) + tokens * (_CELL + layout.bytes_per_token)


def _heading(form: StateForm) -> int:
    return 16 if form.version >= 4 else 8


def build_state(
    layers: KVLayers, tokens: int, form: StateForm, layout: KVLayout, *, streams: int = 1, head: bytes = b""
) -> Bytes:
    """Make the state of a sequence, which llama.cpp takes.

    Args:
        layers: per layer (K, V), `[1, heads, tokens, dim]`, as `Hit.layers` has them.
        tokens: how many, at least 1.
        form, layout: of the context.
        streams: how many the context has.
        head: bytes to put before it.

    Returns:
        uint8 `[bytes]`.
    """
    out = np.empty(len(head) + state_size(tokens, streams, form, layout), np.uint8)
    place = len(head)
    out[:place] = np.frombuffer(head, np.uint8)

    def write(code: str, *numbers: int) -> None:
        nonlocal place
        struct.pack_into("<" + code, out.data, place, *numbers)
        place += struct.calcsize("<" + code)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal place
        start, place = place, place + tensor.numel() * layout.item_bytes
        return torch.from_numpy(out[start:place]).view(tensor.dtype)

    write("2I", streams, tokens)
    cells = out[place : place + tokens * _CELL].view("<i4").reshape(tokens, 3)
    cells[:] = (0, 1, 0)
    cells[:, 0] = np.arange(tokens)
    place += tokens * _CELL
    write("2I", not form.flash_attention, len(layout.layers))
    if form.version >= 4:
        write("2I", 0, 0)
    kind = next(number for number, name in GGML_TYPES.items() if name == layout.dtype)
    for (k, _), layer in zip(layers, layout.layers, strict=True):
        write("iQ", kind, layer.heads * layer.key_dim * layout.item_bytes)
        _put_keys(rows(k).view(tokens, layer.heads, layer.key_dim), k[0].transpose(0, 1), form)
    for (_, v), layer in zip(layers, layout.layers, strict=True):
        if form.flash_attention:
            write("iQ", kind, layer.heads * layer.value_dim * layout.item_bytes)
            rows(v).view(tokens, layer.heads, layer.value_dim).copy_(v[0].transpose(0, 1))
        else:
            write("i2I", kind, layout.item_bytes, layer.heads * layer.value_dim)
            rows(v).view(layer.heads, layer.value_dim, tokens).copy_(v[0].transpose(1, 2))
    out[place:] = 0  # the other streams are empty
    return out


def _put_keys(rows: torch.Tensor, keys: torch.Tensor, form: StateForm) -> None:
    if not form.paired:
        rows.copy_(keys)
        return
    _neighbours(rows, form).copy_(_halves(keys, form).transpose(-1, -2))
    rows[..., form.paired :] = keys[..., form.paired :]
