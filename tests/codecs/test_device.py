"""Views of tensors that pose as those of a device: who codes them, and how they come to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kvcases import SMALL, kv_of, random_kv, same_kv, tokens

from kvstore.codecs import BlockInfo, KVView, codec_by_name, codec_names, device
from kvstore.codecs.device import (
    buffer_on_cpu,
    codes_on_device,
    copy_on_cpu,
    device_of,
    falls_back,
    follow,
    move,
    own_stream,
    publish,
)
from kvstore.codecs.raw import RawCodec

CPU, META = torch.device("cpu"), torch.device("meta")


class WithKernels(RawCodec):
    """For one device and one dtype."""

    has_kernels = True

    def __init__(self, device: torch.device, dtype: str = "bfloat16") -> None:
        self.works_on = device, dtype

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        return (device, dtype) == self.works_on


def posing(kv: Any) -> KVView:
    """As tensors of a device: only torch can copy them."""
    flat = [tensor for pair in kv for tensor in pair]
    return KVView(SMALL, flat[0].shape[1], None, flat, flat)


def test_the_device_of_a_view_is_the_one_that_all_its_tensors_are_on() -> None:
    kv = random_kv(5)
    assert device_of(KVView.of_layers(SMALL, kv)) is None
    assert device_of(posing(kv)) == CPU
    assert device_of(posing([(k, v.to("meta")) for k, v in kv])) is None


def test_a_codec_codes_where_its_kernels_work_and_falls_back_elsewhere() -> None:
    view = posing(random_kv(5))
    assert codes_on_device(WithKernels(CPU), view)
    assert not falls_back(WithKernels(CPU), view)
    for codec in (WithKernels(META), WithKernels(CPU, "float16")):
        assert not codes_on_device(codec, view)
        assert falls_back(codec, view)


def test_a_codec_without_kernels_falls_back_from_nothing() -> None:
    view = posing(random_kv(5))
    assert not codes_on_device(RawCodec(), view)
    assert not falls_back(RawCodec(), view)


def test_tensors_on_the_cpu_are_coded_there_and_that_is_no_fallback() -> None:
    view = KVView.of_layers(SMALL, random_kv(5))
    assert not codes_on_device(WithKernels(CPU), view)
    assert not falls_back(WithKernels(META), view)


def test_a_copy_has_the_bits_and_memory_of_its_own() -> None:
    kv, ids = kv_of(tokens(9)), tokens(9)
    copy = copy_on_cpu(posing(kv))
    assert copy.on_cpu
    kv[0][0].zero_()
    found = copy.tensors()
    assert same_kv(list(zip(found[::2], found[1::2], strict=True)), kv_of(ids))


@pytest.mark.parametrize("to_rows", [True, False])
@pytest.mark.parametrize("from_rows", [True, False])
def test_a_move_is_a_copy_whatever_the_two_are(from_rows: bool, to_rows: bool) -> None:
    kv, out = kv_of(tokens(9)), random_kv(9, seed=1)
    source = KVView.of_layers(SMALL, kv) if from_rows else posing(kv)
    move(source, KVView.of_layers(SMALL, out) if to_rows else posing(out))
    assert same_kv(out, kv)


def test_a_buffer_has_the_shapes_and_is_writable() -> None:
    buffer = buffer_on_cpu(posing(random_kv(7)).narrow(2, 4))
    assert (buffer.on_cpu, buffer.writable, buffer.tokens) == (True, True, 4)
    assert [tensor.shape for tensor in buffer.tensors()] == [(2, 4, 16)] * 6


# ---- streams of GPUs that are not there ------------------------------------------------------------------------------


class Stream:
    """Notes what it waits for."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((self.name, other.name))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which stream was told to wait for which. This thread computes on the default stream of GPU 0, and on another of
    GPU 1."""
    found: list[tuple[str, str]] = []
    default = [Stream(f"default{i}", found) for i in range(2)]
    current = [default[0], Stream("side1", found)]
    own = [Stream(f"own{i}", found) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda of: default[of.index])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: current[of.index])
    monkeypatch.setattr(device, "_own_stream", lambda of: own[of.index])
    return found


GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_what_is_computed_comes_before_what_the_store_s_threads_do(waits: list[tuple[str, str]]) -> None:
    publish([CPU, META])
    assert waits == []
    publish([GPUS[0], GPUS[1], GPUS[1], CPU, META])
    assert sorted(waits) == [("default1", "side1"), ("own0", "default0"), ("own1", "side1")]


def test_what_the_store_s_threads_copy_comes_before_what_is_written_there_later(waits: list[tuple[str, str]]) -> None:
    follow([CPU, META, *GPUS])
    assert waits == [("side1", "default1")]


@pytest.mark.usefixtures("waits")
def test_a_view_is_coded_on_streams_of_its_own_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        entered.append(of.name)
        yield
        entered.append(f"not {of.name}")

    class Tensors:
        """A view of tensors on two GPUs."""

        on_cpu = False
        devices = frozenset([GPUS[1], GPUS[0], META])

    monkeypatch.setattr(torch.cuda, "stream", stream)
    with own_stream(Tensors()):  # type: ignore[arg-type]
        assert entered == ["own0", "own1"]
    assert entered[2:] == ["not own1", "not own0"]
    for view in (KVView.of_layers(SMALL, random_kv(5)), posing(random_kv(5))):
        with own_stream(view):
            assert len(entered) == 4


@pytest.mark.parametrize("name", codec_names())
def test_a_codec_without_kernels_says_so_of_every_device_and_block(name: str) -> None:
    codec, info = codec_by_name(name), BlockInfo(SMALL, tokens(9), 0)
    out = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(SMALL, kv_of(tokens(9))), out)
    assert sizes is not None
    assert codec.kernels_decode(out[: sum(sizes)], sizes) == codec.has_kernels == (name == "splitzip")
    assert not codec.codes_on(CPU, "bfloat16")
    assert codec.has_kernels or not codec.codes_on(torch.device("cuda", 0), "bfloat16")
