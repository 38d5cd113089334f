"""Where a prefix is decoded: on the device that wants it, or on the CPU, from where it is sent in large pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.codecs import Codec, is_delta
from kvstore.codecs.delta import DeltaCodec
from kvstore.core.layout import KVLayout
from kvstore.metrics import Metric, Metrics
from kvstore.read.block_read import BlockRead
from kvstore.tiers.codecs import NewCodecs
from kvstore.tiers.profiles import Profiles


@dataclass(frozen=True)
class Placement:
    """Decides where blocks are decoded. Thread-safe: has no state of its own.

    Attributes:
        codecs: those of new records.
        profiles: give the codecs of the others.
    """

    layout: KVLayout
    codecs: NewCodecs
    profiles: Profiles
    metrics: Metrics

    def decode_device(self, reads: Sequence[BlockRead], device: Any) -> torch.device | None:
        """Return where to decode blocks that are wanted on `device`: there, if it is a GPU that decodes all of them;
        otherwise None, which is the CPU."""
        where = torch.device("cpu" if device is None else device)
        if where.type != "cuda" or self.layout.is_grouped:  # groups are put together on the CPU
            return None
        where = torch.empty(0, device=where).device  # with its index
        return where if self.all_decode(reads, where) else None

    def all_decode(self, reads: Sequence[BlockRead], device: torch.device) -> bool:
        """Return whether `device` (a GPU with its index) decodes or copies all the blocks without the CPU.

        If their codecs have kernels and the device cannot run these, the records are counted as a fallback.
        """
        numbers = []
        for read in reads:
            tensors, number = read.source.tensors, read.source.codec_id
            if tensors is not None and not tensors.reaches(device):
                return False
            numbers += [] if number is None else [number]
        codecs = [self._codec(number) for number in set(numbers)]
        usable = [codec for codec in codecs if codec is not None and codec.reads_by_kernels]
        if len(usable) < len(codecs):
            return False
        if all(codec.reads_on(device, self.layout.dtype) for codec in usable):
            return True
        self.metrics.add(Metric.FALLBACK_DEVICE_CODEC, len(numbers))
        return False

    def _codec(self, number: int) -> Codec | DeltaCodec | None:
        """The codec of new records, if it has this number, stands for all: what lies on disk does not say which profile
        it needs. Of two with one number it is the lossy one, which may have none."""
        if is_delta(number):
            return self.codecs.donor
        named = [codec for codec in (self.codecs.host, self.codecs.disk) if codec.id == number]
        return min(named, key=lambda codec: codec.exact) if named else self.profiles.likely_decoder(number)
