"""AQUA-KV's forms: that of the codec codes as the codec does, and each change of it is the one that its name says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from benchmodules import load

from kvstore import KVLayout
from kvstore.calibration.aqua.fit import fit
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.view import KVView

aqua, forms = load("published.aqua"), load("published.aqua_forms")
ROPE = '{"rope_theta": 10000.0, "rope_type": "default"}'
LAYOUT = KVLayout.uniform(num_layers=3, heads=2, head_dim=32, rope=ROPE)
TOKENS, WINDOWS = 96, 3


class Dump:
    """Caches in which each layer follows from the one before but for noise."""

    layout, windows, length = LAYOUT, WINDOWS, TOKENS

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        mixes = torch.randn(3, 2, 64, 64, generator=rng) / 8
        self.pairs = []
        for _ in range(WINDOWS):
            k, v = torch.randn(2, TOKENS, 64, generator=rng)
            layers = []
            for mix in mixes:
                layers.append(tuple(x.view(TOKENS, 2, 32).transpose(0, 1).bfloat16() for x in (self._turned(k), v)))
                noise = torch.randn(2, TOKENS, 64, generator=rng) / 4
                k, v = torch.tanh(k @ mix[0]) + noise[0], (k + v) @ mix[1] / 2 + noise[1]
            self.pairs.append(layers)

    def _turned(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(forms.rotate(keys.numpy(), 2, np.arange(TOKENS), ROPE, 1))

    def layer(self, layer: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.float().transpose(0, 1).flatten(1) for x in self.pairs[window][layer])
        return k, v


@cache
def dump() -> Dump:
    return Dump()


def lost(name: str) -> list[float]:
    """Mean square of what each layer's K and V lose, of a window."""
    given = dump().pairs[0]
    found = forms.Fitted(aqua.FORMS[name][0], dump()).code(given)
    pairs = [both for layers in zip(given, found, strict=True) for both in zip(*layers, strict=True)]
    return [(a.float() - b.float()).square().mean().item() for a, b in pairs]


@pytest.mark.parametrize("backbone", ["higgs", "quanto"])
def test_the_form_of_the_codec_codes_as_the_codec_does(backbone: str) -> None:
    fitted, predictors = forms.Fitted(forms.Form(backbone, 3), dump()), fit(dump(), 3, backbone)
    for (key, value), (k, v) in zip(fitted.maps[1:], predictors.weights, strict=True):
        assert np.array_equal(key.weights, k)
        assert np.array_equal(value.weights, v)
    codec, given = AquaCodec(predictors, 3, backbone), dump().pairs[0]
    info = BlockInfo(LAYOUT, np.arange(TOKENS, dtype=np.uint32), 0)
    out = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(LAYOUT, given), out)
    back = [(torch.empty_like(k), torch.empty_like(v)) for k, v in given]
    codec.decode(info, out[: sum(sizes)], sizes, KVView.of_layers(LAYOUT, back))
    for ours, theirs in zip(fitted.code(given), back, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a != b).float().mean() < 0.02  # sums in double and in single precision: a rounding now and then
            assert (a.float() - b.float()).square().mean() < 1e-3 * a.float().square().mean()
    headers = 4 * 3 + 4 + 4 * 2 * 2 * 64 * 3  # of layers, the fingerprint, and the first tokens
    coded = 8 * (sum(sizes) - headers) / ((TOKENS - 4) * 2 * 3 * 64)
    assert fitted.bits(TOKENS) == pytest.approx(coded)


def test_a_form_that_predicts_loses_less_and_each_part_of_it_counts() -> None:
    base, alone = lost("higgs/2bit"), lost("higgs-alone/2bit")
    no_keys, no_values, rank = (lost(f"higgs/2bit/{x}") for x in ("no-keys", "no-values", "reduced-rank"))
    assert sum(base) < 0.7 * sum(alone)
    assert sum(no_keys[2::2]) > 1.2 * sum(base[2::2])
    assert sum(no_values[3::2]) > 1.2 * sum(base[3::2])
    assert sum(base) < sum(rank) < sum(alone)
    assert sum(lost("higgs/2bit/mlp")) < 1.05 * sum(base)


def test_the_first_layer_and_the_first_tokens() -> None:
    assert lost("higgs/2bit/first-16")[:2] == [0, 0]
    assert lost("higgs/2bit/first-2")[0] > 2 * lost("higgs/2bit/first-3")[0] > 4 * lost("higgs/2bit")[0]
    given = dump().pairs[1]
    for name, count in (("higgs/2bit", 4), ("higgs/2bit/no-sinks", 0)):
        for (k, v), (a, b) in zip(given, forms.Fitted(aqua.FORMS[name][0], dump()).code(given), strict=True):
            same = ((k == a) & (v == b)).all(0).all(1)
            assert same.sum() == count
            assert same[:count].all()


def test_a_map_of_reduced_rank_has_that_rank() -> None:
    maps = forms.Fitted(forms.Form(kind="rank"), dump()).maps
    assert {np.linalg.matrix_rank(x.weights[:-1]) for pair in maps[1:] for x in pair} == {16}


def test_heavy_tokens_are_the_last_and_those_that_got_most() -> None:
    weights = torch.tensor([[9.0, 1, 7, 1, 1, 8, 0, 0], [1.0, 2, 3, 4, 9, 9, 9, 9]])
    keep = forms.heavy(weights, 0.5)
    assert keep.tolist() == [[0, 5, 6, 7], [4, 5, 6, 7]]
    k = torch.arange(16.0).view(2, 8, 1)
    assert aqua.taken((k, -k), keep)[0].flatten().tolist() == [0, 5, 6, 7, 12, 13, 14, 15]


def test_the_last_tokens_are_exact() -> None:
    tail = aqua.RECENT
    generator = torch.Generator().manual_seed(1)
    pairs = [tuple(torch.randn(2, 2, tail + 40, 32, generator=generator).bfloat16()) for _ in range(3)]
    found = aqua.with_recent(forms.Fitted(forms.Form(), dump()), pairs)
    for (k, v), (a, b) in zip(pairs, found, strict=True):
        assert torch.equal(k[:, -tail:], a[:, -tail:])
        assert torch.equal(v[:, -tail:], b[:, -tail:])
        assert not torch.equal(k[:, :-tail], a[:, :-tail])
