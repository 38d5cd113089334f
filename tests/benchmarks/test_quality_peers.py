"""The methods that the quality benchmark has from papers: what they keep, and what they say it takes."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from benchmodules import load

from kvstore.core.layout import KVLayout

kvtc, planning = load("peers.quality.kvtc"), load("peers.quality.kvtc_plan")
cachegen, nvfp4 = load("peers.quality.cachegen"), load("peers.quality.nvfp4")
code_length = load("peers.quality.code_length")

LAYOUT = KVLayout.uniform(num_layers=2, heads=2, head_dim=16, rope='{"rope_theta": 10000.0, "rope_type": "default"}')
WIDTH = 64  # of keys, or values, of both layers


class Windows:
    """Caches that lie near a plane of eight dimensions, but for rotation."""

    layout, windows, length = LAYOUT, 8, 96

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        plane = torch.randn(2, 8, WIDTH, generator=made)
        self._rows = [
            [(torch.randn(self.length, 8, generator=made) @ plane[part]).numpy() for part in range(2)]
            for _ in range(self.windows)
        ]

    def pairs(self, window: int) -> Any:
        """As a model would hold them, from position 0."""
        return kvtc.pairs_of(LAYOUT, *self._rows[window], 0)

    def layer(self, layer: int, window: int) -> Any:
        return tuple(x.float().transpose(0, 1).flatten(1).numpy() for x in self.pairs(window)[layer])


DUMP = Windows()


def error(found: Any, exact: Any) -> float:
    """Of all squares, the share that is lost."""
    pairs = [(x.float(), y.float()) for a, b in zip(found, exact, strict=True) for x, y in zip(a, b, strict=True)]
    return float(sum((x - y).square().sum() for x, y in pairs) / sum(y.square().sum() for _, y in pairs))


def test_rows_of_all_layers_are_without_rotation_and_come_back() -> None:
    pairs = DUMP.pairs(3)
    keys, values = (kvtc.rows_of(LAYOUT, pairs, 0, part) for part in (0, 1))
    assert np.abs(keys - DUMP._rows[3][0]).max() < 0.1  # rounded to bf16, rotated
    assert error(kvtc.pairs_of(LAYOUT, keys, values, 0), pairs) < 1e-5


def test_kvtc_keeps_a_plane_in_few_bits_and_more_bits_keep_more() -> None:
    arrays = kvtc.fit(DUMP)
    given = [(k[:, 4:], v[:, 4:]) for k, v in DUMP.pairs(0)]
    lost, sizes = [], []
    for bits in (0.75, 1.5, 3):
        decoded, size = kvtc.Kvtc(arrays, LAYOUT, bits).code(torch.arange(92), given, 4)
        lost.append(error(decoded, given))
        sizes.append(8 * size / (2 * 92 * WIDTH))
    assert lost == sorted(lost, reverse=True)
    assert lost[1] < 0.01
    assert sizes == sorted(sizes)
    assert all(size < bits * 1.1 for size, bits in zip(sizes, (0.75, 1.5, 3), strict=True))


@pytest.mark.parametrize("budget", [0, 64, 160, 320, 700])
def test_the_plan_is_the_best_there_is(budget: int) -> None:
    made = np.random.default_rng(2)
    sample = (made.standard_normal((40, 64)) * np.geomspace(8, 0.1, 64)).astype(np.float32)
    errors = planning.errors_of(sample)
    energy = np.square(sample, dtype=np.float64).sum(0)
    found = planning.plan(errors, energy, budget)
    assert sum(group.bits for group in found) <= budget
    assert [group.start for group in found] == np.cumsum([0, *(group.size for group in found)])[: len(found)].tolist()

    def lost(groups: Any) -> float:
        end = sum(size for size, _ in groups)
        starts = np.cumsum([0, *(size for size, _ in groups)])[: len(groups)]
        return float(sum(errors[int(s), *group] for s, group in zip(starts, groups, strict=True)) + energy[end:].sum())

    kinds = [(16, kind) for kind in planning.BITS] + [(64, planning.INT2), (64, planning.INT4)]
    all_plans = (x for n in range(5) for x in itertools.product(kinds, repeat=n) if sum(size for size, _ in x) <= 64)
    affordable = (x for x in all_plans if sum(planning.Group(0, *g).bits for g in x) <= budget)
    assert lost([(g.size, g.kind) for g in found]) == pytest.approx(min(lost(x) for x in affordable), rel=1e-9)


@pytest.mark.parametrize("kind", planning.BITS)
def test_what_is_quantised_is_restored_within_half_a_step(kind: str) -> None:
    x = np.random.default_rng(3).standard_normal((50, 16)).astype(np.float32)
    x[0] = 2.0  # a group without spread
    found = np.abs(planning.restore(planning.quantise(x, kind), kind) - x)
    spread = x.max(1, keepdims=True) - x.min(1, keepdims=True)
    bound = {"int2": spread / 6, "int4": spread / 30, "fp8": np.abs(x) / 16 + 0.01, "float": np.abs(x) / 1024 + 1e-6}
    assert (found <= 1.01 * bound[kind] + 0.003).all()


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_packed_numbers_are_all_there(bits: int) -> None:
    values = np.random.default_rng(4).integers(0, 1 << bits, 24).astype(np.uint16 if bits == 16 else np.uint8)
    data = kvtc.packed(values, bits)
    assert len(data) == 24 * bits // 8
    assert kvtc.unpacked(data, bits).tolist() == values.tolist()
    odd = kvtc.packed(values[:5], bits)
    assert kvtc.unpacked(odd, bits)[:5].tolist() == values[:5].tolist()


def test_kvtc_takes_the_smaller_of_both_entropy_coders() -> None:
    coder = kvtc.Kvtc(kvtc.fit(DUMP), LAYOUT, 1.5)
    _, size = coder.code(torch.arange(92), [(k[:, 4:], v[:, 4:]) for k, v in DUMP.pairs(0)], 4)
    assert 0 < size == coder.taken_bytes <= coder.deflate_bytes


def test_code_lengths_are_those_of_the_tables() -> None:
    symbols = np.array([[0, 0, 0, 1], [2, 2, 2, 2]])
    tables = code_length.Tables.of(symbols, 3)
    shares = np.array([3.5, 3.5, 3.5, 1.5, 4.5, 4.5, 4.5, 4.5]) / 5.5
    assert tables.bits(symbols) == pytest.approx(-np.log2(shares).sum())
    noise = np.random.default_rng(5).integers(0, 4, (1, 4000)).astype(np.uint8)
    assert code_length.Tables.of(noise, 4).bits(noise) / 8 < len(zlib.compress(kvtc.packed(noise, 2), 9))


def test_cachegen_keeps_differences_within_half_a_step_and_finer_levels_take_more() -> None:
    arrays = cachegen.fit(DUMP)
    given = [(k[:, 4:], v[:, 4:]) for k, v in DUMP.pairs(1)]
    sizes = []
    for level in cachegen.LEVELS:
        decoded, size = cachegen.CacheGen(arrays, LAYOUT, level).code(torch.arange(92), given, 4)
        sizes.append(size)
        for layer, (found, exact) in enumerate(zip(decoded, given, strict=True)):
            for name, x, y in zip("kv", found, exact, strict=True):
                step = arrays[f"{layer}.{name}.deviation"].reshape(2, 1, 16) * cachegen.step_of(layer, 2) * level
                late = torch.arange(92) % cachegen.RUN != 0
                off = (x - y).float().abs()
                assert (off[:, late] <= torch.from_numpy(step) / 2 + 0.01 * y.float().abs().max()).all()
                assert off[:, ~late].max() <= y.float().abs().max() / 200  # anchors, in 8 bits
    assert sizes == sorted(sizes, reverse=True)


def test_nvfp4_is_exact_on_what_it_can_say_and_takes_four_and_a_half_bits() -> None:
    values = torch.tensor(nvfp4.VALUES)
    made = torch.Generator().manual_seed(6)
    x = (
        values[torch.randint(0, 8, (2, 32, 16), generator=made)]
        * torch.tensor([1.0, -1.0])[torch.randint(0, 2, (2, 32, 16), generator=made)]
    )
    x[..., 0] = 6.0  # so that the scale of every block is that of the values
    decoded, size = nvfp4.Nvfp4().coded(x)
    assert torch.allclose(decoded, x)
    assert size == x.numel() * 9 // 16 + 4
    noise = torch.randn(2, 64, 64, generator=made)
    lost = (nvfp4.Nvfp4().coded(noise)[0] - noise).square().mean().item()
    assert 0.005 < lost < 0.015  # of a Gaussian; 4-bit integers per 16 are at 0.011
