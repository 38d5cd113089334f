"""Blocks decoded layer after layer: the bits and the errors of those that are decoded whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import groupcases
import numpy as np
import pytest
import seeds
import torch
from codeccontract import empty
from damaged_layers import damaged
from donorblocks import apart, info_of, wholes
from donorblocks import encode as encode_member
from donorcases import case_of, model_of
from kvcases import random_kv, same_kv
from profilecases import ROPE, level_kv, predicted_kv, profile_of
from threadruns import run_together

from kvstore import KVLayout
from kvstore.codecs import BlockInfo, KVView, codec_by_name
from kvstore.codecs.base import CodedBlock
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.in_order import InOrder
from kvstore.codecs.pairs import from_pairs, in_pairs, order_of
from kvstore.codecs.predictive.codec import LOSSY_MODE, MODE, mode_of
from kvstore.codecs.raw import RawCodec
from kvstore.errors import CodecError

LAYERS = 5
LAYOUT = KVLayout.uniform(LAYERS, 2, 16, rope=ROPE)
COUNT, WANTED, AT = 40, 37, 3  # tokens of the block, those that are wanted, and where the target has them
SHAPES = [(2, 8, 8)] * LAYERS
PARTIAL = '{"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}'


@dataclass
class Coded:
    """A block that was coded, and how it is decoded. kept: what its donors stand in."""

    info: BlockInfo
    layers: list[bytes]
    in_order: Callable[[CodedBlock, KVView], InOrder | None]
    decode: Callable[[BlockInfo, memoryview, Sequence[int], KVView], None]
    kept: Any = None

    def block(self) -> CodedBlock:
        payload = memoryview(bytearray(b"".join(self.layers)))
        return CodedBlock(self.info, payload, [len(layer) for layer in self.layers], AT, WANTED)


def layers_of(payload: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = np.cumsum(sizes).tolist()
    return [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def plain_block(codec: Any, kv: Any, layout: KVLayout = LAYOUT) -> Coded:
    info = BlockInfo(layout, np.arange(COUNT, dtype=np.uint32), 7)
    out = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(layout, kv), out)
    return Coded(info, layers_of(bytes(out[: sum(sizes)]), sizes), codec.in_order, codec.decode)


def level(number: int) -> Coded:
    profile = profile_of(LAYOUT, "lossless", "levels")
    kv = level_kv(profile, number, np.arange(COUNT, dtype=np.uint32), 7)
    coded = plain_block(codec_by_name(f"predictive:{number}", profile), kv)
    assert mode_in(coded) == 20 + number
    return coded


def exact() -> Coded:
    profile = profile_of(LAYOUT, "lossless")
    coded = plain_block(codec_by_name("predictive", profile), predicted_kv(profile, np.arange(COUNT), 7))
    assert mode_in(coded) == MODE
    return coded


def not_predicted() -> Coded:
    codec = codec_by_name("predictive", profile_of(LAYOUT, "lossless", "levels"))
    coded = plain_block(codec, random_kv(COUNT, LAYOUT))
    assert mode_in(coded) not in (MODE, 21, 22, 23)
    return coded


def mode_in(coded: Coded) -> int:
    return mode_of(memoryview(b"".join(coded.layers)), [len(layer) for layer in coded.layers])


def member(propagated: bool = False, groups: bool = False, plain: Any = None) -> Coded:
    model = model_of(SHAPES, True, 5) if propagated else None
    differences = groupcases.model_of(SHAPES, True, 2, 5)
    codec = DonorCodec(plain or EntropyCodec(), model, groups=(lambda: differences) if groups else None)
    seeds_ = (apart(case_of(SHAPES, True, "near", COUNT, seed, model=model)) for seed in range(30))
    case = next(case for case in seeds_ if case.table.gaps(COUNT) and len(case.table.angles))
    found = encode_member(codec, case)
    assert found is not None
    donors, kept = wholes(case)
    return Coded(
        info_of(case),
        layers_of(*found),
        lambda block, out: codec.in_order(block, donors, out),
        lambda info, payload, sizes, out: codec.decode(info, payload, sizes, donors, out),
        kept,
    )


CASES: dict[str, Callable[[], Coded]] = {
    "level 1": lambda: level(1),
    "level 2": lambda: level(2),
    "level 3": lambda: level(3),
    "exact": exact,
    "not predicted": not_predicted,
    "donors": member,
    "donors, propagated": lambda: member(propagated=True),
    "donors, in groups": lambda: member(groups=True),
    "donors, raw between": lambda: member(plain=RawCodec()),
}


def target_of(coded: Coded) -> tuple[Any, KVView]:
    out = empty(coded.info.layout, AT + WANTED + 2, 0x55)
    return out, KVView.of_layers(coded.info.layout, out)


def whole(coded: Coded) -> Any:
    out, view = target_of(coded)
    block = coded.block()
    coded.decode(block.info, block.payload, block.layer_sizes, view.narrow(AT, WANTED))
    return out


def begun(coded: Coded, view: KVView) -> InOrder:
    found = coded.in_order(coded.block(), view)
    assert found is not None
    return found


@pytest.mark.parametrize("ends", [[1, 2, 3, 4, 5], [5], [2, 2, 1, 5], [0, 4, 5, 3]])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_whole_and_no_layer_comes_early(name: str, ends: list[int]) -> None:
    coded = CASES[name]()
    expected, (out, view) = whole(coded), target_of(coded)
    blocks, done = begun(coded, view), 0
    untouched = empty(coded.info.layout, AT + WANTED + 2, 0x55)
    for end in ends:
        blocks.until(end)
        done = max(done, end)
        assert same_kv(out[:done], expected[:done])
        assert same_kv(out[done:], untouched[done:])


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_as_of_the_whole_and_stays(name: str) -> None:
    coded, rng = CASES[name](), np.random.default_rng(seeds.nth(0))
    found = 0
    for turn in range(60):
        bad = replace(coded, layers=damaged(coded.layers, turn, rng, 6))
        expected, same = tried(whole, bad), tried(by_layers, bad)
        if isinstance(expected, str):
            found += 1
            assert isinstance(same, str)
            assert same == expected or name.startswith("donors")  # whose rows between spans come first or last
        else:
            assert same_kv(same, expected)
    assert found > 20


def tried(decode: Callable[[Coded], Any], coded: Coded) -> Any:
    """What it decodes, or what it says of the damage."""
    try:
        return decode(coded)
    except CodecError as error:
        return str(error)


def by_layers(coded: Coded) -> Any:
    """Decodes a layer at a time; an error comes again."""
    out, view = target_of(coded)
    blocks = begun(coded, view)
    for end in range(1, LAYERS + 1):
        try:
            blocks.until(end)
        except CodecError as error:
            for again in (end, LAYERS):
                with pytest.raises(CodecError):
                    blocks.until(again)
            raise error
    return out


@pytest.mark.parametrize("name", CASES)
def test_layers_before_a_damaged_one_are_right(name: str) -> None:
    coded = CASES[name]()
    layers = list(coded.layers)
    layers[3] = bytes(layer ^ (255 * (at >= len(layers[3]) - 40)) for at, layer in enumerate(layers[3]))
    expected, bad = whole(coded), replace(coded, layers=layers)
    out, view = target_of(bad)
    blocks = begun(bad, view)
    blocks.until(3)
    assert same_kv(out[:3], expected[:3])
    try:
        blocks.until(5)
    except CodecError:
        out, view = target_of(bad)
        blocks = begun(bad, view)
        with pytest.raises(CodecError):
            blocks.until(5)
        blocks.until(3)  # is right, whoever asks for more before
        assert same_kv(out[:3], expected[:3])
        return
    assert "raw" in name or name == "not predicted"  # whose bytes have no check of their own


@pytest.mark.parametrize("name", CASES)
def test_threads_may_ask_for_any_layers(name: str) -> None:
    coded = CASES[name]()
    expected, (out, view) = whole(coded), target_of(coded)
    blocks = begun(coded, view)
    run_together(*[lambda end=end: blocks.until(end) for end in (5, 1, 3, 4)])
    assert same_kv(out, expected)


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_and_written_is_kept(name: str) -> None:
    coded = CASES[name]()
    expected, (out, view) = whole(coded), target_of(coded)
    memory = weakref.ref(out[-1][1])
    blocks = begun(coded, view)
    del out, view
    gc.collect()
    last = memory()
    assert last is not None
    blocks.until(LAYERS)
    assert torch.equal(last.view(torch.int16), expected[-1][1].view(torch.int16))
    del last, blocks
    gc.collect()
    assert memory() is None


def test_layers_that_there_are_not_are_refused() -> None:
    coded = level(1)
    _, view = target_of(coded)
    with pytest.raises(ValueError, match="no such layers"):
        begun(coded, view).until(LAYERS + 1)


def test_blocks_that_are_only_decoded_whole_say_so() -> None:
    for coded in (partly_rotated(), lossy()):
        _, view = target_of(coded)
        assert coded.in_order(coded.block(), view) is None


def partly_rotated() -> Coded:
    layout = KVLayout.uniform(LAYERS, 2, 16, rope=PARTIAL)
    profile, order = profile_of(layout, "lossless", "levels"), order_of(layout)
    assert order is not None
    paired = KVView.of_layers(layout, level_kv(profile, 1, np.arange(COUNT, dtype=np.uint32), 7))
    kv = empty(layout, COUNT)
    from_pairs(in_pairs(paired, np.arange(16)), order, KVView.of_layers(layout, kv))
    coded = plain_block(codec_by_name("predictive:1", profile), kv, layout)
    assert mode_in(coded) == 21
    return coded


def lossy() -> Coded:
    profile = profile_of(LAYOUT, "lossless", "lossy")
    coded = plain_block(codec_by_name("predictive@2", profile), predicted_kv(profile, np.arange(COUNT), 7))
    assert mode_in(coded) == LOSSY_MODE
    return coded
