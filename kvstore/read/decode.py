"""Brings one block into its slice of the result. A damaged record raises nothing; it is counted and quarantined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvstore.codecs import Codec, KVView, is_delta
from kvstore.codecs.base import BlockInfo, CodedBlock, decode_layers
from kvstore.codecs.delta import DeltaCodec
from kvstore.codecs.device import buffer_on_cpu, decodes_on_device, move
from kvstore.codecs.in_order import InOrder
from kvstore.core.keys import chain_key
from kvstore.core.record import Damage, DamagedRecord, RecordHeader, check_payload, parse
from kvstore.dedup.donor_cache import DonorLost, DonorReader, DonorUnreadable
from kvstore.errors import CodecError, UnknownCodec
from kvstore.metrics import Metric
from kvstore.read.block_read import BlockRead
from kvstore.residency.residency import Residency
from kvstore.tiers.base import TensorSource
from kvstore.tiers.profiles import Profiles


class _NoProfile(Exception):
    """The record's profile is missing here. With it the record can be read, so it stays."""


@dataclass(frozen=True)
class ByLayers:
    """What decodes a record layer by layer.

    Attributes:
        codec: that decodes each layer by itself.
        in_order: that decodes the layers of this record one after the other; one of both is None.
    """

    codec: Codec | None = None
    in_order: InOrder | None = None

    def first(self, block: CodedBlock, out: KVView, layers: range) -> None:
        """Decode the first layers. Raises `CodecError`."""
        if self.in_order is not None:
            self.in_order.until(layers.stop)
        elif self.codec is not None:
            decode_layers(self.codec, block, out, layers)


def _ordered(block: InOrder | None) -> ByLayers | None:
    return None if block is None else ByLayers(in_order=block)


@dataclass(frozen=True)
class BlockDecoder:
    """Decodes blocks of every codec, or copies those that have tensors. Thread-safe: has no state of its own.

    A block that fails is counted, and quarantined if it is damaged.
    """

    residency: Residency
    profiles: Profiles
    donors: DonorReader

    def copy(self, read: BlockRead, source: TensorSource, target: KVView) -> bool:
        """Copy a block that has tensors into `target`; return False if it is damaged."""
        return self._succeeds(read, lambda: self._copy(source, target))

    def decode(self, read: BlockRead, header: RecordHeader, payload: memoryview, target: KVView) -> bool:
        """Decode a record, checked by `check_record`, into `target`; return False if it is damaged or its codec or
        profile is missing here."""
        if is_delta(header.codec):
            return self._succeeds(read, lambda: self._decode_member(read, header, payload, target))
        return self._succeeds(read, lambda: self._decode(header, payload, target))

    def by_layers(self, read: BlockRead, header: RecordHeader, block: CodedBlock, out: KVView) -> ByLayers | None:
        """Return what decodes a record layer by layer into `out`, all layers of a cache on the CPU.

        Returns:
            None if it can only be decoded whole, or is damaged, or something is missing: `decode` says so.
        """
        if not self.profiles.knows(header.codec, header.profile):
            return None  # which is counted by `decode`
        try:
            if is_delta(header.codec):
                delta = self.profiles.delta_decoder(header.codec, header.profile)
                return None if delta is None else _ordered(delta.in_order(block, self._donors_of(read, header), out))
            codec = self.profiles.decoder(header.codec, header.profile)
            if codec is None:
                return None
            return ByLayers(codec) if codec.layers_apart else _ordered(codec.in_order(block, out))
        except (DonorUnreadable, DonorLost, CodecError):
            return None

    def decode_first(self, read: BlockRead, by: ByLayers, block: CodedBlock, out: KVView, layers: range) -> bool:
        """Decode the first layers of a record into `out` by what `by_layers` returned; see `decode`."""
        return self._succeeds(read, lambda: by.first(block, out, layers))

    def _succeeds(self, read: BlockRead, work: Callable[[], None]) -> bool:
        try:
            work()
        except UnknownCodec:
            self.residency.metrics.add(Metric.UNKNOWN_CODEC)  # a newer version may read it: it stays
            self.residency.note_unreadable(read.record)
            return False
        except (_NoProfile, DonorUnreadable):
            self.residency.note_unreadable(read.record)  # with its profile it can be read: it stays
            return False
        except DonorLost:
            self.residency.reject(read.record, read.source, Metric.DAMAGED_DONOR)
            return False
        except CodecError:
            self.residency.reject(read.record, read.source, Metric.DAMAGED_CODEC)
            return False
        self.residency.note_readable(read.record)
        return True

    def _copy(self, source: TensorSource, target: KVView) -> None:
        try:
            source.copy_to(target)
        except torch.OutOfMemoryError:
            self._count_fallback()
            source.fetched().copy_to(target)

    def _decode(self, header: RecordHeader, payload: memoryview, target: KVView) -> None:
        codec = self.profiles.decoder(header.codec, header.profile)
        if codec is None:
            raise _NoProfile
        info, sizes = BlockInfo(target.layout, header.tokens, header.start, header.cut), header.layer_sizes
        self._decode_by(codec, lambda out: codec.decode(info, payload, sizes, out), payload, sizes, target)

    def _decode_by(
        self,
        codec: Codec | DeltaCodec,
        decode: Callable[[KVView], None],
        payload: memoryview,
        sizes: Sequence[int],
        target: KVView,
    ) -> None:
        """Decodes into `target`, or into a buffer on the CPU, which is copied, if the target's device does not
        decode."""
        if target.on_cpu:
            decode(target)
            return
        by_device = codec.kernels_decode(payload, sizes)
        near = by_device and decodes_on_device(codec, payload, sizes, target)
        out = target if near else buffer_on_cpu(target)
        try:
            decode(out)
        except torch.OutOfMemoryError:
            self._count_fallback()
            out = buffer_on_cpu(target)
            decode(out)
        else:
            # Which may have failed at this very block.
            if by_device and not decodes_on_device(codec, payload, sizes, target):
                self._count_fallback()
        if out is not target:
            move(out, target)

    def _decode_member(self, read: BlockRead, header: RecordHeader, payload: memoryview, target: KVView) -> None:
        """Decodes a block that is coded against others."""
        if target.layout.is_grouped:
            raise CodecError("a block of a layout with windows or states is coded against others, which none is")
        codec = self.profiles.delta_decoder(header.codec, header.profile)
        if codec is None:
            raise _NoProfile
        donors = self._donors_of(read, header)
        info, sizes = BlockInfo(target.layout, header.tokens, header.start), header.layer_sizes
        self._decode_by(codec, lambda out: codec.decode(info, payload, sizes, donors, out), payload, sizes, target)

    def _donors_of(self, read: BlockRead, header: RecordHeader) -> list[KVView]:
        """The donors of a record, decoded. Raises `DonorLost`, `DonorUnreadable`, `CodecError`."""
        # What was found with the record holds even if the block is made to stand alone meanwhile.
        known = read.source.donors
        records = self.residency.donors_of(read.record) if known is None else known
        if len(records) != len(header.donors):
            raise DonorLost("the record needs other donors than the catalog says")
        return [donor.view for donor in self.donors.of(records, header.donors)]

    def _count_fallback(self) -> None:
        self.residency.metrics.add(Metric.FALLBACK_DEVICE_CODEC)


def check_record(read: BlockRead, data: memoryview) -> RecordHeader:
    """Parse a record, and check that it is whole and exactly the block that was asked for.

    Its parent's key, its own key, its position and the tokens themselves are compared.

    Raises:
        DamagedRecord: something does not agree.
    """
    header = parse(data, len(data))
    check_payload(header, data)
    check_identity(read, header)
    return header


def check_identity(read: BlockRead, header: RecordHeader) -> None:
    """Check that a header is that of the block that was asked for; see `check_record`. Raises `DamagedRecord`."""
    count = len(read.tokens)
    known = read.key if header.count == count else None
    if (
        header.parent != read.parent_key
        or header.start != read.start
        or header.tokens[:count].tobytes() != read.tokens.tobytes()
        or header.key != (known or chain_key(header.parent, header.tokens))
    ):
        raise DamagedRecord(Damage.KEY, "another block's record")
