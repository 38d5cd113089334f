"""The lossy mode of the predictive codec: blocks coded by csrc/lossy, as lossy_reference.py says.

bf16. The CPU encodes; blocks elsewhere are copied. Kernels decode for a GPU (lossy_kernels/blocks.py) once it has shown
that it reads what the CPU's scalar loops read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import kvstore.codecs.predictive._lossy as _lossy
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, wait_for
from kvstore.codecs.predictive.lossy_model import LossyModel
from kvstore.codecs.predictive.lossy_quantiser import LAGRANGE, Steps
from kvstore.codecs.predictive.lossy_rate import ROWS, Rate
from kvstore.codecs.predictive.lossy_reference import header
from kvstore.codecs.predictive.lossy_rows import Engine
from kvstore.codecs.predictive.on_device import Devices
from kvstore.codecs.view import KVView
from kvstore.core.layout import SINKS
from kvstore.errors import CodecError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.predictive.lossy_kernels.blocks import LoadedLossy

USUAL = 1.5  # times what held-out text took
_ROOM = 1 << 14  # what a sample may take beyond its values, for headers


class LossyMode:
    """Thread-safe: nothing changes but the model in the forms for encoding and decoding, made once each."""

    def __init__(self, model: LossyModel) -> None:
        self.model = model
        self._devices: Devices[LoadedLossy] = Devices(model.layout, self._tried)

    @cached_property
    def _native(self) -> _lossy.Model:
        return native_model(self.model)

    @cached_property
    def _encoder(self) -> _lossy.Encoder:
        return native_encoder(self._native, Engine(self.model))

    def usual(self, info: BlockInfo, steps: Steps) -> int | None:
        """About how many bytes a block takes; None where the profile does not say."""
        ladder = self.model.ladder
        if not len(ladder):
            return None
        bits = float(np.interp(steps.k, ladder[:, 0], ladder[:, 2])) * USUAL
        item = 8 * info.layout.item_bytes
        exact = max(0, min(info.count, SINKS - info.start))
        values = info.layout.bytes_per_token // info.layout.item_bytes
        expected = ((info.count - exact) * bits + exact * item) * values / 8
        return int(expected) + (1 << 12)

    def can_encode(self, info: BlockInfo) -> bool:
        """Whether the model knows the positions of such a block, of its layout."""
        return info.count > 0 and 0 <= info.start <= self.model.base.positions - info.count

    def encode(
        self, info: BlockInfo, block: KVView, steps: Steps | Rate, out: memoryview, limit: int
    ) -> tuple[int, ...] | int | None:
        """Code a block for which `can_encode` into `out`, which is mutated.

        Args:
            steps: or the rate that is to come out, for which a few rows are encoded first.

        Returns:
            The bytes of each layer; None if `out` is too small; FALL_BACK for a block that takes more than `limit`
            bytes or has numbers that are not finite.
        """
        view, tokens = block if block.on_cpu else copy_on_cpu(block), info.tokens.astype(np.int64)
        if isinstance(steps, Rate):
            steps = self._steps_at(steps, view, tokens, info.start)
        sizes = steps.k, steps.v
        return _lossy.encode(self._encoder, tokens, info.start, view.rows, sizes, steps.quarters, out, limit)

    def _steps_at(self, rate: Rate, view: KVView, tokens: npt.NDArray[np.int64], start: int) -> Steps:
        """The steps at which a block takes so many bits a value, by a sample of its rows."""
        layout, first, steps = self.model.layout, max(0, SINKS - start), rate.steps
        every = max(1, (len(tokens) - first) // ROWS)
        begin = first + every // 2
        sample = np.ascontiguousarray(tokens[begin::every][:ROWS])
        if not len(sample):
            return steps
        rows = view.rows.copy()
        rows[0] += begin * rows[2]
        rows[2] *= every
        room = memoryview(bytearray(2 * len(sample) * layout.bytes_per_token + _ROOM))
        found = _lossy.encode(
            *(self._encoder, sample, start + begin, rows, (steps.k, steps.v), steps.quarters, room), every=every
        )
        if not isinstance(found, tuple):
            return steps  # a value is not finite, say: the block will fall back
        values = layout.bytes_per_token // layout.item_bytes
        return rate.steps_for(sum(found), len(found), len(sample) * values, (len(tokens) - first) * values)

    def largest_error(self, payload: memoryview) -> float:
        """Of a value of a block, as the encoder found it."""
        return header(payload)[2][2]

    def decode(self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], out: KVView) -> None:
        """See `Codec.decode`; of the model's layout, its sizes checked."""
        coder = self._devices.coder_for(out)
        if coder is not None:
            from kvstore.codecs.predictive.lossy_kernels.blocks import decode_from

            with self._devices.watched(coder):
                if decode_from(coder, info, payload, layer_sizes, out):
                    raise CodecError("predictive: the block is damaged, or the profile is another one")
                return
        target = out if out.on_cpu else buffer_on_cpu(out)
        self._decode_on_cpu(info, payload, layer_sizes, target)
        if target is not out:
            target.copy_to(out)
            wait_for(out.devices)

    def decodes_on(self, device: torch.device) -> bool:
        """Return whether blocks are decoded on `device` (a GPU with its index); see `Devices.coder`."""
        return self._devices.coder(device) is not None

    def _decode_on_cpu(
        self, info: BlockInfo, payload: memoryview, sizes: Sequence[int], out: KVView, level: str | None = None
    ) -> None:
        tokens = info.tokens.astype(np.int64)
        wrong = _lossy.decode(self._native, tokens, info.start, payload, sizes, out.rows, out.tokens, level)
        if wrong is not None:
            raise CodecError(wrong)

    def _tried(self, device: torch.device) -> LoadedLossy | None:
        """See the trial of `Devices`."""
        from kvstore.codecs.predictive.lossy_kernels.blocks import tried

        ladder = self.model.ladder
        steps = Steps.of(*map(float, ladder[len(ladder) // 2, :2])) if len(ladder) else Steps.of(0.2, 0.2)

        def write(info: BlockInfo, view: KVView) -> tuple[bytes, tuple[int, ...]] | None:
            room = memoryview(bytearray(4 * view.nbytes + (1 << 16)))
            sizes = self.encode(info, view, steps, room, len(room))
            return (bytes(room[: sum(sizes)]), sizes) if isinstance(sizes, tuple) else None

        def read(info: BlockInfo, coded: tuple[bytes, tuple[int, ...]], view: KVView) -> None:
            self._decode_on_cpu(info, memoryview(coded[0]), coded[1], view, "scalar")

        return tried(self.model, write, read, device)


def native_model(model: LossyModel) -> _lossy.Model:
    """The same model for csrc/lossy/lossy.h, whose decoder gives what `decode_blocks` does but for rounding of sums."""
    base, own = ([part for pair in parts for part in pair] for parts in (model.base.parts, model.parts))
    shared: dict[str, Any] = {
        name: [getattr(part, name) for part in base]
        for name in ("in_scale", "out_scale", "scale", "bias", "adapt", "fix")
    }
    shared |= {name: getattr(model.base, name) for name in ("token_kv", "rope_fine", "rope_coarse")}
    shared["shapes"] = np.array([[x.heads, x.key_dim, x.value_dim] for x in model.layout.layers], np.int64)
    arrays: dict[str, Any] = {
        name: [getattr(part, name) for part in own]
        for name in ("weight", "out_scale", "bias", "basis", "component", "unit", "scale", "adapt")
    }
    arrays |= {name: getattr(model, name) for name in ("levels", "freqs", "row_freqs", "centroids", "expect")}
    arrays["uses"] = np.array([[part.uses for part in pair] for pair in model.parts], np.uint8)
    return _lossy.Model(shared, arrays)


def native_encoder(native: _lossy.Model, engine: Engine) -> _lossy.Encoder:
    """For csrc/lossy/encode/encoder.h, which writes the bytes that `encode_blocks` does. native: of the same model."""
    model, tables = engine.model, engine.tables
    return _lossy.Encoder(
        native,
        analysis=[part.analysis.numpy() for pair in engine.parts for part in pair],
        focus=[part.focus for pair in model.parts for part in pair],
        basis=[part.basis for pair in model.parts for part in pair],
        price=(LAGRANGE * tables.rate).numpy(),
        escape=(LAGRANGE * tables.escape).numpy(),
        centroids=model.centroids,
    )
