"""Keys of heads that are rotated in part: how codecs order them, and that nothing is lost by it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.codecs import BlockInfo, KVView
from kvstore.codecs.delta import DonorRows
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.pairs import buffer, from_pairs, in_pairs, order_of
from kvstore.core.layout import KVLayout, LayerLayout
from kvstore.core.rope import pair_order, rotate

FACTS: dict[str, Any] = {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}
LAYOUT = KVLayout((LayerLayout(3, 12, 5), LayerLayout(2, 12, 12)), "bfloat16", json.dumps(FACTS))
STILL = replace(LAYOUT, rope=json.dumps(FACTS | {"pairs": "other"}))  # keys that nobody may move


def layers(tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(x.heads, tokens, dim) for x in LAYOUT.layers for dim in (x.key_dim, x.value_dim)]
    made = [torch.randn(shape, generator=rng).bfloat16() for shape in shapes]
    return list(zip(made[::2], made[1::2], strict=True))


def same(left: Any, right: Any, rows: int | None = None) -> bool:
    return all(
        torch.equal(a[:, :rows], b[:, :rows])
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("part", [0.17, 0.34, 0.5, 0.67, 0.84])
def test_a_view_comes_back_from_the_order_of_pairs(part: float) -> None:
    layout = replace(LAYOUT, rope=json.dumps(FACTS | {"partial_rotary_factor": part}))
    order = order_of(layout)
    assert order is not None
    assert (order == pair_order(layout.rope, 12)).all()
    given = layers(7)
    strided = [(k.transpose(0, 1).contiguous().transpose(0, 1), v) for k, v in given]
    memory = np.zeros(7 * layout.bytes_per_token, np.uint8)
    packed = KVView.packed(layout, 7, memory.ctypes.data, memory)
    KVView.of_layers(layout, given).copy_to(packed)
    for view in (KVView.of_layers(layout, strided), packed):
        mixed = in_pairs(view.narrow(2, 4), order)
        read = [(torch.zeros_like(k[:, :4]), torch.zeros_like(v[:, :4])) for k, v in given]
        mixed.copy_to(KVView.of_layers(layout, read))
        assert same(read, [(k[:, 2:6, order], v[:, 2:6]) for k, v in given])
        out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in given]
        from_pairs(mixed, order, KVView.of_layers(layout, out).narrow(2, 4))
        assert same([(k[:, 2:6], v[:, 2:6]) for k, v in out], [(k[:, 2:6], v[:, 2:6]) for k, v in given])
        assert all(not x[:, :2].any() and not x[:, 6:].any() for pair in out for x in pair)
        assert buffer(view).nbytes == view.nbytes


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout.uniform(2, 2, 8),
        KVLayout.uniform(2, 2, 8, rope='{"rope_theta": 10.0}'),
        KVLayout.uniform(2, 2, 7, rope=LAYOUT.rope),
        KVLayout.uniform(2, 2, 8, rope="unknown"),
        KVLayout((LayerLayout(1, 8, 8), LayerLayout(1, 4, 4)), "bfloat16", LAYOUT.rope),
    ],
)
def test_other_keys_stay_as_they_are(layout: KVLayout) -> None:
    assert order_of(layout) is None


def moved(given: list[tuple[torch.Tensor, torch.Tensor]], shift: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A cache like `given`, its keys at other positions, and with some noise."""
    found = []
    for number, (k, v) in enumerate(given):
        rows = k.transpose(0, 1).flatten(1).float().numpy()
        turned = rotate(rows, LAYOUT.layers[number].heads, np.full(len(rows), shift), LAYOUT.rope, 1)
        keys = torch.from_numpy(turned).view(k.shape[1], k.shape[0], -1).transpose(0, 1)
        found.append(((keys * 1.01).bfloat16().contiguous(), (v.float() * 0.99).bfloat16()))
    return found


def coded(codec: DonorCodec, layout: KVLayout, shift: int, keep: int = 40) -> tuple[bytes, Any, Any]:
    """(payload, what was coded, what comes back): a block of 40 tokens, of which rows 4 to 36 have donors."""
    donor = layers(48, seed=1)
    block = moved([(k[:, 4:44], v[:, 4:44]) for k, v in donor], shift)
    info = BlockInfo(layout, np.arange(40, dtype=np.uint32), 5)
    span = Span(4, 32, 0, 8, shift)
    view, source = KVView.of_layers(layout, block), KVView.of_layers(layout, donor)
    room = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, view, [DonorRows.of(span, source)], room)
    assert sizes is not None
    payload = room[: sum(sizes)]
    back = [(torch.zeros_like(k[:, :keep]), torch.zeros_like(v[:, :keep])) for k, v in block]
    codec.decode(info, payload, sizes, [source], KVView.of_layers(layout, back))
    return bytes(payload), block, back


@pytest.mark.parametrize("keep", [40, 39, 11, 3])
def test_members_whose_keys_are_rotated_in_part_lose_nothing(keep: int) -> None:
    payload, block, back = coded(DonorCodec(EntropyCodec()), LAYOUT, 13, keep)
    assert same(back, block, keep)
    assert len(payload) < 0.65 * 40 * LAYOUT.bytes_per_token  # predicted, not only stored


def test_members_in_steps_are_near() -> None:
    _, block, back = coded(DonorCodec(EntropyCodec(), step=0.1), LAYOUT, 13)
    for pair, other in zip(block, back, strict=True):
        for want, got in zip(pair, other, strict=True):
            assert (want.float() - got.float()).square().mean() < 0.01 * want.float().square().mean()


def test_members_at_the_same_positions_are_the_bytes_that_they_always_were() -> None:
    """Those that were stored when no such keys could be moved are read as before."""
    codec = DonorCodec(EntropyCodec())
    payload, block, back = coded(codec, LAYOUT, 0)
    assert same(back, block)
    assert payload == coded(codec, STILL, 0)[0]
    with pytest.raises(ValueError, match="cannot be rotated"):
        coded(codec, STILL, 13)


def test_keys_that_are_used_as_they_come_rotate_in_part() -> None:
    given = layers(6)
    view = KVView.of_layers(LAYOUT, [(k.clone(), v.clone()) for k, v in given])
    rotate_keys(view, 13)
    for (k, v), want in zip([view.tensors()[:2], view.tensors()[2:]], moved(given, 13), strict=True):
        assert torch.allclose(k.float(), want[0].float() / 1.01, atol=0.05)
        assert torch.equal(v, given[0][1] if v.shape[-1] == 5 else given[1][1])
