"""Where a prefix is decoded, by what its sources and codecs say; no GPU is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kvcases import SMALL, identity, tokens

from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.raw import RawCodec
from kvstore.metrics import Metrics
from kvstore.read.block_read import BlockRead
from kvstore.read.placement import Placement
from kvstore.tiers.base import Source, TensorSource
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.profiles import Profiles

HERE, ELSEWHERE = torch.device("cuda", 0), torch.device("cuda", 1)


class Kernels(RawCodec):
    """Codec 2, with kernels that work on one device."""

    id = 2
    has_kernels = True

    def __init__(self, works_on: torch.device | None = HERE) -> None:
        self.works_on = works_on

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        return device == self.works_on


class Lossy(RawCodec):
    """Of the same number, for the CPU only."""

    id = 2
    exact = False


class Readers(Lossy):
    """With kernels that decode on one device."""

    reads_by_kernels = True

    def __init__(self, works_on: torch.device) -> None:
        self.works_on = works_on

    def reads_on(self, device: torch.device, dtype: str) -> bool:
        return device == self.works_on


class Members(DonorCodec):
    """Codes against donors, with kernels that work on one device."""

    works_on: torch.device

    def __init__(self, plain: RawCodec) -> None:
        super().__init__(plain)
        self.has_kernels = True

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        return device == self.works_on


@dataclass(frozen=True)
class Tensors(TensorSource):
    on: torch.device
    tier = "device"
    nbytes = 1

    def copy_to(self, target: Any) -> None: ...

    def fetched(self) -> TensorSource:
        return self

    def reaches(self, device: torch.device) -> bool:
        return device == self.on


@dataclass(frozen=True)
class Stored(Source):
    """As a tier that is not known to the engine may have it."""

    codec: int = 2
    tier = "remote"
    nbytes = 1

    @property
    def codec_id(self) -> int | None:
        return self.codec


def placement(disk: Any, host: Any = None) -> Placement:
    metrics = Metrics()
    profiles = Profiles(FileSystem(), None, identity(), metrics, None)
    return Placement(SMALL, TierCodecs(host or RawCodec(), disk), profiles, metrics)


def reads(*sources: Source) -> list[BlockRead]:
    return [BlockRead(i, 8 * i, tokens(8), b"", source) for i, source in enumerate(sources)]


def fallbacks(placed: Placement) -> float:
    return float(placed.metrics.snapshot().get("fallback_device_codec", 0))


def test_tensors_that_reach_the_device_need_no_codec() -> None:
    placed = placement(RawCodec())
    assert placed.all_decode(reads(Tensors(HERE), Tensors(HERE)), HERE)
    assert not placed.all_decode(reads(Tensors(HERE), Tensors(ELSEWHERE)), HERE)
    assert fallbacks(placed) == 0


def test_records_are_decoded_where_the_kernels_of_their_codec_work() -> None:
    assert placement(Kernels()).all_decode(reads(Tensors(HERE), Stored(), Stored()), HERE)


def test_what_the_device_should_decode_and_does_not_is_counted_record_by_record() -> None:
    placed = placement(Kernels(works_on=ELSEWHERE))
    assert not placed.all_decode(reads(Tensors(HERE), Stored(), Stored()), HERE)
    assert fallbacks(placed) == 2


@pytest.mark.parametrize("codec_id", [0, 3, 2, 999])
def test_a_record_of_a_codec_without_kernels_or_of_an_unknown_one_is_for_the_cpu(codec_id: int) -> None:
    placed = placement(Lossy() if codec_id == 2 else RawCodec())
    assert not placed.all_decode(reads(Stored(codec_id)), HERE)
    assert fallbacks(placed) == 0


@pytest.mark.parametrize("works_on", [HERE, ELSEWHERE])
def test_records_with_loss_are_decoded_where_kernels_decode_though_none_encode(works_on: torch.device) -> None:
    placed = placement(Readers(works_on))
    assert not Readers(works_on).codes_on(HERE, "bfloat16")
    assert placed.all_decode(reads(Stored(), Stored()), HERE) == (works_on == HERE)
    assert fallbacks(placed) == 2 * (works_on != HERE)


@pytest.mark.parametrize("works_on", [HERE, ELSEWHERE])
def test_members_are_decoded_where_the_kernels_of_their_codec_work(works_on: torch.device) -> None:
    placed = placement(Kernels())
    donor = DonorCodec(RawCodec())
    assert not replace(placed, codecs=TierCodecs(RawCodec(), Kernels(), donor)).all_decode(reads(Stored(3)), HERE)
    assert fallbacks(placed) == 0
    donor = Members(RawCodec())
    donor.works_on = works_on
    placed = replace(placed, codecs=TierCodecs(RawCodec(), Kernels(), donor))
    assert placed.all_decode(reads(Stored(), Stored(3)), HERE) == (works_on == HERE)
    assert fallbacks(placed) == 2 * (works_on != HERE)


def test_where_a_tier_is_lossy_its_codec_stands_for_all_of_its_number() -> None:
    for codecs in ((Kernels(), Lossy()), (Lossy(), Kernels())):
        assert not placement(*codecs).all_decode(reads(Stored()), HERE)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_what_is_wanted_on_the_cpu_is_decoded_there(device: Any) -> None:
    assert placement(Kernels()).decode_device(reads(Tensors(HERE)), device) is None
