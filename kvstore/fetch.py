"""Brings the blocks of a prefix together: reads what is on disk, checks it, decodes everything into the result.

Every block goes straight into its slice of the result. Records that follow each other on disk are read with one
call, and reading one run overlaps with decoding another.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.block import Block
from kvstore.codecs import Codec, KVView
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor import DonorCodec
from kvstore.codecs.predictive import MODE, PredictiveCodec, mode_of
from kvstore.codecs.splitzip import SplitZipCodec, codes_on, room_on_cpu
from kvstore.config import MIB
from kvstore.errors import CodecError, UnknownCodec
from kvstore.families.reader import DonorLost, DonorReader, DonorUnreadable
from kvstore.identity import Tokens, chain_key
from kvstore.layout import KVLayout
from kvstore.metrics import Metrics
from kvstore.profiles import Profiles
from kvstore.record import Damage, DamagedRecord, RecordHeader, check_payload, parse
from kvstore.residency import Residency, Source
from kvstore.tiers.buffers import Buffer, BufferPool
from kvstore.tiers.device import DeviceBlock, move
from kvstore.tiers.disk.entry import Entry
from kvstore.tiers.host import HostRecord

# Larger runs read no faster; smaller ones leave more to overlap, and need less memory for what is being decoded.
_RUN_BYTES = 2 * MIB


@dataclass(frozen=True)
class Part:
    """What is wanted of one stored block: its first `tokens`, at `start` of the sequence.

    parent_key: key of the block before; a record from outside memory must prove with its own key that it follows it.
    """

    record: int
    start: int
    tokens: Tokens
    parent_key: bytes
    source: Source


@dataclass(frozen=True)
class Fetcher:
    """Reads and decodes. Thread-safe.

    executor: its threads read and decode; more of them than decode let reads overlap. threads: how many may decode.
    Disk records that are read a second time (see `SecondRead`) are kept in the host tier as they are, coded as on
    disk: a record names its codec, and decoding it again costs less than coding it anew.
    """

    residency: Residency
    pool: BufferPool
    executor: Executor
    metrics: Metrics
    threads: int
    profiles: Profiles
    donors: DonorReader

    def fetch(self, parts: Sequence[Part], out: KVView | None, origin: int = 0) -> tuple[int, dict[str, int]]:
        """Decodes the parts into `out`, which begins at position `origin` (None: reads and checks them, and keeps them
        in the host tier).

        Returns how many leading parts are good, and tokens by tier of those. Never raises for damaged or lost
        records: they are counted and quarantined. Releases the disk entries of the parts.
        """
        tasks = self._tasks(parts)
        run = _Run(self, parts, out, origin)
        outcomes = [run(tasks[0])] if len(tasks) == 1 else list(self.executor.map(run, tasks))
        bad = {index for outcome in outcomes for index in outcome}
        good = min(bad, default=len(parts))
        # What was promoted came in any order: put the beginning of the prefix before its end again.
        self.residency.touch([part.record for part in parts[:good]])
        tiers: dict[str, int] = {}
        for part in parts[:good]:
            name = _tier_name(part.source)
            tiers[name] = tiers.get(name, 0) + len(part.tokens)
        return good, tiers

    def _tasks(self, parts: Sequence[Part]) -> list[range]:
        """Ranges of parts to work on together: runs of neighbours on disk, and even shares of what is in memory."""
        share = max(1, -(-len(parts) // (2 * self.threads)))
        tasks: list[range] = []
        first = size = 0
        for i, part in enumerate(parts):
            if i > first and (
                not _together(parts[i - 1].source, part.source) or size >= _RUN_BYTES or i - first >= share
            ):
                tasks.append(range(first, i))
                first, size = i, 0
            size += part.source.extent.nbytes if isinstance(part.source, Entry) else 0
        tasks.append(range(first, len(parts)))
        return tasks


@dataclass(frozen=True)
class _Run:
    """Works on one task; returns the indexes of parts that failed."""

    fetcher: Fetcher
    parts: Sequence[Part]
    out: KVView | None
    origin: int

    def __call__(self, task: range) -> list[int]:
        entries = [part.source for part in self.parts[task.start : task.stop] if isinstance(part.source, Entry)]
        if entries:
            return self._from_disk(task, entries)
        if self.out is None:
            return []
        return [i for i in task if not self._from_memory(self.parts[i], self._target(self.parts[i]))]

    def _target(self, part: Part) -> KVView | None:
        return self.out.narrow(part.start - self.origin, len(part.tokens)) if self.out is not None else None

    def _from_memory(self, part: Part, target: KVView | None) -> bool:
        source = part.source
        assert target is not None
        if isinstance(source, HostRecord):
            return self._decode(part, source.header, source.payload, target)
        if isinstance(source, Block):
            move(source.view.narrow(0, target.tokens), target)
            return True
        assert isinstance(source, DeviceBlock)
        try:
            self._from_device(source, target)
        except CodecError as error:
            self._reject(part, type(error).__name__)
            return False
        return True

    def _from_device(self, source: DeviceBlock, target: KVView) -> None:
        try:
            source.copy_to(target)
        except torch.OutOfMemoryError:
            self.fetcher.metrics.add("fallback_device_codec")
            source.fetched().copy_to(target)

    def _from_disk(self, task: range, entries: Sequence[Entry]) -> list[int]:
        fetcher = self.fetcher
        assert fetcher.residency.disk is not None
        kept = [self._is_kept(entry) for entry in entries]
        buffers = [fetcher.pool.take(e.extent.nbytes, keep) for e, keep in zip(entries, kept, strict=True)]
        try:
            fetcher.residency.disk.read(entries, buffers)
            readable = [True] * len(entries)
        except OSError:
            # One bad sector fails the whole run: find out whose it is.
            fetcher.metrics.add("disk_read_errors")
            readable = [self._read_one(entry, buffer) for entry, buffer in zip(entries, buffers, strict=True)]
        finally:
            fetcher.residency.disk.release(entries)
        bad = []
        for i, buffer, was_read, keep in zip(task, buffers, readable, kept, strict=True):
            if not was_read:
                self._reject(self.parts[i], "unreadable")
            if not was_read or not self._accept(self.parts[i], buffer, keep):
                bad.append(i)
        return bad

    def _is_kept(self, entry: Entry) -> bool:
        residency = self.fetcher.residency
        if not residency.host.budget:
            return False
        return self.out is None or residency.host_admission.again(entry.record, entry.extent.nbytes)

    def _read_one(self, entry: Entry, buffer: Buffer) -> bool:
        disk = self.fetcher.residency.disk
        assert disk is not None
        try:
            disk.read([entry], [buffer])
        except OSError:
            return False
        return True

    def _accept(self, part: Part, buffer: Buffer, keep: bool) -> bool:
        """Checks a record that was read, decodes it, and may lend its buffer to the host tier."""
        try:
            header = check_record(part, buffer.view)
        except DamagedRecord as damage:
            self._reject(part, damage.damage.value)
            return False
        target = self._target(part)
        if target is not None and not self._decode(part, header, HostRecord(header, buffer).payload, target):
            return False
        if keep and self.fetcher.residency.host.add(part.record, HostRecord(header, buffer)):
            self.fetcher.metrics.add("promoted_records")
            if part.record not in self.fetcher.residency.index:
                self.fetcher.residency.host.remove(part.record)  # deleted while it was read
        return True

    def _decode(self, part: Part, header: RecordHeader, payload: memoryview, target: KVView) -> bool:
        try:
            info = BlockInfo(target.layout, header.tokens, header.start)
            if header.codec == DonorCodec.id:
                return self._decode_member(part, info, header, payload, target)
            codec = self.fetcher.profiles.decoder(header.codec, header.profile)
            if codec is None:
                return False  # with its profile it can be read: it stays
            near = self._decode_near(codec, info, header, payload, target)
            if near is not target:
                move(near, target)
        except UnknownCodec:
            self.fetcher.metrics.add("unknown_codec")  # a newer version may read it: it stays
            return False
        except DonorUnreadable:
            return False  # as above
        except DonorLost:
            self._reject(part, "donor")
            return False
        except CodecError as error:
            self._reject(part, type(error).__name__)
            return False
        return True

    def _decode_member(
        self, part: Part, info: BlockInfo, header: RecordHeader, payload: memoryview, target: KVView
    ) -> bool:
        """Decodes a block that is coded against others; False where its profile is not here."""
        fetcher = self.fetcher
        codec = fetcher.profiles.donor_decoder(header.profile)
        if codec is None:
            return False
        # What was read with the record holds even where it is made to stand alone meanwhile.
        source = part.source
        records = source.donors if isinstance(source, Entry) else fetcher.residency.donors_of(part.record)
        if len(records) != len(header.donors):
            raise DonorLost("the record needs other donors than the catalog says")
        donors = fetcher.donors.of(records, header.donors)
        near = target if target.on_cpu else room_on_cpu(target)
        codec.decode(info, payload, header.layer_sizes, [donor.view for donor in donors], near)
        if near is not target:
            move(near, target)
        return True

    def _decode_near(
        self, codec: Codec, info: BlockInfo, header: RecordHeader, payload: memoryview, target: KVView
    ) -> KVView:
        """Decodes into `target`, or, where its device does not decode, into room on the CPU, which is returned."""
        predictor = None  # of a block that has kernels
        if not target.on_cpu and isinstance(codec, PredictiveCodec) and mode_of(payload, header.layer_sizes) == MODE:
            predictor = codec
        there = target.on_cpu or codec.id == SplitZipCodec.id
        if predictor is not None:
            there = predictor.codes_on_device(target)
        near = target if there else room_on_cpu(target)
        try:
            codec.decode(info, payload, header.layer_sizes, near)
        except torch.OutOfMemoryError:
            self.fetcher.metrics.add("fallback_device_codec")
            near = room_on_cpu(target)
            codec.decode(info, payload, header.layer_sizes, near)
            return near
        if predictor is not None and not predictor.codes_on_device(target):  # which may have failed at this very block
            self.fetcher.metrics.add("fallback_device_codec")
        return near

    def _reject(self, part: Part, why: str) -> None:
        self.fetcher.residency.reject(part.record, part.source, why)


def check_record(part: Part, data: memoryview) -> RecordHeader:
    """Parses a record and checks that it is whole, and exactly the block that was asked for: its parent's key, its
    own key and the tokens themselves. Raises `DamagedRecord`."""
    header = parse(data, len(data))
    check_payload(header, data)
    count = len(part.tokens)
    if (
        header.parent != part.parent_key
        or header.start != part.start
        or not np.array_equal(header.tokens[:count], part.tokens)
        or chain_key(header.parent, header.tokens) != header.key
    ):
        raise DamagedRecord(Damage.KEY, "another block's record")
    return header


def home(parts: Sequence[Part], layout: KVLayout, device: Any, fetcher: Fetcher | None = None) -> torch.device | None:
    """Where to decode the parts when they are wanted on `device`: there, if it is a GPU that can decode them all; None
    for the CPU. What the CPU must decode is better sent in large pieces, once the whole of it is there.

    fetcher: knows the profile that the predictive codec needs, without which it is decoded by the CPU, and counts the
    blocks of codecs with kernels that the GPU should decode and cannot.
    """
    where = torch.device("cpu" if device is None else device)
    if where.type != "cuda":
        return None
    where = torch.empty(0, device=where).device  # with its index
    return where if all_decode(parts, layout, where, fetcher) else None


def all_decode(parts: Sequence[Part], layout: KVLayout, device: torch.device, fetcher: Fetcher | None) -> bool:
    """Whether `device` (a GPU with its index) decodes all the parts; counts those that it should and does not."""
    numbers = [_number(part.source, device) for part in parts]
    predictor = None if fetcher is None or PredictiveCodec.id not in numbers else _predictor(fetcher)
    if None in numbers or (predictor is None and PredictiveCodec.id in numbers):
        return False
    if codes_on(device, layout.dtype) and (predictor is None or predictor.codes_on(device)):
        return True
    records = sum(isinstance(part.source, Entry | HostRecord) for part in parts)
    if fetcher is not None and records:
        fetcher.metrics.add("fallback_device_codec", records)
    return False


def _number(source: Source, device: torch.device) -> int | None:
    """The codec whose kernels bring a part to `device`, where there is one."""
    if isinstance(source, DeviceBlock):
        return SplitZipCodec.id if source.memory.device == device else None
    if isinstance(source, Block):
        return None if source.view.on_cpu else SplitZipCodec.id
    number = source.codec if isinstance(source, Entry) else source.header.codec
    return number if number in (SplitZipCodec.id, PredictiveCodec.id) else None


def _predictor(fetcher: Fetcher) -> PredictiveCodec | None:
    """The codec of new records, which stands for all: what lies on disk does not say which profile it needs. None where
    they are lossy, which no device decodes."""
    profiles, config = fetcher.profiles, fetcher.residency.config
    profile = profiles.current
    if profile is None or "lossless" not in profile.sections or "@" in config.disk.codec + config.host.codec:
        return None
    codec = profiles.decoder(PredictiveCodec.id, profile.id)
    return codec if isinstance(codec, PredictiveCodec) else None


def release(residency: Residency, sources: Sequence[Source | None]) -> None:
    """Lets go of the disk entries among sources that will not be fetched."""
    entries = [source for source in sources if isinstance(source, Entry)]
    if entries and residency.disk is not None:
        residency.disk.release(entries)


def _together(before: Source, source: Source) -> bool:
    if not isinstance(before, Entry) or not isinstance(source, Entry):
        return isinstance(before, Entry) == isinstance(source, Entry)
    a, b = before.extent, source.extent
    return a.segment == b.segment and a.offset + a.nbytes == b.offset


def _tier_name(source: Source) -> str:
    if isinstance(source, Entry):
        return "disk"
    return {HostRecord: "host", DeviceBlock: "device", Block: "queue"}[type(source)]
