"""Codec 2: what the token and the layers before say of a value is left out, the rest is coded by rANS.

Several modes write it, and the first layer of a payload says which did. The exact mode (exact.py) gives back every bit;
so do its levels 1 to 3 (levels/), which also predict inside a layer. The lossy mode (lossy.py) codes with
steps, in whose units every error costs the same. All predict with the 8-bit weights of a profile. Blocks of fp32, fp16
and float8 are coded exactly, by their words (codecs/words.py), if the profile is of such caches. Blocks that no mode
makes smaller or can predict, and those of other layouts than the profile's, are coded as by `entropy`.

reference.py, wide_reference.py, float8_reference.py, levels/reference.py and lossy_reference.py are the modes as plain
programs, FORMAT.md says what is written, docs/codecs/predictive.md why.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

import kvstore.codecs.predictive._predict as _predict
from kvstore.codecs.base import BlockInfo, Codec, CodedBlock, check_payload
from kvstore.codecs.by_layers import Apart
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.in_order import InOrder
from kvstore.codecs.pairs import buffer, from_pairs, in_pairs, order_of
from kvstore.codecs.predictive.exact import ExactMode
from kvstore.codecs.predictive.levels.model import SECTION as LEVELS_SECTION
from kvstore.codecs.predictive.levels.model import LevelModel, levels_of
from kvstore.codecs.predictive.linear_model import rotates
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.predictive.token_table import rows_of
from kvstore.codecs.profile import NO_PROFILE, Profile
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError, ProfileError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.levels.mode import LevelMode
    from kvstore.codecs.predictive.lossy_model import LossyModel

MODE, LOSSY_MODE = 4, 5
EXACT_MODES = {"bfloat16": MODE, "float32": 12, "float16": 13, "float8_e5m2": 14, "float8_e4m3fn": 15}
LEVEL_MODES = {21: 1, 22: 2, 23: 3}
_MODE = struct.Struct("<I")
_KEPT = 0xFF00  # the byte of a wide layer's mode that says how much of its values it keeps
# What exact blocks are expected to come to, rather less than more.
_RATIOS = {"bfloat16": 1.7, "float32": 1.25, "float16": 1.3, "float8_e5m2": 1.7, "float8_e4m3fn": 1.6}


class PredictiveCodec(Codec):
    """Makes exact bf16 caches of the profile's model about 2 times smaller, float8 1.7, fp16 1.4, fp32 1.3.

    Thread-safe.

    A codec encodes in one mode, exact or lossy, and decodes all. The exact modes of bf16 differ in ratio and speed:
    levels 1 to 3, if the profile has them, and the first mode. GPUs have kernels for all of them. Without a level, the
    CPU codes in the highest level of the profile, and a GPU in the first mode, which takes it fewer steps in a row. The
    CPU alone encodes blocks with loss; a GPU decodes them.

    Example:
        A profile made by hand, of a model with one layer that predicts nothing:

        >>> import numpy as np
        >>> from kvstore import KVLayout, ModelIdentity
        >>> from kvstore.codecs.rans.coder import quantise
        >>> part = {name: np.ones(16, np.float32) for name in ("in_scale", "out_scale")}
        >>> part |= {"scale": np.zeros(16, np.int16), "bias": np.zeros(16, np.int32), "adapt": np.zeros(3, np.int32)}
        >>> arrays = {f"0.{side}.{name}": array for side in "kv" for name, array in part.items()}
        >>> arrays["token_kv"] = np.zeros((100, 32), np.int8)  # a row for every token of the vocabulary
        >>> arrays["freqs"] = quantise(np.ones((72, 193), np.int64), 12)
        >>> layout = KVLayout.uniform(num_layers=1, heads=1, head_dim=16)
        >>> profile = Profile.new(ModelIdentity("my-model", "main", "weights-1", "", layout), {"lossless": arrays})
        >>> codec = PredictiveCodec.from_profile(profile)
        >>> codec.exact, codec.profile == profile.id
        (True, True)
    """

    id = 2
    name = "predictive"
    takes_donors = True

    def __init__(
        self,
        model: PredictiveModel,
        lossy: LossyModel | None = None,
        steps: tuple[float, float] | None = None,
        profile: bytes = NO_PROFILE,
        levels: LevelModes | None = None,
        level: int | None = None,
        bits: float | None = None,
    ) -> None:
        """Make a codec of models.

        Args:
            model: the profile's section "lossless".
            lossy: the section "lossy" of the same profile, to decode what was coded with loss.
            steps: of K and of V, to code with loss (see `LossyModel.steps_for`); None codes exactly.
            profile: id of the profile that the models are of.
            levels: of the same profile, if it has any.
            level: one of these, to code all blocks in; None chooses.
            bits: bits a value that blocks are to take, whatever steps that needs; `steps` are what the ladder says.

        Raises:
            ValueError: there is no such level; the steps are not finite numbers above 0, or there is no lossy model
                for them.
            ProfileError: a lossy model of caches that are not bf16.
        """
        self.exact = steps is None
        self.has_kernels = self.exact and model.layout.dtype == "bfloat16"
        self.profile = profile
        self._plain = EntropyCodec()
        self._exact, self._seen = ExactMode(model), model.seen
        self._order = order_of(model.layout) if rotates(model.layout) else None  # of K, in what the modes see
        self._mode = EXACT_MODES[model.layout.dtype]
        self._levels, self._level = levels or LevelModes(()), level
        if level is not None and level not in self._levels.known:
            raise ValueError(f"predictive: expected a level of the profile ({self._levels.known}), found {level}")
        self._lossy = self._steps = self._rate = None
        if lossy is not None:
            if model.layout.dtype != "bfloat16":
                raise ProfileError(f"predictive: expected lossy caches of bfloat16, found {model.layout.dtype}")
            from kvstore.codecs.predictive.lossy import LossyMode

            self._lossy = LossyMode(lossy)
        if steps is not None:
            from kvstore.codecs.predictive.lossy_quantiser import Steps

            self._steps = Steps.of(*steps)
            if lossy is None:
                raise ValueError('predictive: steps need a lossy model; pass that of the profile\'s section "lossy"')
            if bits is not None:
                from kvstore.codecs.predictive.lossy_rate import Rate

                self._rate = Rate(bits, lossy.ladder)

    @classmethod
    def from_profile(
        cls, profile: Profile, *, bits: float | None = None, kl: float | None = None, level: int | None = None
    ) -> PredictiveCodec:
        """Make a codec of a profile. Without `bits` and `kl` it codes exactly.

        Args:
            profile: of the model.
            level: to code exactly in this level, 1 to 3.
            bits: bits a value, to code with loss at this rate, which every block holds by steps of its own.
            kl: what the model's predictions may lose, nats a token, to code with loss at this quality: the same steps
                for all blocks.

        Raises:
            ProfileError: the profile lacks a section, or does not reach the quality.
        """
        exact = bits is None and kl is None
        missing = [name for name in ("lossless", "lossy")[: 1 if exact else 2] if name not in profile.sections]
        if missing:
            what = "make a new one with `kvstore calibrate`"
            if missing[0] == "lossy" and profile.layout.is_latent:
                what = "latents are coded without loss alone: use predictive or entropy"
            raise ProfileError(f'predictive: the profile has no section "{missing[0]}"; {what}')
        model, lossy = PredictiveModel.from_arrays(profile.layout, profile.section("lossless")), None
        levels = LevelModes.of(profile)
        if level is not None and level not in levels.known:
            has = ", ".join(map(str, levels.known)) or "none"
            raise ProfileError(
                f"predictive: the profile has no level {level} (it has {has}); use another, or make a new profile with "
                "`kvstore calibrate`"
            )
        if "lossy" in profile.sections:
            from kvstore.codecs.predictive.lossy_model import LossyModel

            lossy = LossyModel.from_arrays(model, profile.section("lossy"))
        if exact or lossy is None:
            return cls(model, lossy, profile=profile.id, levels=levels, level=level)
        try:
            return cls(model, lossy, lossy.steps_for(bits=bits, kl=kl), profile.id, levels, bits=bits)
        except ValueError as error:
            raise ProfileError(str(error)) from error

    def bound(self, info: BlockInfo) -> int:
        return self._plain.bound(info)

    def usual(self, info: BlockInfo) -> int:
        if self._lossy is None or self._steps is None:
            ratio = _RATIOS[self._exact.model.layout.dtype]
            expected: int | None = int(sum(info.layer_bytes()) / ratio) + (1 << 12)
        else:
            expected = self._lossy.usual(info, self._steps)
        return self.bound(info) if expected is None else min(self.bound(info), expected)

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        view = block
        coded: tuple[int, ...] | int | None = _predict.FALL_BACK
        if info.layout == self._exact.model.layout:
            named = self._named(info)
            if self._steps is None:
                view, coded = self._encode_exact(named, block, out)
            else:
                coded = self._encode_lossy(named, block if self._order is None else in_pairs(block, self._order), out)
        if coded == _predict.FALL_BACK:
            return self._plain.encode(info, view, out)
        return coded if isinstance(coded, tuple) else None

    def _named(self, info: BlockInfo) -> BlockInfo:
        """The block with its tokens as rows of the profile's table, as all modes take them."""
        return info if self._seen is None else replace(info, tokens=rows_of(info.tokens, self._seen))

    def _encode_exact(
        self, info: BlockInfo, block: KVView, out: memoryview
    ) -> tuple[KVView, tuple[int, ...] | int | None]:
        """As `ExactMode.encode`; the block that is returned has K as the cache holds it."""
        limit, mode = self._plain.usual(info), self._mode_for(block)
        if self._order is None:
            return mode.encode(info, block, out, limit)
        return block, mode.encode(info, in_pairs(block, self._order), out, limit)[1]

    def _mode_for(self, block: KVView) -> ExactMode | LevelMode:
        """What codes a block exactly."""
        if self._level is not None:
            return self._levels.get(self._level)
        if not self._levels.known or self._exact.codes_blocks_like(block):
            return self._exact
        return self._levels.get(self._levels.known[-1])

    def _encode_lossy(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | int | None:
        """As `_predict.encode`."""
        assert self._lossy is not None
        assert self._steps is not None
        if not self._lossy.can_encode(info):
            return _predict.FALL_BACK
        return self._lossy.encode(info, block, self._rate or self._steps, out, self.bound(info))

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        """The layers that were not predicted."""
        predicted = mode_of(payload, layer_sizes) in (self._mode, LOSSY_MODE, *LEVEL_MODES)
        return 0 if predicted else len(layer_sizes)

    def error_bound(self, payload: memoryview, layer_sizes: Sequence[int]) -> float:
        """The largest error of a value, as the encoder found it; 0 for a block that was coded exactly."""
        if self._lossy is None or mode_of(payload, layer_sizes) != LOSSY_MODE:
            return 0.0
        return self._lossy.largest_error(payload)

    def in_order(self, block: CodedBlock, out: KVView) -> InOrder | None:
        info, payload, sizes = block.info, block.payload, block.layer_sizes
        target = out.narrow(block.at, block.wanted)
        mode = self._predicted_in(info, payload, sizes, target)
        if mode is None:
            return Apart(self._plain, block, out)
        if self._order is not None or mode == LOSSY_MODE:
            return None  # the one goes through a buffer, the other's rows through one another
        coder = self._exact if mode == self._mode else self._levels.get(LEVEL_MODES[mode])
        return coder.in_order(self._named(info), payload, sizes, target)

    def _predicted_in(
        self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView
    ) -> int | None:
        """The mode of a block that is to be decoded; None if it was not predicted. Raises `CodecError`."""
        check_payload(self.name, info, payload, layer_sizes, out)
        mode = mode_of(payload, layer_sizes)
        if mode not in (self._mode, LOSSY_MODE, *LEVEL_MODES):
            return None
        if info.layout != self._exact.model.layout or info.start < 0:
            raise CodecError("predictive: the block has another layout than the profile, or a negative position")
        return mode

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        mode = self._predicted_in(info, payload, layer_sizes, out)
        if mode is None:
            self._plain.decode(info, payload, layer_sizes, out)
            return
        target, named = out if self._order is None else buffer(out), self._named(info)
        if mode == self._mode:
            self._exact.decode(named, payload, layer_sizes, target)
        elif mode in LEVEL_MODES:
            self._levels.get(LEVEL_MODES[mode]).decode(named, payload, layer_sizes, target)
        elif self._lossy is not None:
            self._lossy.decode(named, payload, layer_sizes, target)
        else:
            raise CodecError('predictive: the block was coded with loss, and the profile has no section "lossy"')
        if self._order is not None:
            from_pairs(target, self._order, out)

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """See `Devices.coder`. Blocks with loss are encoded by the CPU."""
        if not self.exact or dtype != self._exact.model.layout.dtype:
            return False
        mode = self._exact if self._level is None else self._levels.get(self._level)
        return mode.codes_on(device)

    @property
    def reads_by_kernels(self) -> bool:
        return self.has_kernels or self._steps is not None

    def reads_on(self, device: torch.device, dtype: str) -> bool:
        if self._steps is None or self._lossy is None:
            return self.codes_on(device, dtype)
        return dtype == "bfloat16" and self._lossy.decodes_on(device)

    def kernels_decode(self, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        mode = mode_of(payload, layer_sizes)
        if mode == LOSSY_MODE:
            return self._lossy is not None
        return mode == MODE or LEVEL_MODES.get(mode) in self._levels.known

    def decodes_on(self, device: torch.device, dtype: str, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        mode = mode_of(payload, layer_sizes)
        level = LEVEL_MODES.get(mode)
        if mode == LOSSY_MODE:
            return self._lossy is not None and dtype == "bfloat16" and self._lossy.decodes_on(device)
        if level is None or not self.exact or dtype != self._exact.model.layout.dtype:
            return self.codes_on(device, dtype)
        return self._levels.get(level).codes_on(device)


class LevelModes:
    """The levels of a profile, each made when it is first needed. Thread-safe: `_lock` guards `_made`."""

    def __init__(self, known: Sequence[int], make: Callable[[int], LevelModel] | None = None) -> None:
        """known: ascending. make: gives the model of one of them; it may raise `ProfileError`."""
        self.known = tuple(known)
        self._make, self._lock = make, Lock()
        self._made: dict[int, LevelMode] = {}

    @classmethod
    def of(cls, profile: Profile) -> LevelModes:
        if LEVELS_SECTION not in profile.sections:
            return cls(())
        layout, base, arrays = profile.layout, profile.section("lossless"), profile.section(LEVELS_SECTION)
        return cls(levels_of(arrays), lambda level: LevelModel.from_arrays(layout, level, base, arrays))

    def get(self, level: int) -> LevelMode:
        """Raises `CodecError` for one that the profile does not have, `ProfileError` for one that is malformed."""
        if level not in self.known or self._make is None:
            raise CodecError(f"predictive: the block was coded in level {level}, which the profile does not have")
        from kvstore.codecs.predictive.levels.mode import LevelMode

        with self._lock:
            if level not in self._made:
                self._made[level] = LevelMode(self._make(level))
            return self._made[level]


def mode_of(payload: memoryview, layer_sizes: Sequence[int]) -> int:
    """Return the mode that a payload's first layer is coded in; 0 for a layer that is too short to say."""
    word = int(_MODE.unpack_from(payload)[0]) if layer_sizes[0] >= _MODE.size else 0
    wide = word & ~_KEPT
    return wide if wide in (EXACT_MODES["float32"], EXACT_MODES["float16"]) else word
