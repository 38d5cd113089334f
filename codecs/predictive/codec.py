"""Codec 2: what the token and the two layers before say of a value is left out, the rest is coded by rANS.

Two modes write it, and the first layer of a payload says which did. The exact mode (predictive_exact.py) gives back
every bit. The lossy mode (lossy.py) codes with steps, in whose units every error costs the same. Both predict with the
8-bit weights of a profile. Blocks that neither makes smaller or can predict, and those of other layouts than the
profile's, are coded as by `entropy`.

predictive_reference.py and lossy_reference.py are the modes as plain programs, FORMAT.md says what is written,
docs/codecs/predictive.md why.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import kvstore.codecs.predictive._predict as _predict
from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.predictive.exact import ExactMode
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.profile import NO_PROFILE, Profile
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError, ProfileError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.lossy_model import LossyModel

MODE, LOSSY_MODE = 4, 5
_MODE = struct.Struct("<I")
_RATIO = 1.7  # what exact blocks are expected to come to, rather less than more


class PredictiveCodec(Codec):
    """About 1.95 for exact bf16 caches of the model that the profile was made with. Thread-safe; either mode decodes
    both. Blocks with loss are coded by the CPU alone.
    """

    id = 2
    name = "predictive"

    def __init__(
        self,
        model: PredictiveModel,
        lossy: LossyModel | None = None,
        steps: tuple[float, float] | None = None,
        profile: bytes = NO_PROFILE,
    ) -> None:
        """lossy: of the same profile, to decode what was coded with loss. steps: of K and V, to code with loss (see
        `LossyModel.steps_for`); None codes exactly. profile: the id of the one that the models are of.

        Raises `ValueError` for steps that are not finite numbers above 0, or without a model for them.
        """
        self.exact = self.has_kernels = steps is None
        self.profile = profile
        self._plain = EntropyCodec()
        self._exact = ExactMode(model)
        self._lossy = self._steps = None
        if lossy is not None:
            from kvstore.codecs.predictive.lossy import LossyMode

            self._lossy = LossyMode(lossy)
        if steps is not None:
            from kvstore.codecs.predictive.lossy_quantiser import Steps

            self._steps = Steps.of(*steps)
            if lossy is None:
                raise ValueError("predictive: steps need a lossy model")

    @classmethod
    def from_profile(cls, profile: Profile, *, bits: float | None = None, kl: float | None = None) -> PredictiveCodec:
        """bits: a value, for lossy coding at this rate, or kl: as `LossyModel.steps_for`; None for exact coding.

        Raises `ProfileError` where the profile lacks what it takes, or does not reach the quality.
        """
        exact = bits is None and kl is None
        missing = [name for name in ("lossless", "lossy")[: 1 if exact else 2] if name not in profile.sections]
        if missing:
            raise ProfileError(
                f'predictive: the profile has no section "{missing[0]}"; make a new one with `kvstore calibrate`'
            )
        model, lossy = PredictiveModel.from_arrays(profile.layout, profile.section("lossless")), None
        if "lossy" in profile.sections:
            from kvstore.codecs.predictive.lossy_model import LossyModel

            lossy = LossyModel.from_arrays(model, profile.section("lossy"))
        if exact or lossy is None:
            return cls(model, lossy, profile=profile.id)
        try:
            return cls(model, lossy, lossy.steps_for(bits=bits, kl=kl), profile.id)
        except ValueError as error:
            raise ProfileError(str(error)) from error

    def bound(self, info: BlockInfo) -> int:
        return self._plain.bound(info)

    def usual(self, info: BlockInfo) -> int:
        if self._lossy is None or self._steps is None:
            expected: int | None = int(sum(info.layer_bytes()) / _RATIO) + (1 << 12)
        else:
            expected = self._lossy.usual(info, self._steps)
        return self.bound(info) if expected is None else min(self.bound(info), expected)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        view = block
        coded: tuple[int, ...] | int | None = _predict.FALL_BACK
        if info.layout == self._exact.model.layout:
            if self._steps is None:
                view, coded = self._exact.encode(info, block, out, self._plain.usual(info))
            else:
                coded = self._encode_lossy(info, block, out)
        if coded == _predict.FALL_BACK:
            return self._plain.encode(info, view, out)
        return coded if isinstance(coded, tuple) else None

    def _encode_lossy(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | int | None:
        """As `_predict.encode`."""
        assert self._lossy is not None
        assert self._steps is not None
        layers = self._lossy.encode(info, block, self._steps) if self._lossy.can_encode(info) else None
        if layers is None or sum(map(len, layers)) > self.bound(info):
            return _predict.FALL_BACK
        sizes = tuple(map(len, layers))
        if sum(sizes) > len(out):
            return None
        out[: sum(sizes)] = b"".join(layers)
        return sizes

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        """The layers that were not predicted."""
        return 0 if mode_of(payload, layer_sizes) in (MODE, LOSSY_MODE) else len(layer_sizes)

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float:
        """The largest error of a value, as the encoder found it; 0 for a block that was coded exactly."""
        if self._lossy is None or mode_of(payload, layer_sizes) != LOSSY_MODE:
            return 0.0
        return self._lossy.largest_error(payload)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(info, payload, layer_sizes, out)
        if min(layer_sizes) < 0:
            raise CodecError(f"predictive: layer sizes must not be negative, found {list(layer_sizes)}")
        mode = mode_of(payload, layer_sizes)
        if mode not in (MODE, LOSSY_MODE):
            self._plain.decode(info, payload, layer_sizes, out)
            return
        if info.layout != self._exact.model.layout or info.start < 0:
            raise CodecError("predictive: the block has another layout than the profile, or a negative position")
        if not out.writable:
            raise ValueError("predictive: the last dimension of every tensor of the target must be contiguous")
        if mode == MODE:
            self._exact.decode(info, payload, layer_sizes, out)
        elif self._lossy is not None:
            self._lossy.decode(info, payload, layer_sizes, out)
        else:
            raise CodecError('predictive: the block was coded with loss, and the profile has no section "lossy"')

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """See `ExactMode.codes_on`. Blocks with loss are coded by the CPU."""
        return self.exact and dtype == self._exact.model.layout.dtype and self._exact.codes_on(device)

    def kernels_decode(self, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        return mode_of(payload, layer_sizes) == MODE


def mode_of(payload: memoryview, layer_sizes: Sequence[int]) -> int:
    """How a payload's first layer says that it is coded; 0 for one that is too short to say."""
    return int(_MODE.unpack_from(payload)[0]) if layer_sizes[0] >= _MODE.size else 0
