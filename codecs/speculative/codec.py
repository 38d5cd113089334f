"""Codec 4: chunks of a sequence's cache, each coded against the cache that a predictor computes of the same tokens.

A predictor is a model of the same layout: a copy with coarser weights, say. It runs the tokens in passes of a fixed
length, and a decoder runs the same passes. What a bf16 cache differs in from the predictor's is coded as the donor
codec codes rows against rows, an fp8 cache by a mixture around each prediction (chunks.py). No decoder trusts its
predictor: before anything is decoded with a chunk's prediction, its checksum is compared. FORMAT.md has the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import xxhash

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor.model import DonorModel
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.profile import NO_PROFILE, Profile
from kvstore.codecs.speculative.chunks import SEEN_BYTES, Layers, MixtureCoder, RowCoder, channels_of, measured
from kvstore.codecs.speculative.mixture import Scales
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.core.tokens import Tokens
from kvstore.errors import CodecError

SPECULATIVE = 4  # the codec's number
DTYPES = ("bfloat16", "float8_e4m3fn")
SECTION = "speculative"  # of a profile: how what differs in one layer goes on in the next
MOST_CHUNK = 1 << 14  # tokens
_HEAD = struct.Struct("<16s16sI")  # predictor, profile, chunks
_PLAIN, _PREDICTED = 0, 1
_CHUNK = struct.Struct("<B8s")  # mode, sum of the prediction


class SpeculativeCodec:
    """Codes caches of one layout against the predictions of one predictor. Immutable and thread-safe.

    Example:
        >>> import numpy as np, torch
        >>> layout = KVLayout.uniform(num_layers=1, heads=2, head_dim=64)
        >>> k, v = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        >>> tokens, near = np.arange(64, dtype=np.uint32), [(k * 1.01, v * 1.01)]  # the predictor's
        >>> codec = SpeculativeCodec(layout, bytes(16))
        >>> body = codec.encode(tokens, [(k, v)], [64], [near], [True])
        >>> 2 * 2 * 64 * 64 * 2 / len(body) > 2
        True
        >>> back = [(torch.zeros_like(k), torch.zeros_like(v))]
        >>> codec.decode(tokens, body, [64], [near], back)
        >>> torch.equal(back[0][0], k)
        True
    """

    def __init__(self, layout: KVLayout, predictor: bytes, profile: Profile | None = None) -> None:
        """Make a codec.

        Args:
            layout: of the caches, bfloat16 or float8_e4m3fn, the same kind of layer everywhere.
            predictor: its fingerprint, 16 bytes.
            profile: carries what differs on from layer to layer by its section "speculative"; None does not.

        Raises:
            ValueError: the layout is another, or the fingerprint has another length.
            ProfileError: the profile is another layout's, or has no such section.
        """
        if layout.dtype not in DTYPES or layout.is_grouped:
            raise ValueError(f"speculative: expected plain layers of {' or '.join(DTYPES)}, found {layout.dtype}")
        if profile is not None and layout.dtype != "bfloat16":
            raise ValueError("profile: only bfloat16 is carried on from layer to layer; leave it out")
        if len(predictor) != 16:
            raise ValueError(f"predictor: expected a fingerprint of 16 bytes, found {len(predictor)}")
        self._layout, self._predictor = layout, predictor
        self._profile = NO_PROFILE if profile is None else profile.id
        self._plain, self._model_of_profile = EntropyCodec(), None
        if profile is not None:
            self._model_of_profile = DonorModel.from_arrays(layout, profile.section(SECTION))

    def encode(
        self,
        tokens: Tokens,
        cache: Layers,
        counts: Sequence[int],
        predictions: Sequence[Layers],
        sure: Sequence[bool],
    ) -> bytes:
        """Return the body of an archive.

        Args:
            tokens: uint32 `[n]`.
            cache: K and V of each layer, `[heads, n, dim]`.
            counts: tokens of each chunk, together n, at most `MOST_CHUNK` each.
            predictions: of each chunk, what the predictor's cache holds of it, in bfloat16.
            sure: of each chunk, whether the predictor gave the same again. One that did not is coded without it.
        """
        view, at = KVView.of_layers(self._layout, cache), 0
        parts = [_HEAD.pack(self._predictor, self._profile, len(counts))]
        coder = self._coder_of(cache, predictions)
        parts.append(coder.scales)
        for count, prediction, is_sure in zip(counts, predictions, sure, strict=True):
            info, chunk = BlockInfo(self._layout, tokens[at : at + count], at), view.narrow(at, count)
            coded = coder.encode(info, chunk, prediction) if is_sure else None
            check = bytes(8) if coded is None else sum_of_prediction(prediction)
            payload, sizes = self._encode_plain(info, chunk) if coded is None else coded
            parts += [_CHUNK.pack(coded is not None, check), self._sizes.pack(*sizes), payload]
            at += count
        return b"".join(parts)

    def decode(
        self, tokens: Tokens, body: bytes, counts: Sequence[int], predictions: Iterable[Layers], out: Layers
    ) -> None:
        """Decode the body of an archive into `out`.

        Args:
            tokens, counts: as they were encoded.
            body: what `encode` wrote; any bytes are safe to give.
            predictions: of each chunk in turn. Not asked for a chunk before those in front of it are decoded.
            out: K and V of each layer, `[heads, n, dim]`, contiguous, which are mutated.

        Raises:
            CodecError: the body is damaged, or of another predictor or profile, or this machine predicts other bits.
                `out` then holds undefined values.
        """
        self._check_head(body, len(counts))
        coder, offset = self._coder_in(body, _HEAD.size)
        view, at = KVView.of_layers(self._layout, out), 0
        for count, prediction in zip(counts, predictions, strict=True):
            begin = offset + _CHUNK.size + self._sizes.size
            if begin > len(body):
                raise CodecError("speculative: the body ends within a chunk")
            mode, check = _CHUNK.unpack_from(body, offset)
            sizes = self._sizes.unpack_from(body, offset + _CHUNK.size)
            offset = begin + sum(sizes)
            if offset > len(body) or mode not in (_PLAIN, _PREDICTED):
                raise CodecError("speculative: a chunk is longer than the body, or of an unknown mode")
            info = BlockInfo(self._layout, tokens[at : at + count], at)
            payload, target = memoryview(body)[begin:offset], view.narrow(at, count)
            if mode == _PLAIN:
                self._plain.decode(info, payload, sizes, target)
            elif sum_of_prediction(prediction) != check:
                raise CodecError("speculative: this machine predicts other bits than the one that encoded")
            else:
                coder.decode(info, payload, sizes, prediction, target)
            at += count
        if offset != len(body):
            raise CodecError("speculative: bytes follow the last chunk")

    def _check_head(self, body: bytes, chunks: int) -> None:
        if len(body) < _HEAD.size:
            raise CodecError("speculative: the body is too short for its header")
        predictor, profile, number = _HEAD.unpack_from(body)
        if predictor != self._predictor or profile != self._profile:
            what = "predictor" if predictor != self._predictor else "profile"
            raise CodecError(f"speculative: another {what} was encoded with; give that one")
        if number != chunks:
            raise CodecError(f"speculative: expected {chunks} chunks, found {number}")

    def _encode_plain(self, info: BlockInfo, chunk: KVView) -> tuple[bytes, tuple[int, ...]]:
        room = memoryview(bytearray(self._plain.bound(info)))
        sizes = self._plain.encode(info, chunk, room)
        assert sizes is not None  # it fits by the meaning of bound
        return bytes(room[: sum(sizes)]), sizes

    def _coder_of(self, cache: Layers, predictions: Sequence[Layers]) -> RowCoder | MixtureCoder:
        if self._layout.dtype == "bfloat16":
            return RowCoder(self._model_of_profile)
        return MixtureCoder(self._layout, measured(cache, predictions))

    def _coder_in(self, body: bytes, at: int) -> tuple[RowCoder | MixtureCoder, int]:
        """What codes the chunks of a body, and where these begin."""
        if self._layout.dtype == "bfloat16":
            return RowCoder(self._model_of_profile), at
        channels = channels_of(self._layout)
        end = at + channels + SEEN_BYTES
        return MixtureCoder(self._layout, Scales.parse(body[at:end], channels)), end

    def plain_chunks(self, body: bytes) -> int:
        """Return how many chunks of what `encode` returned are coded without their prediction."""
        (_, offset), found = self._coder_in(body, _HEAD.size), 0
        while offset < len(body):
            found += body[offset] == _PLAIN
            sizes = self._sizes.unpack_from(body, offset + _CHUNK.size)
            offset += _CHUNK.size + self._sizes.size + sum(sizes)
        return found

    @property
    def _sizes(self) -> struct.Struct:
        return struct.Struct(f"<{len(self._layout.layers)}I")


def sum_of_prediction(layers: Layers) -> bytes:
    """Return the checksum of a chunk's prediction, 8 bytes: xxh3-64 of K and V of each layer, `[heads, n, dim]`."""
    import torch

    found = xxhash.xxh3_64()
    for pair in layers:
        for tensor in pair:
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.digest()
