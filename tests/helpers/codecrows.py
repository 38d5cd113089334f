"""Every codec that there is, one row each: what the contract and the golden records are held for.

A new codec is one more row of `ROWS`, and `python tests/golden/make.py` writes its golden records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import family_stores
import numpy as np
import torch
from kvcases import INTEGERS, random_kv, same_bits
from profilecases import ROPE, Layers, level_kv, predicted_kv, profile_of

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, Codec, KVView, codec_by_name
from kvstore.codecs.aqua.codec import AquaCodec, AquaPredictors
from kvstore.codecs.donor.codec import DonorCodec, DonorRows
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.profile import Profile
from kvstore.codecs.words import FLOAT8

DTYPES = tuple(INTEGERS)
_BF16 = ("bfloat16",)
_STEP = 0.5  # of a donor's values
_MOST_TOKENS = 300  # of a block that is coded against donors here


class Coder(Protocol):
    """What the contract asks of a codec: that of `Codec`, whatever else the codec itself wants to be given."""

    @property
    def id(self) -> int: ...

    @property
    def exact(self) -> bool: ...

    @property
    def profile(self) -> bytes: ...

    def bound(self, info: BlockInfo) -> int: ...

    def usual(self, info: BlockInfo) -> int: ...

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None: ...

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None: ...

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int: ...

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float: ...


def likely_kv(layout: KVLayout, count: int) -> Layers:
    """The cache of tokens 0, 1, ... as that of a model: what the donors of `WithDonors` resemble."""
    dtype = getattr(torch, layout.dtype)
    return [(k.to(dtype), v.to(dtype)) for k, v in family_stores.kv_of(range(count), layout=layout)]


@dataclass(frozen=True)
class Row:
    """One codec, or one way of coding of it.

    make: the coder of blocks of a layout, of a profile of that layout (None: of its own making). dtypes: which it
    takes. fidelity: "exact"; "recorded" where what it loses is in what it wrote; or, where that is not known, how much
    of the squares of the values of `likely` it may lose. rope: whether layouts that can have a rotary embedding get
    one. likely: blocks that it codes as it is meant to, without falling back. same_bytes: whether every machine writes
    the same bytes (zstd's depend on the version of its library). not_held: parts of the contract that do not apply, by
    the test's name, and why.
    """

    name: str
    make: Callable[[KVLayout, Profile | None], Coder]
    fidelity: str | float = "exact"
    dtypes: tuple[str, ...] = DTYPES
    rope: bool = False
    likely: Callable[[KVLayout, int], Layers] = likely_kv
    same_bytes: bool = True
    not_held: Mapping[str, str] = field(default_factory=dict)

    def layout(self, layout: KVLayout) -> KVLayout:
        dims = {x.key_dim for x in layout.layers}
        return replace(layout, rope=ROPE) if self.rope and len(dims) == 1 and min(dims) % 2 == 0 else layout

    def block(self, fill: str, layout: KVLayout, count: int) -> Layers:
        """fill: "likely", or "random" for any bits, NaN and infinity too."""
        return self.likely(layout, count) if fill == "likely" else random_kv(count, layout)

    def coder(self, layout: KVLayout) -> Coder:
        """The same object for the same layout."""
        return _coder(self.name, layout)

    def faithful(self, found: Layers, given: Layers, bound: float) -> bool:
        """Whether a block came back as well as the codec says. bound: the error that was recorded."""
        pairs = [(a, b) for fs, gs in zip(found, given, strict=True) for a, b in zip(fs, gs, strict=True)]
        return all(self._close(a, b, bound) for a, b in pairs)

    def _close(self, found: torch.Tensor, given: torch.Tensor, bound: float) -> bool:
        if self.fidelity == "exact" or same_bits(found, given):
            return same_bits(found, given)
        odd = ~given.float().isfinite()
        if odd.any() and not same_bits(found[odd], given[odd]):
            return False
        wanted = given.float()[~odd].double()
        errors = (found.float()[~odd].double() - wanted).abs()
        if self.fidelity == "recorded":
            return bool((errors <= bound).all())
        return bool(errors.square().sum() <= float(self.fidelity) * wanted.square().sum())


@lru_cache(maxsize=64)
def _coder(name: str, layout: KVLayout) -> Coder:
    return row_of(name).make(layout, None)


def row_of(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


# -- codecs that need more than a name ---------------------------------------------------------------------------------


def _plain(name: str) -> Callable[[KVLayout, Profile | None], Coder]:
    return lambda layout, profile: codec_by_name(name)


def _predictive(name: str, *sections: str) -> Callable[[KVLayout, Profile | None], Coder]:
    return lambda layout, profile: codec_by_name(name, profile or _profile(layout, *sections))


def _profile(layout: KVLayout, *sections: str) -> Profile:
    """Of bf16, for which all sections are, so that other dtypes are coded as by entropy; of float8, of the layout."""
    dtype = layout.dtype if layout.dtype in FLOAT8 and sections == ("lossless",) else "bfloat16"
    return profile_of(replace(layout, dtype=dtype), *sections)


def _aqua(bits: int) -> Callable[[KVLayout, Profile | None], Coder]:
    def make(layout: KVLayout, profile: Profile | None) -> Coder:
        if len(layout.layers) == 1:
            return AquaCodec(AquaPredictors(layout, ()), bits)  # of one layer a profile has nothing to say
        return codec_by_name(f"aqua@{bits}", profile or profile_of(layout, "aqua"))

    return make


def _predictable(layout: KVLayout, count: int) -> Layers:
    if layout.dtype not in ("bfloat16", *FLOAT8):
        return random_kv(count, layout)
    profile = profile_of(replace(layout, dtype="bfloat16"), "lossless")
    found = predicted_kv(profile, np.arange(count, dtype=np.uint32), 0)
    return [(k.to(getattr(torch, layout.dtype)), v.to(getattr(torch, layout.dtype))) for k, v in found]


def _level(level: int) -> Callable[[KVLayout, Profile | None], Coder]:
    return _predictive(f"predictive:{level}", "lossless", "levels")


def _predictable_in(level: int) -> Callable[[KVLayout, int], Layers]:
    def likely(layout: KVLayout, count: int) -> Layers:
        if layout.dtype != "bfloat16":
            return random_kv(count, layout)
        return level_kv(profile_of(layout, "lossless", "levels"), level, np.arange(count, dtype=np.uint32), 0)

    return likely


class WithDonors:
    """The donor codec and two blocks for it to code against, which begin otherwise than the block itself."""

    def __init__(self, codec: DonorCodec, layout: KVLayout, donors: Sequence[Layers] = ()) -> None:
        """donors: of other tests than those of `arange` tokens."""
        self.codec = codec
        self.id, self.exact, self.profile = codec.id, codec.exact, codec.profile
        self._kept = donors or donor_blocks(layout, _MOST_TOKENS)
        self.donors = [KVView.of_layers(layout, layers) for layers in self._kept]

    def used(self, count: int) -> list[int]:
        """The donors of a block of so many tokens."""
        return sorted({span.donor for span in spans_of(count)})

    def bound(self, info: BlockInfo) -> int:
        return self.codec.bound(info)

    def usual(self, info: BlockInfo) -> int:
        return self.codec.usual(info)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        rows = [DonorRows.of(span, self.donors[span.donor]) for span in spans_of(info.count)]
        return self.codec.encode(info, block, rows, out)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        self.codec.decode(info, payload, layer_sizes, self.donors, out)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        return 0

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float:
        layout = self.donors[0].layout
        return self.codec.largest_error(BlockInfo(layout, np.zeros(_MOST_TOKENS, np.uint32), 0), payload)


_BEFORE = (11, 5)  # tokens of each donor before those of the block


def donor_tokens(count: int) -> list[list[int]]:
    """Of blocks in which the tokens 0, 1, ... of the block itself follow others."""
    return [[*range(10_000 * before, 10_001 * before), *range(count)] for before in _BEFORE]


def donor_blocks(layout: KVLayout, count: int) -> list[Layers]:
    """Their caches, bf16; `likely_kv` is that of the block."""
    return [family_stores.kv_of(tokens, layout=layout) for tokens in donor_tokens(count)]


def spans_of(count: int) -> list[Span]:
    """Most rows of such a block, with gaps before the first span and between the two where it is long enough."""
    first, middle = (count // 8, count // 2) if count >= 8 else (0, count)
    spans = [(first, middle, 0), (middle + 2, count, 1)] if count >= 8 else [(first, middle, 0)]
    return [Span(a, b - a, donor, _BEFORE[donor] + a, -_BEFORE[donor]) for a, b, donor in spans]


def _groups(layout: KVLayout, profile: Profile | None) -> Coder:
    if layout.dtype != "bfloat16":
        return _donor(model=False)(layout, profile)
    used = profile or profile_of(layout, "lossless", "levels")
    return WithDonors(DonorCodec.from_profile(codec_by_name("predictive", used), used), layout)


def _donor(model: bool, step: float | None = None) -> Callable[[KVLayout, Profile | None], Coder]:
    def make(layout: KVLayout, profile: Profile | None) -> Coder:
        if layout.dtype != "bfloat16":
            return WithDonors(DonorCodec(codec_by_name("entropy")), layout, [likely_kv(layout, _MOST_TOKENS)] * 2)
        used = (profile or profile_of(layout, "lossless", "donor")) if model else None
        plain: Codec = codec_by_name("entropy") if used is None else codec_by_name("predictive", used)
        codec = DonorCodec(plain, None if used is None else DonorModel.from_profile(used), step)
        codec.profile = plain.profile
        return WithDonors(codec, layout)

    return make


# -- parts of the contract that some do not keep -----------------------------------------------------------------------

_RAW = {
    "test_a_foreign_chunk_of_the_right_shape_is_refused": "any bytes are a raw block",
    "test_damage_of_headers_is_noticed": "it has no header",
    "test_likely_values_are_coded_and_not_fallen_back_from": "it makes nothing smaller",
}
_SPLITZIP = {
    "test_a_likely_block_of_another_size_is_refused": "a section may have room for one token more than was coded, for "
    "it is padded, and its size is all that tells; the record's header says how many tokens there are",
}
_DONOR = {
    "test_encoding_writes_nothing_beyond_what_it_reports": "it codes into all of the room that it is given and then "
    "moves the end up; sealing a record zeroes what is behind",
}
_AQUA = {
    "test_random_bits_come_back_exactly": "it knows no bound for values that are unlike a cache; NaN and infinity are "
    "held by the tests of special values",
    "test_zeros_come_back_exactly": "its predictors do not expect zeros, and what it loses is a share of what they "
    "leave",
}
ROWS: tuple[Row, ...] = (
    Row("raw", _plain("raw"), not_held=_RAW),
    Row("splitzip", _plain("splitzip"), not_held=_SPLITZIP),
    Row("entropy", _plain("entropy")),
    Row("zstd", _plain("zstd"), same_bytes=False),
    Row("predictive", _predictive("predictive", "lossless"), rope=True, likely=_predictable),
    Row(
        "predictive-lossy",
        _predictive("predictive@2", "lossless", "lossy"),
        "recorded",
        rope=True,
        same_bytes=False,
    ),
    Row("donor", _donor(model=False), dtypes=_BF16, rope=True, not_held=_DONOR),
    Row("donor-propagated", _donor(model=True), dtypes=_BF16, rope=True, not_held=_DONOR),
    Row("donor-groups", _groups, dtypes=_BF16, rope=True, not_held=_DONOR),
    Row("donor-steps", _donor(model=False, step=_STEP), "recorded", _BF16, rope=True),
    Row("aqua-2", _aqua(2), 0.15, rope=True, same_bytes=False, not_held=_AQUA),
    Row("aqua-3", _aqua(3), 0.06, rope=True, same_bytes=False, not_held=_AQUA),
    Row("aqua-4", _aqua(4), 0.02, rope=True, same_bytes=False, not_held=_AQUA),
    Row("tsc", _plain("tsc"), "recorded"),
    Row("tsc-8", _plain("tsc@8/0"), "recorded"),
    Row("aqua-single", _aqua(2), 0.15, rope=True, not_held=_AQUA),
    *(Row(f"predictive-{i}", _level(i), rope=True, likely=_predictable_in(i)) for i in (1, 2, 3)),
)
