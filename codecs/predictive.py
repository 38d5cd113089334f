"""Codec 2: what the token and the two layers before say of a value is left out, the rest is coded by rANS.

Exact. Every value is predicted in integers, the same on every machine, with the 8-bit weights of a profile
(predictive_model.py); predictive_reference.py says how, FORMAT.md what is written, docs/codecs/predictive.md why.
Blocks that this makes no smaller, at positions beyond the tables, or of other dtypes, are coded as by `entropy`.
Tensors on a GPU are coded there (kernels/predict_blocks.py), once it has shown that it writes the CPU's bytes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import kvstore.codecs._predict as _predict
from kvstore.codecs.base import BlockInfo, Codec, check_payload
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, device_of, may_have_kernels
from kvstore.codecs.entropy import EntropyCodec
from kvstore.codecs.predictive_model import PredictiveModel
from kvstore.codecs.profile import Profile
from kvstore.codecs.view import KVView
from kvstore.errors import CodecError, ProfileError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.kernels.predict_device import DeviceModel
    from kvstore.codecs.lossy_model import LossyModel

MODE, LOSSY_MODE = 4, 5
_MODE = struct.Struct("<I")
_RATIO = 1.7  # what blocks are expected to come to, rather less than more


class PredictiveCodec(Codec):
    """About 1.95 for bf16 caches of the model that the profile was made with. Thread-safe.

    Has no state but what it learned of devices: of each that it was given tensors of, the model there, about as many
    bytes as its weights have, or that the CPU does its work.
    """

    id = 2
    name = "predictive"
    exact = True
    has_kernels = True

    def __init__(self, model: PredictiveModel, lossy: LossyModel | None = None) -> None:
        """lossy: to decode what `LossyCodec`, of the same number and profile, wrote."""
        self._model = model
        self._lossy = lossy
        self._native = native_model(model)
        self._plain = EntropyCodec()
        self._lock = Lock()
        self._decoder: Codec | None = None  # of lossy blocks, made when there is one
        self._trial = Lock()
        self._devices: dict[torch.device, DeviceModel | None] = {}  # None: the CPU codes for it

    @classmethod
    def from_profile(cls, profile: Profile, *, bits: float | None = None, kl: float | None = None) -> Codec:
        """bits: a value, for lossy coding at this rate, or kl: as `LossyModel.steps_for`; None for exact coding, which
        decodes both.

        Raises `ProfileError` where the profile lacks what it takes, or does not reach the quality.
        """
        exact = bits is None and kl is None
        missing = [name for name in ("lossless", "lossy")[: 1 if exact else 2] if name not in profile.sections]
        if missing:
            raise ProfileError(f'the profile has no section "{missing[0]}"; make a new one with `kvstore calibrate`')
        model, lossy = PredictiveModel.from_arrays(profile.layout, profile.section("lossless")), None
        if "lossy" in profile.sections:
            from kvstore.codecs.lossy_model import LossyModel

            lossy = LossyModel.from_arrays(model, profile.section("lossy"))
        if exact or lossy is None:
            return cls(model, lossy)
        from kvstore.codecs.lossy import LossyCodec

        try:
            return LossyCodec(lossy, lossy.steps_for(bits=bits, kl=kl))
        except ValueError as error:
            raise ProfileError(f"predictive, lossy: {error}") from error

    def bound(self, info: BlockInfo) -> int:
        return self._plain.bound(info)

    def usual(self, info: BlockInfo) -> int:
        return min(self.bound(info), int(sum(info.layer_bytes()) / _RATIO) + (1 << 12))

    def encode(self, info: BlockInfo, block: KVView, out: memoryview) -> tuple[int, ...] | None:
        if info.layout != self._model.layout:
            return self._plain.encode(info, block, out)
        view, done = self._encode(info, block, out, self._plain.usual(info))
        if done == _predict.FALL_BACK:
            return self._plain.encode(info, view, out)
        return done if isinstance(done, tuple) else None

    def _encode(
        self, info: BlockInfo, block: KVView, out: memoryview, limit: int
    ) -> tuple[KVView, tuple[int, ...] | int | None]:
        """The block, where it was coded, and what `_predict.encode` returns."""
        coder = self._coder_for(block)
        if coder is not None:
            from kvstore.codecs.kernels.predict_blocks import encode_into

            with self._watched(coder):
                return block, encode_into(coder, info, block, out, limit)
        view = block if block.on_cpu else copy_on_cpu(block)
        return view, _predict.encode(self._native, _tokens(info), info.start, view.rows, out, limit)

    def fallbacks(self, payload: memoryview, layer_sizes: Sequence[int]) -> int:
        """The layers that were not predicted."""
        return 0 if mode_of(payload, layer_sizes) in (MODE, LOSSY_MODE) else len(layer_sizes)

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        check_payload(info, payload, layer_sizes, out)
        if self._lossy is not None and mode_of(payload, layer_sizes) == LOSSY_MODE:
            self._lossy_codec(self._lossy).decode(info, payload, layer_sizes, out)
            return
        if mode_of(payload, layer_sizes) != MODE:
            self._plain.decode(info, payload, layer_sizes, out)
            return
        if info.layout != self._model.layout:
            raise CodecError("predictive: a block of another layout than the profile's")
        if min(layer_sizes) < 0:
            raise CodecError(f"layers of {list(layer_sizes)} bytes")
        if not out.writable:
            raise ValueError("decode: the last dimension of every tensor of the target must be contiguous")
        coder = self._coder_for(out)
        if coder is not None:
            from kvstore.codecs.kernels.predict_blocks import decode_from

            with self._watched(coder):
                if decode_from(coder, [info], [payload], [layer_sizes], [out]):
                    raise CodecError("predictive: the block is damaged")
                return
        target = out if out.on_cpu else buffer_on_cpu(out)
        wrong = _predict.decode(
            self._native, _tokens(info), info.start, info.count, payload, layer_sizes, target.rows, out.tokens
        )
        if wrong is not None:
            raise CodecError(wrong)
        if target is not out:
            target.copy_to(out)
            _settle(out)

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """Where triton is installed, can compile for the device, and the kernels did in a trial what the CPU does. The
        first call makes the trial, which takes as long as the compiler does; others wait for it."""
        return dtype == self._model.layout.dtype and self._coder(device) is not None

    def kernels_decode(self, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        return mode_of(payload, layer_sizes) == MODE

    def _coder_for(self, view: KVView) -> DeviceModel | None:
        device = device_of(view)
        return self._coder(device) if device is not None and view.layout == self._model.layout else None

    def _coder(self, device: torch.device) -> DeviceModel | None:
        if not may_have_kernels(device):
            return None
        with self._trial:
            if device not in self._devices:
                self._devices[device] = self._tried(device)
            return self._devices[device]

    def _tried(self, device: torch.device) -> DeviceModel | None:
        try:
            from kvstore.codecs.kernels.predict_blocks import tried
        except ImportError:
            return None
        return tried(self._model, self._native, device)

    @contextlib.contextmanager
    def _watched(self, coder: DeviceModel) -> Iterator[None]:
        """What a device raises inside, beside errors of its callers and of the moment, is its last: kernels are
        compiled for more kinds of arguments than the trial has. The CPU goes on."""
        import torch

        try:
            yield
        except (CodecError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception:
            with self._trial:
                self._devices[coder.device] = None

    def _lossy_codec(self, model: LossyModel) -> Codec:
        with self._lock:
            if self._decoder is None:
                from kvstore.codecs.lossy import LossyCodec

                self._decoder = LossyCodec(model, (1.0, 1.0))  # steps are found in the block
            return self._decoder


def mode_of(payload: memoryview, layer_sizes: Sequence[int]) -> int:
    """How a payload's first layer says that it is coded; 0 for one that is too short to say."""
    return int(_MODE.unpack_from(payload)[0]) if layer_sizes[0] >= _MODE.size else 0


def native_model(model: PredictiveModel) -> _predict.Model:
    """The same model for csrc/predict.h."""
    parts = [part for pair in model.parts for part in pair]
    return _predict.Model(
        shapes=np.array([[x.heads, x.key_dim, x.value_dim] for x in model.layout.layers], np.int64),
        in_scale=[part.in_scale for part in parts],
        out_scale=[part.out_scale for part in parts],
        scale=[part.scale for part in parts],
        bias=[part.bias for part in parts],
        adapt=[part.adapt for part in parts],
        fix=[part.fix for part in parts],
        weight=[part.weight for part in parts],
        token_kv=model.token_kv,
        freqs=model.freqs,
        rope_fine=model.rope_fine,
        rope_coarse=model.rope_coarse,
    )


def _settle(view: KVView) -> None:
    """Waits until what was copied to a view on a device is there, as what its kernels decode is."""
    import torch

    for device in {tensor.device for tensor in view.tensors()}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _tokens(info: BlockInfo) -> npt.NDArray[np.int64]:
    return info.tokens.astype(np.int64)
