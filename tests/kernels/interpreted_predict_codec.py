"""The predictive codec on a device, in triton's interpreter: `python interpreted_predict_codec.py GROUP...`.

Tensors on the CPU pose as a device's: their views have no rows, so that nothing but torch and the kernels reads them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import kernelgroups
import numpy as np
import pytest
import torch
from kvcases import Layers, identity, random_kv, same_kv
from length import FULL as AT_LENGTH
from predictcases import VOCABULARY, arrays_of, block_of, model_of, native, view_of
from threadruns import HANGS_S

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.codecs import BlockInfo, KVView, Profile
from kvstore.codecs.device import codes_on_device
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.launching import LAUNCH
from kvstore.codecs.predictive import _predict
from kvstore.codecs.predictive.codec import MODE, PredictiveCodec, mode_of
from kvstore.codecs.predictive.kernels import blocks as predict_blocks
from kvstore.codecs.predictive.kernels import layers as predict_layers
from kvstore.codecs.predictive.kernels.device import Run
from kvstore.codecs.rans.kernels.launch import Encoded
from kvstore.codecs.raw import RawCodec
from kvstore.config import KIB, MIB
from kvstore.errors import CodecError
from kvstore.read.placement import Placement
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.profiles import Profiles
from kvstore.write import plan as planner

SHAPES = [(2, 8, 6)] * 2
MODEL = model_of(SHAPES, True, 12)
CPU = torch.device("cpu")
Work = Callable[..., Any]
FULL, predict_blocks.TRIAL_TOKENS = predict_blocks.TRIAL_TOKENS, 4  # the interpreter takes its time


def posing(layout: KVLayout, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], checked: bool = False) -> KVView:
    tensors = [tensor for pair in kv for tensor in pair]
    return KVView(layout, tensors[0].shape[1], None, tensors, tensors)


def case(kind: str = "alike", count: int = 7, start: int = 5) -> tuple[BlockInfo, Layers]:
    tokens = np.random.default_rng(count).integers(0, VOCABULARY + 20, count).astype(np.uint32)
    tensors = view_of(MODEL, block_of(MODEL, kind, tokens, start, 3)).tensors()
    return BlockInfo(MODEL.layout, tokens, start), list(zip(tensors[::2], tensors[1::2], strict=True))


def coded(codec: PredictiveCodec, info: BlockInfo, view: KVView) -> tuple[bytes, tuple[int, ...]]:
    out = bytearray(b"\xa5" * (codec.bound(info) + 1))
    sizes = codec.encode(info, view, memoryview(out)[:-1])
    assert sizes is not None
    assert out[-1] == 0xA5
    return bytes(out[: sum(sizes)]), sizes


def right(info: BlockInfo, kv: Layers) -> tuple[bytes, tuple[int, ...]]:
    """What the CPU writes."""
    return coded(PredictiveCodec(MODEL), info, KVView.of_layers(info.layout, kv))


def decoded(codec: PredictiveCodec, info: BlockInfo, payload: bytes, sizes: tuple[int, ...]) -> Layers:
    room = random_kv(info.count, info.layout, seed=9)
    codec.decode(info, memoryview(payload), sizes, posing(info.layout, room))
    return room


@contextmanager
def changed(name: str, make: Callable[[Work], Work]) -> Iterator[None]:
    """`predict_blocks.NAME`, replaced by what `make` makes of it."""
    function = getattr(predict_blocks, name)
    setattr(predict_blocks, name, make(function))
    try:
        yield
    finally:
        setattr(predict_blocks, name, function)


@contextmanager
def calls(name: str) -> Iterator[list[object]]:
    """What `predict_blocks.NAME` was called with: so that a test does not pass on the CPU's codec."""
    seen: list[object] = []

    def counted(function: Work) -> Work:
        def call(*arguments: Any) -> Any:
            seen.append(arguments)
            return function(*arguments)

        return call

    with changed(name, counted):
        yield seen


def blocks_in(seen: list[Any]) -> int:
    """How many blocks the calls were given: what threads do at the same time is one call."""
    return sum(len(arguments[1]) for arguments in seen)


def failing(error: BaseException) -> Callable[[Work], Work]:
    def fail(*_: Any) -> Any:
        raise error

    return lambda _: fail


def _wrong_bit(function: Work) -> Work:
    def assemble(*arguments: Any) -> Any:
        payload, sizes = function(*arguments)
        payload[payload.numel() // 2] ^= 1
        return payload, sizes

    return assemble


def _wrong_sizes(function: Work) -> Work:
    def assemble(*arguments: Any) -> Any:
        payload, ((first, *rest),) = function(*arguments)
        return payload, [(first + 2, *rest[:-1], rest[-1] - 2)]

    return assemble


def _wrong_value(function: Work) -> Work:
    def decode(*arguments: Any) -> Any:
        status = function(*arguments)
        arguments[-1][0][-1][1].view(torch.int16)[-1, -1, -1] ^= 1
        return status

    return decode


def _sound_is_damaged(function: Work) -> Work:
    return lambda *arguments: function(*arguments) + 1


WRONG: list[tuple[str, Callable[[Work], Work]]] = [
    ("assemble", _wrong_bit),
    ("assemble", _wrong_sizes),
    ("assemble", failing(RuntimeError("no compiler"))),
    ("decode_blocks", _wrong_value),
    ("decode_blocks", _sound_is_damaged),
    ("load", failing(ImportError("no driver"))),
    ("load", failing(torch.OutOfMemoryError("full"))),
]


def coding() -> None:
    """The CPU's bytes, whatever is given, and what it decodes; at full length, after a trial of the full length."""
    if AT_LENGTH:
        predict_blocks.TRIAL_TOKENS = FULL
    codec = PredictiveCodec(MODEL)
    assert codec.codes_on(CPU, "bfloat16")
    longest = [case("predicted", 17, 4000)] if AT_LENGTH else []
    for info, kv in (case(), *longest, case("special", 5), case("alike", 1, MODEL.positions - 1)):
        expected = right(info, kv)
        with calls("encode_all") as seen:
            assert coded(codec, info, posing(info.layout, kv)) == expected
        assert len(seen) == 1
        payload, sizes = expected
        if mode_of(memoryview(payload), sizes) != MODE:
            assert same_kv(decoded(codec, info, payload, sizes), kv)
            continue
        assert codec.encode(info, posing(info.layout, kv), memoryview(bytearray(len(payload) - 1))) is None
        assert codec.encode(info, posing(info.layout, kv), memoryview(bytearray(len(payload)))) == sizes
        with calls("decode_from") as seen:
            for wanted in {1, info.count}:
                room = random_kv(info.count + 9, info.layout, seed=4)
                codec.decode(info, memoryview(payload), sizes, posing(info.layout, room).narrow(4, wanted))
                assert same_kv([(k[:, 4 : 4 + wanted], v[:, 4 : 4 + wanted]) for k, v in room], kv, wanted)
            with pytest.raises(CodecError):
                decoded(codec, info, payload[:-2] + b"ab", sizes)
            assert len(seen) == len({1, info.count}) + 1
    modes = [mode_of(memoryview(payload), sizes) for payload, sizes in (right(*case()), right(*case("random")))]
    assert modes[0] == MODE != modes[1]


def refusing() -> None:
    """What cannot be predicted is coded as the CPU does it, and stays no reason to leave the device."""
    codec = PredictiveCodec(MODEL)
    info, kv = case("random")
    other = replace(MODEL.layout, rope="none")
    for given in (info, replace(info, start=MODEL.positions), replace(info, layout=other)):
        found = coded(codec, given, posing(given.layout, kv))
        assert found == right(given, kv)
        assert mode_of(memoryview(found[0]), found[1]) != MODE
        assert same_kv(decoded(codec, given, *found), kv)
    assert found == _plain(given, kv)
    assert codes_on_device(codec, posing(info.layout, kv))
    assert not codec._exact.codes_blocks_like(posing(other, kv))
    assert not codes_on_device(codec, KVView.of_layers(info.layout, kv))
    assert not codes_on_device(codec, posing(info.layout, [(k, v.to("meta")) for k, v in kv]))
    apart = [tuple(torch.stack([t, t], 3)[..., 0] for t in pair) for pair in kv]
    payload, sizes = right(*case())
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode(case()[0], memoryview(payload), sizes, posing(info.layout, apart))
    assert codec.codes_on(CPU, "bfloat16")


def _plain(info: BlockInfo, kv: Layers) -> tuple[bytes, tuple[int, ...]]:
    out = memoryview(bytearray(EntropyCodec().bound(info)))
    sizes = EntropyCodec().encode(info, KVView.of_layers(info.layout, kv), out)
    assert sizes is not None
    return bytes(out[: sum(sizes)]), sizes


def trial() -> None:
    """A device that does anything else than the CPU is not used, and is not asked again."""
    info, kv = case()
    expected = right(info, kv)
    for name, make in WRONG:
        codec = PredictiveCodec(MODEL)
        with changed(name, make):
            assert not codes_on_device(codec, posing(info.layout, kv)), (name, make)
        with calls("load") as loaded, calls("encode_all") as written, calls("decode_from") as read:
            assert coded(codec, info, posing(info.layout, kv)) == expected
            assert same_kv(decoded(codec, info, *expected), kv)
            assert not codec.codes_on(CPU, "bfloat16")
        assert (loaded, written, read) == ([], [], [])
    os.environ["TRITON_INTERPRET"] = "0"
    assert not PredictiveCodec(MODEL).codes_on(CPU, "bfloat16")
    os.environ["TRITON_INTERPRET"] = "1"
    assert PredictiveCodec(MODEL).codes_on(CPU, "bfloat16")


def sample() -> None:
    """What the trial codes has most symbols, escapes, raw bits of all kinds, and offsets that follow the rows."""
    predict_blocks.TRIAL_TOKENS = FULL
    for model in (MODEL, model_of([(1, 10, 7)] * 4, False, 3), model_of([(2, 16, 24)] * 3, True, 4, 0.3)):
        info, tensors = predict_blocks.sample(model)
        again, same = predict_blocks.sample(model)
        assert np.array_equal(info.tokens, again.tokens)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(tensors, same, strict=True))
        assert info.count == 64
        assert 0 <= info.start <= model.positions - 64
        assert (info.tokens < len(model.token_kv)).any()
        assert (info.tokens >= len(model.token_kv)).any()
        view = KVView.of_layers(model.layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
        found = _predict.residuals(native(model), info.tokens.astype(np.int64), info.start, view.rows)
        assert found is not None
        symbols = np.concatenate([of.ravel() for of, _, _ in found])
        assert 0.01 < (symbols == 192).mean() < 0.6
        assert len(np.unique(symbols)) > 100
        assert len(np.unique(np.concatenate([of.ravel() for _, of, _ in found]))) > 20
        assert sum(len(np.unique(offsets)) > 3 for _, _, offsets in found) >= len(found) // 2


def once() -> None:
    """Threads that come at once share one trial and one model; their blocks may be coded in one call."""
    codec, (info, kv) = PredictiveCodec(MODEL), case()
    expected, begin = right(info, kv), threading.Barrier(4)

    def work(_: int) -> bool:
        begin.wait(HANGS_S)
        found = coded(codec, info, posing(info.layout, kv))
        return found == expected and same_kv(decoded(codec, info, *found), kv)

    with calls("load") as loaded, calls("encode_all") as written, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert (len(loaded), blocks_in(written)) == (1, 5)


def waits() -> None:
    """Nothing waits for the device while the lock on launches is held."""
    info, kv = case()
    model, fetch = predict_blocks.load(MODEL, CPU), predict_layers.fetch_arrays
    held: list[bool] = []
    there: list[torch.Tensor] = []  # what was on the device when the lock was held
    known: set[int] = set()
    kept: list[Any] = []  # else their addresses would be those of others

    def fetching(*tensors: torch.Tensor) -> Any:
        held.append(LAUNCH.locked())
        if held[-1]:
            there.extend(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in known)
            return fetch(*tensors)
        arrays = fetch(*tensors)
        kept.extend(arrays)
        known.update(torch.from_numpy(array).untyped_storage().data_ptr() for array in arrays)
        return arrays

    expected = right(info, kv)
    out = memoryview(bytearray(len(expected[0])))
    predict_layers.fetch_arrays = fetching  # type: ignore[assignment]
    with changed("fetch_arrays", lambda _: fetching):
        assert predict_blocks.encode_into(model, info, posing(info.layout, kv), out, 1 << 40) == expected[1]
    assert (held, there) == ([False, True], [])
    assert out == expected[0]
    held.clear()
    with changed("_FetchedRun", lambda _: _LateRun):  # would be seen
        assert predict_blocks.encode_into(model, info, posing(info.layout, kv), out, 1 << 40) == expected[1]
    assert held == [True]
    assert len(there) == 6
    predict_layers.fetch_arrays = fetch


class _LateRun(Run):
    def fetch(self, streams: Encoded) -> Encoded:
        return streams


def failures() -> None:
    """A device that fails after its trial is left; one without memory for the moment says so, and is asked again."""
    (info, kv), full = case(), torch.OutOfMemoryError("full")
    expected = right(info, kv)
    view = posing(info.layout, kv)
    for name, work in (
        ("encode_all", lambda codec: coded(codec, info, view) == expected),
        ("decode_from", lambda codec: same_kv(decoded(codec, info, *expected), kv)),
    ):
        codec = PredictiveCodec(MODEL)
        assert codec.codes_on(CPU, "bfloat16")
        with changed(name, failing(full)), pytest.raises(torch.OutOfMemoryError):
            work(codec)
        with calls(name) as seen:
            assert work(codec)
        assert len(seen) == 1
        with changed(name, failing(RuntimeError("launch failed"))):
            assert work(codec)
        assert not codes_on_device(codec, view)
        with calls(name) as seen:
            assert work(codec)
        assert not seen


# ---- the store -------------------------------------------------------------------------------------------------------

IDS = np.random.default_rng(1).integers(0, VOCABULARY, 10).astype(np.uint32)


@contextmanager
def opened(host: str = "") -> Iterator[KVStore]:
    """A store of predicted blocks, in its host tier, or else on disk."""
    layout, arrays = arrays_of(SHAPES, True, 12)
    none = TierConfig(0)
    tiers = {"host": TierConfig(1 * MIB, host) if host else none, "disk": none if host else TierConfig(1 * MIB, "auto")}
    with tempfile.TemporaryDirectory() as path:
        Profile.new(identity(layout), {"lossless": arrays}).save(Path(path, "made"))
        config = StoreConfig(
            device=none, **tiers, block_tokens=4, segment_bytes=64 * KIB, threads=2, profile=Path(path, "made")
        )
        with KVStore(Path(path, "store"), identity(layout), config) as store:
            yield store


def put(store: KVStore) -> Layers:
    tensors = view_of(MODEL, block_of(MODEL, "predicted", IDS, 0, 3)).tensors()
    kv = list(zip(tensors[::2], tensors[1::2], strict=True))
    store.put(IDS, kv)
    store.flush()
    return kv


def comes_back(store: KVStore, kv: Layers, tier: str) -> bool:
    """As a result on the device gets it."""
    room = random_kv(len(IDS), MODEL.layout, seed=4)
    reads = store._lookup.reads(store._digest(b""), IDS)
    return store._engine.getter.fetcher.fetch(reads, posing(MODEL.layout, room)) == (3, {tier: 10}) and same_kv(
        room, kv
    )


def without_profile(store: KVStore) -> Placement:
    """As of a store that has other codecs and does not know which profile the records need."""
    profiles = Profiles(FileSystem(), None, store.identity, store.metrics, None)
    return replace(store._engine.getter.placement, codecs=TierCodecs(RawCodec(), RawCodec()), profiles=profiles)


def decodes(store: KVStore, placement: Placement | None = None) -> bool:
    reads = store._lookup.reads(store._digest(b""), IDS)
    try:
        return (placement or store._engine.getter.placement).all_decode(reads, CPU)
    finally:
        store._engine.getter.fetcher.fetch(reads, None)  # releases them


def counted(store: KVStore) -> float:
    return float(store.stats()["counters"].get("fallback_device_codec", 0))


def stored() -> None:
    planner.KVView = SimpleNamespace(of_layers=posing)  # type: ignore[misc,assignment]
    for tier in ("host", "disk"):
        with opened("predictive" if tier == "host" else "") as store:
            with calls("encode_all") as written:
                kv = put(store)
            assert blocks_in(written) == 3 + 1  # and the trial
            with calls("decode_from") as read:
                assert decodes(store)
                assert comes_back(store, kv, tier)
            assert blocks_in(read) == 3  # by the same codec, which was tried before
            assert not decodes(store, without_profile(store))
            assert counted(store) == 0
            assert "fallback_raw_chunks" not in store.stats()["counters"]


def counting() -> None:
    """Whatever the CPU does in a device's place is counted, block by block, and is as good."""
    planner.KVView = SimpleNamespace(of_layers=posing)  # type: ignore[misc,assignment]
    for name, make in (WRONG[0], WRONG[3]) if AT_LENGTH else WRONG[3:4]:
        with opened() as store, changed(name, make):
            kv = put(store)
            assert counted(store) == 3
            assert not decodes(store)
            assert counted(store) == 6
            assert comes_back(store, kv, "disk")
            assert counted(store) == 9
    for error in (RuntimeError("launch failed"), torch.OutOfMemoryError("full")):
        with opened() as store:
            kv = put(store)
            assert comes_back(store, kv, "disk")
            assert counted(store) == 0
            with changed("decode_from", failing(error)):
                assert comes_back(store, kv, "disk")
            assert counted(store) == 3
        with opened() as store:
            codec = store._engine.getter.placement.profiles.encoder("predictive")
            assert isinstance(codec, PredictiveCodec)
            assert codec.codes_on(CPU, "bfloat16")
            with changed("encode_all", failing(error)):
                kv = put(store)
            assert counted(store) == 3
            assert codec.codes_on(CPU, "bfloat16") == isinstance(error, torch.OutOfMemoryError)
            assert comes_back(store, kv, "disk")


if __name__ == "__main__":
    # What is scaled beyond all numbers is clamped after that.
    with np.errstate(over="ignore"):
        kernelgroups.run(
            {f.__name__: f for f in (coding, refusing, trial, sample, once, waits, failures, stored, counting)}
        )
