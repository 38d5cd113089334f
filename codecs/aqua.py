"""Codec 5: AQUA-KV (arXiv 2501.19392). Each layer is predicted from the one before it; what is left is coded with a
few bits a value. Lossy; the published baseline that others are compared with.

Keys are predicted from the decoded keys of the previous layer, before their rotary embedding; values from the decoded
keys of their own layer and the values of the previous one. The first layer takes 4 bits without a prediction, and the
first 4 tokens of a sequence are kept as they are. Without predictors the same codec is plain HIGGS, Quanto, or round to
nearest: all layers alike, keys as the cache holds them.

A layer: a header (how, bits, backbone, 0; one byte each; in the first layer also the predictors' fingerprint, 4 bytes),
the raw first tokens of K and of V (`[heads, tokens, dim]`), then the coded rows of K and of V, a row for every token,
all heads. A layer that the backbone cannot code, or not make smaller, is raw: header, K, V.

What a prediction starts from is rounded to bf16, so that products with fp16 weights, and their sums in float64, are
exact: the order of the sums does not change a decoder's prediction.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.higgs import Bytes, Floats, Higgs
from kvstore.codecs.minmax import MinMax
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError, ConfigError, ProfileError
from kvstore.layout import KVLayout, LayerLayout

if TYPE_CHECKING:
    import torch

SINKS = 4  # first tokens of a sequence, which attention leans on
FIRST_BITS = 4  # of the first layer, where the others are predicted
RAW, PLAIN, FIRST, PREDICTED = range(4)
_HEADER = struct.Struct("<BBBB")
_FINGERPRINT = struct.Struct("<I")


class Backbone(Protocol):
    """Codes rows of numbers, `[rows, width]` float32."""

    @property
    def number(self) -> int:
        """Of this backbone, in headers."""

    @property
    def bits(self) -> tuple[int, ...]:
        """A value."""

    def size(self, rows: int, width: int, bits: int) -> int:
        """Bytes of so many coded rows."""

    def encode(self, values: Floats, bits: int) -> Bytes | None:
        """The coded rows; None where they are not finite, or too large for a scale."""

    def decode(self, data: Bytes, rows: int, width: int, bits: int) -> Floats:
        """The inverse; `data` has the right size. Raises `CodecError`."""


BACKBONES: dict[str, Backbone] = {"higgs": Higgs(), "quanto": MinMax(1, 64), "rtn": MinMax(2, None)}
_BY_NUMBER = {backbone.number: backbone for backbone in BACKBONES.values()}
Layer = tuple[Floats, Floats]
"""Decoded keys, before their rotary embedding, and values of a layer, bf16 numbers `[tokens, heads * dim]`."""


Weights = npt.NDArray[np.float16]
Wide = npt.NDArray[np.float64]
_NAMES = ("key", "value")
MOST_WEIGHTS = 1 << 32  # of all predictors: none that can be fitted is larger


@dataclass(frozen=True, eq=False)
class AquaPredictors:
    """weights: of every layer from the second on, those of K and of V, fp16 `[inputs + 1, outputs]`; the last row is
    added. Inputs of K: K of the previous layer; of V: K of the same layer, V of the previous one; all heads, keys
    before their rotary embedding.

    Raises `ProfileError` where they do not fit the layout, are not finite, or where keys of that layout cannot be
    freed of their rotary embedding. Immutable; nobody may write into the arrays.
    """

    layout: KVLayout
    weights: tuple[tuple[Weights, Weights], ...]

    def __post_init__(self) -> None:
        for layer in self.layout.layers:
            frequencies(self.layout.rope, layer.key_dim)
        shapes = weight_shapes(self.layout)
        if len(self.weights) != len(shapes):
            raise ProfileError(f"predictors of {len(self.weights)} layers, expected {len(shapes)}")
        for number, pairs in enumerate(zip(self.weights, shapes, strict=True), 1):
            for name, array, shape in zip(_NAMES, *pairs, strict=True):
                if not isinstance(array, np.ndarray) or array.dtype != np.float16 or array.shape != shape:
                    found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
                    raise ProfileError(f"aqua: {name}.{number}: expected float16 {shape}, found {found}")
                if not np.isfinite(array).all():
                    raise ProfileError(f"aqua: {name}.{number}: a weight is not finite")

    @cached_property
    def wide(self) -> tuple[tuple[Wide, Wide], ...]:
        """The weights as float64."""
        return tuple((key.astype(np.float64), value.astype(np.float64)) for key, value in self.weights)

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that tell these weights from others; never 0."""
        found = 0
        for array in (array for pair in self.weights for array in pair):
            found = zlib.crc32(array.astype("<f2").tobytes(), found)
        return found or 1

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The weights by name, as a profile keeps them."""
        pairs = enumerate(self.weights, 1)
        return {f"{name}.{number}": array for number, pair in pairs for name, array in zip(_NAMES, pair, strict=True)}

    @classmethod
    def from_arrays(cls, layout: KVLayout, arrays: Mapping[str, npt.NDArray[Any]]) -> AquaPredictors:
        """The inverse of `to_arrays`. Raises `ProfileError` for a missing or unknown name, and as the class does."""
        expected = [[f"{name}.{number}" for name in _NAMES] for number in range(1, len(layout.layers))]
        wanted = {name for names in expected for name in names}
        if wanted != set(arrays):
            odd = min(wanted ^ set(arrays))
            raise ProfileError(f"predictors: {odd!r} is {'missing' if odd in wanted else 'unknown'}")
        return cls(layout, tuple((arrays[key], arrays[value]) for key, value in expected))


@dataclass(frozen=True)
class _Part:
    """The tokens of a block that are coded: how many are raw before them, how many they are, where they stand."""

    sinks: int
    rows: int
    positions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, info: BlockInfo) -> _Part:
        sinks = min(info.count, max(0, SINKS - info.start))
        return cls(sinks, info.count - sinks, info.start + np.arange(sinks, info.count, dtype=np.int64))


@dataclass(frozen=True)
class _Plan:
    """A coded layer taken apart: K and V, raw; or the raw first tokens of K and V, then their coded rows."""

    mode: int
    bits: int
    backbone: Backbone | None
    pieces: list[Bytes]


class AquaCodec(Codec):
    """predictors: of a profile; None for the backbone alone. bits: 2, 3 or 4 a value. backbone: "higgs", "quanto"
    (least and largest of 64 values) or "rtn" (of a token's values). Raises `ConfigError` for others.

    Decodes what was coded with any bits and backbone, by predictors of the same fingerprint.
    """

    id = 5
    name = "aqua"
    exact = False

    def __init__(self, predictors: AquaPredictors | None = None, bits: int = 4, backbone: str = "higgs") -> None:
        if backbone not in BACKBONES:
            raise ConfigError(f"backbone: expected one of {', '.join(BACKBONES)}, found {backbone!r}")
        if bits not in BACKBONES[backbone].bits:
            raise ConfigError(f"bits: expected one of {BACKBONES[backbone].bits}, found {bits!r}")
        self._predictors = predictors
        self._bits = bits
        self._backbone = BACKBONES[backbone]

    def bound(self, info: BlockInfo) -> int:
        return _FINGERPRINT.size + sum(_HEADER.size + size for size in info.layer_bytes())

    def usual(self, info: BlockInfo) -> int:
        part, item = _Part.of(info), info.layout.item_bytes
        total = _FINGERPRINT.size
        for number, (shape, raw) in enumerate(zip(info.layout.layers, info.layer_bytes(), strict=True)):
            coded = sum(self._backbone.size(part.rows, width, self._bits_of(number)) for width in _widths(shape))
            total += _HEADER.size + min(raw, part.sinks * sum(_widths(shape)) * item + coded)
        return total

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        """Raises `CodecError` where the predictors are those of another layout."""
        self._check_layout(info)
        raw = np.empty(block.nbytes, np.uint8)
        block.copy_to(_packed(info.layout, info.count, raw))
        part, before = _Part.of(info), None
        sizes, at = [], 0
        for number, (k, v) in enumerate(_tensors(info.layout, info.count, raw)):
            coded, before = self._encode_layer(info, number, part, k, v, before)
            if at + sum(map(len, coded)) > len(out):
                return None
            sizes.append(sum(map(len, coded)))
            for piece in coded:
                out[at : at + len(piece)] = piece
                at += len(piece)
        return tuple(sizes)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        starts = np.cumsum([0, *layer_sizes[:-1]]).tolist()
        return sum(payload[at] == RAW for at, size in zip(starts, layer_sizes, strict=True) if size)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """Raises `CodecError` also where the payload was coded with other predictors."""
        check_payload(info, payload, layer_sizes, out)
        self._check_layout(info)
        if min(layer_sizes) < 0:
            raise CodecError(f"layers of {list(layer_sizes)} bytes")
        part, before = _Part.of(info), None
        plans = [self._plan(info, number, part, data) for number, data in enumerate(_cut(payload, layer_sizes))]
        raw = np.empty(info.count * info.layout.bytes_per_token, np.uint8)
        for number, (k, v) in enumerate(_tensors(info.layout, info.count, raw)):
            before = self._decode_layer(info, number, part, plans[number], before, k, v)
        _packed(info.layout, info.count, raw).narrow(0, out.tokens).copy_to(out)

    # -- a layer -------------------------------------------------------------------------------------------------------

    def _encode_layer(
        self, info: BlockInfo, number: int, part: _Part, k: torch.Tensor, v: torch.Tensor, before: Layer | None
    ) -> tuple[list[bytes], Layer | None]:
        """The coded layer in pieces, and what the next one is predicted from."""
        mode = PLAIN if self._predictors is None else PREDICTED if number else FIRST
        bits, rope = self._bits_of(number), info.layout.rope
        fingerprint = b"" if number else _FINGERPRINT.pack(self._fingerprint())
        pieces = [_HEADER.pack(mode, bits, self._backbone.number, 0) + fingerprint]
        pieces += [_raw(tensor[:, : part.sinks]) for tensor in (k, v)]
        found: list[Floats] = []
        room = _HEADER.size + len(fingerprint) + k.nbytes + v.nbytes
        for side, tensor in enumerate((k, v)):
            values = _rows(tensor[:, part.sinks :])
            if mode != PLAIN and side == 0:
                values = rotate(values, tensor.shape[0], part.positions, rope, -1)
            guess = self._predict(mode, number, side, before, found)
            with np.errstate(invalid="ignore", over="ignore"):
                coded = self._backbone.encode(values - guess, bits) if part.rows else None
            if coded is None:
                break
            pieces.append(coded.tobytes())
            if mode != PLAIN:
                found.append(rounded(guess + self._backbone.decode(coded, len(values), values.shape[1], bits)))
        if len(pieces) < 5 or sum(map(len, pieces)) >= room:
            pieces = [_HEADER.pack(RAW, 0, 0, 0) + fingerprint, _raw(k), _raw(v)]
            return pieces, self._raw_layer(info, part, k, v)
        return pieces, (found[0], found[1]) if found else None

    def _plan(self, info: BlockInfo, number: int, part: _Part, data: Bytes) -> _Plan:
        """The parts of a coded layer, all of the size that they must have. Raises `CodecError`."""
        at = _HEADER.size + (0 if number else _FINGERPRINT.size)
        if len(data) < at:
            raise CodecError(f"layer {number}: {len(data)} bytes have no header")
        mode, bits, kind, zero = _HEADER.unpack_from(data.data)
        if not number and _FINGERPRINT.unpack_from(data.data, _HEADER.size) != (self._fingerprint(),):
            raise CodecError("coded with other predictors: the profile is not the one it was written with")
        widths, item = _widths(info.layout.layers[number]), info.layout.item_bytes
        allowed = PLAIN if self._predictors is None else PREDICTED if number else FIRST
        backbone = _BY_NUMBER.get(kind)
        if (mode, bits, kind, zero) == (RAW, 0, 0, 0):
            sizes = [info.count * width * item for width in widths]
        elif mode == allowed and backbone and bits in backbone.bits and not zero and part.rows:
            sizes = [part.sinks * width * item for width in widths]
            sizes += [backbone.size(part.rows, width, bits) for width in widths]
        else:
            raise CodecError(f"layer {number}: a header {(mode, bits, kind, zero)} that no encoder writes")
        if len(data) != at + sum(sizes):
            raise CodecError(f"layer {number}: {len(data)} bytes instead of {at + sum(sizes)}")
        return _Plan(mode, bits, backbone, np.split(data[at:], np.cumsum(sizes)[:-1]))

    def _decode_layer(
        self,
        info: BlockInfo,
        number: int,
        part: _Part,
        plan: _Plan,
        before: Layer | None,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Layer | None:
        """Decodes into `k` and `v`, `[heads, tokens, dim]`. Returns what the next layer is predicted from."""
        if plan.mode == RAW or plan.backbone is None:
            _fill(k, plan.pieces[0])
            _fill(v, plan.pieces[1])
            return self._raw_layer(info, part, k, v)
        found: list[Floats] = []
        for side, tensor in enumerate((k, v)):
            _fill(tensor[:, : part.sinks], plan.pieces[side])
            guess = self._predict(plan.mode, number, side, before, found)
            # Bytes that no encoder wrote may hold scales that add up to more than a float holds.
            with np.errstate(over="ignore", invalid="ignore"):
                width = tensor.shape[0] * tensor.shape[2]
                decoded = guess + plan.backbone.decode(plan.pieces[2 + side], part.rows, width, plan.bits)
                found.append(decoded if plan.mode == PLAIN else rounded(decoded))
                if plan.mode != PLAIN and side == 0:
                    decoded = rotate(decoded, tensor.shape[0], part.positions, info.layout.rope, 1)
            _store(tensor[:, part.sinks :], decoded)
        return found[0], found[1]

    def _predict(self, mode: int, number: int, side: int, before: Layer | None, found: list[Floats]) -> Floats:
        """What is expected of the keys (side 0) or values (1) of a layer; `found`: its decoded keys."""
        if mode != PREDICTED or self._predictors is None or before is None:
            return np.zeros((1, 1), np.float32)
        inputs = [before[0]] if side == 0 else [found[0], before[1]]
        return predict(self._predictors.wide[number - 1][side], inputs)

    def _raw_layer(self, info: BlockInfo, part: _Part, k: torch.Tensor, v: torch.Tensor) -> Layer | None:
        if self._predictors is None:
            return None
        keys, values = (_rows(tensor[:, part.sinks :]) for tensor in (k, v))
        return rounded(rotate(keys, k.shape[0], part.positions, info.layout.rope, -1)), rounded(values)

    def _bits_of(self, number: int) -> int:
        return FIRST_BITS if self._predictors is not None and number == 0 else self._bits

    def _fingerprint(self) -> int:
        return 0 if self._predictors is None else self._predictors.fingerprint

    def _check_layout(self, info: BlockInfo) -> None:
        if self._predictors is not None and self._predictors.layout != info.layout:
            raise CodecError("the predictors are those of another layout")


# -- predictions -------------------------------------------------------------------------------------------------------


def weight_shapes(layout: KVLayout) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Of every layer from the second on: the shapes of the weights of K and of V. Raises `ProfileError` where they
    would be absurd."""
    widths = [(x.heads * x.key_dim, x.heads * x.value_dim) for x in layout.layers]
    shapes = [((before[0] + 1, own[0]), (own[0] + before[1] + 1, own[1])) for before, own in pairwise(widths)]
    if sum(math.prod(shape) for pair in shapes for shape in pair) > MOST_WEIGHTS:
        raise ProfileError("predictors: a layout with layers this wide cannot be predicted")
    return shapes


def predict(weights: Wide, inputs: Sequence[Floats]) -> Floats:
    """inputs: bf16 numbers, `[tokens, n]` each. Returns float32 `[tokens, outputs]`."""
    with np.errstate(invalid="ignore", over="ignore"):
        found: Floats = (np.concatenate(inputs, axis=1).astype(np.float64) @ weights[:-1] + weights[-1]).astype("f4")
    return found


def rounded(values: Floats) -> Floats:
    """To the nearest bf16 numbers."""
    import torch

    found: Floats = torch.from_numpy(values).bfloat16().float().numpy()
    return found


def rotate(keys: Floats, heads: int, positions: npt.NDArray[np.int64], rope: str, sign: int) -> Floats:
    """Gives keys `[tokens, heads * dim]` the rotary embedding of their positions `[tokens]`; sign -1 takes it away.

    rope: of the layout. Raises `ProfileError` for one that is not supported.
    """
    x = keys.reshape(len(keys), heads, keys.shape[1] // heads)
    turns = frequencies(rope, x.shape[2])
    half = len(turns)
    if not half:
        return keys
    angle = positions[:, None].astype(np.float64) * turns
    cos, sin = (part.astype(np.float32)[:, None] for part in (np.cos(angle), sign * np.sin(angle)))
    out = x.copy()
    first, second = x[:, :, :half], x[:, :, half : 2 * half]
    with np.errstate(invalid="ignore", over="ignore"):
        out[:, :, :half] = first * cos - second * sin
        out[:, :, half : 2 * half] = second * cos + first * sin
    return out.reshape(keys.shape)


@lru_cache(maxsize=64)
def frequencies(rope: str, dim: int) -> Wide:
    """Radians a position of every rotated pair (i, i + n): `[n]` float64, empty without a rotary embedding.

    Those of transformers' types default, linear and llama3. Raises `ProfileError` for others.
    """
    if rope == "none":
        return np.empty(0)
    try:
        facts = json.loads(rope)
        kind = facts.get("rope_type", "default")
        rotated = int(dim * float(facts.get("partial_rotary_factor", 1.0)))
        half = rotated // 2
        with np.errstate(all="ignore"):  # what is not finite is refused below
            turns = np.float64(facts["rope_theta"]) ** -(np.arange(half, dtype=np.float64) / max(half, 1))
        if kind == "linear":
            turns = turns / float(facts["factor"])
        elif kind == "llama3":
            turns = _llama3(turns, facts)
        elif kind != "default":
            raise ProfileError(f"rotary embedding of type {kind!r}: keys cannot be predicted")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ProfileError(f"rotary embedding {rope!r}: cannot be understood: {error!r}") from error
    if rotated % 2 or rotated > dim or not np.isfinite(turns).all():
        raise ProfileError(f"rotary embedding {rope!r}: does not fit {dim} dimensions")
    return turns


def _llama3(turns: Wide, facts: dict[str, Any]) -> Wide:
    """Slow turns are slowed down further, fast ones are not, with a ramp between."""
    low, high = float(facts["low_freq_factor"]), float(facts["high_freq_factor"])
    periods = float(facts["original_max_position_embeddings"]) * turns / (2 * math.pi)
    ramp = ((periods - low) / (high - low)).clip(0, 1)
    slowed: Wide = turns / float(facts["factor"]) * (1 - ramp) + turns * ramp
    return slowed


# -- tensors and bytes -------------------------------------------------------------------------------------------------


def _widths(shape: LayerLayout) -> tuple[int, int]:
    return shape.heads * shape.key_dim, shape.heads * shape.value_dim


def _cut(payload: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    return np.split(np.frombuffer(payload, np.uint8), np.cumsum(sizes)[:-1])


def _packed(layout: KVLayout, tokens: int, raw: Bytes) -> KVView:
    return KVView.packed(layout, tokens, raw.ctypes.data, raw)


def _tensors(layout: KVLayout, tokens: int, raw: Bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer, `[heads, tokens, dim]`, in the packed bytes `raw`, which they share."""
    import torch

    whole, at, found = torch.from_numpy(raw), 0, []
    for shape in layout.layers:
        pair = []
        for dim in (shape.key_dim, shape.value_dim):
            size = shape.heads * tokens * dim * layout.item_bytes
            part = whole[at : at + size].view(getattr(torch, layout.dtype))
            pair.append(part.view(shape.heads, tokens, dim))
            at += size
        found.append((pair[0], pair[1]))
    return found


def _rows(tensor: torch.Tensor) -> Floats:
    """`[heads, tokens, dim]` -> float32 `[tokens, heads * dim]`."""
    rows: Floats = tensor.float().transpose(0, 1).reshape(tensor.shape[1], tensor.shape[0] * tensor.shape[2]).numpy()
    return rows


def _store(tensor: torch.Tensor, rows: Floats) -> None:
    """The inverse of `_rows`; what is too large for the tensor's type becomes its largest number."""
    import torch

    largest = torch.finfo(tensor.dtype).max
    values = torch.from_numpy(rows).clamp(-largest, largest)
    tensor.copy_(values.view(tensor.shape[1], tensor.shape[0], -1).transpose(0, 1))


def _raw(tensor: torch.Tensor) -> bytes:
    import torch

    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return data


def _fill(tensor: torch.Tensor, data: Bytes) -> None:
    """`tensor` `[heads, tokens, dim]` from its bytes."""
    import torch

    if tensor.numel():
        tensor.copy_(torch.from_numpy(data.copy()).view(tensor.dtype).view(tensor.shape))
