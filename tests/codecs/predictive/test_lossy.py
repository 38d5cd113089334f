"""The lossy mode of the predictive codec: what it loses is what it says, what it cannot predict it keeps exactly, and
hostile bytes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from profilecases import lossy_arrays

from kvstore import KVLayout, LayerLayout, ModelIdentity
from kvstore.calibration.lossy.tables import laplace
from kvstore.codecs import BlockInfo, KVView, Profile, codec_by_name
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.lossy_model import CLASSES, ESCAPE, LARGEST, LossyModel
from kvstore.codecs.predictive.lossy_quantiser import Steps, choose, log2_sixteenths, scale_at
from kvstore.codecs.predictive.lossy_reference import HEADER, MODE, Block, decode_blocks, encode_blocks, header
from kvstore.codecs.predictive.lossy_rows import Engine, from_bits
from kvstore.codecs.predictive.model import CLASSES as EXACT_CLASSES
from kvstore.codecs.predictive.model import SYMBOLS as EXACT_SYMBOLS
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.rans.coder import quantise
from kvstore.core.layout import SINKS
from kvstore.errors import CodecError, ProfileError

ROPE = '{"rope_theta": 10000.0, "rope_type": "default"}'
LAYOUT = KVLayout((LayerLayout(2, 8, 8),) * 4, "bfloat16", ROPE)
UNEQUAL = KVLayout((LayerLayout(2, 8, 4), LayerLayout(1, 8, 12), LayerLayout(3, 8, 2)), "bfloat16", "none")
VOCABULARY = 50
Arrays = dict[str, Any]


def base_arrays(layout: KVLayout) -> Arrays:
    rng, rope = np.random.default_rng(0), layout.rope != "none"
    first = layout.layers[0]
    width = first.heads * (first.key_dim + first.value_dim)
    counts = np.ones((2 * EXACT_CLASSES, EXACT_SYMBOLS), np.int64)
    arrays: Arrays = {
        "token_kv": rng.integers(-127, 128, (VOCABULARY, width)).astype(np.int8),
        "freqs": quantise(counts, 12, floor=True),
    }
    if rope:
        half = first.key_dim // 2
        for name, positions in (("rope_fine", np.arange(128)), ("rope_coarse", 128 * np.arange(8))):
            angle = positions[:, None] * 10000.0 ** -(np.arange(half) / half)
            arrays[name] = np.rint(16384 * np.stack([np.cos(angle), np.sin(angle)])).astype(np.int16)
    for number, shape in enumerate(layout.layers):
        before = sum(x.heads * (x.key_dim + x.value_dim) for x in layout.layers[max(0, number - 2) : number])
        for which, width in enumerate((shape.heads * shape.key_dim, shape.heads * shape.value_dim)):
            prefix, turned = f"{number}.{'kv'[which]}.", rope and not which
            inputs = before + (shape.heads * shape.key_dim if which else 0)
            arrays[prefix + "in_scale"] = np.full(width, 30 * 2.0**-22 if turned else 30, np.float32)
            arrays[prefix + "out_scale"] = np.full(width, 256e-5 if turned else 1e-5, np.float32)
            arrays[prefix + "scale"] = np.zeros(width, np.int16)
            arrays[prefix + "bias"] = rng.integers(-100, 100, width).astype(np.int32)
            arrays[prefix + "adapt"] = np.array([100, 50, -10], np.int32)
            if turned:
                arrays[prefix + "fix"] = np.full(width, 8, np.int8)
            if number:
                arrays[prefix + "weight"] = rng.integers(-20, 20, (inputs, width)).astype(np.int8)
    return arrays


def model_of(layout: KVLayout) -> LossyModel:
    base = PredictiveModel.from_arrays(layout, base_arrays(layout))
    return LossyModel.from_arrays(base, lossy_arrays(base, 1))


@pytest.fixture(scope="module", params=[LAYOUT, UNEQUAL], ids=["rope", "unequal"])
def model(request: pytest.FixtureRequest) -> LossyModel:
    return model_of(request.param)


@pytest.fixture(scope="module")
def engine(model: LossyModel) -> Engine:
    return Engine(model)


def lossy_codec(model: LossyModel, steps: tuple[float, float]) -> PredictiveCodec:
    return PredictiveCodec(model.base, model, steps)


def layers_of(model: LossyModel, count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values, `[heads, count, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(x.heads, count, dim, generator=generator).bfloat16() for dim in (x.key_dim, x.value_dim))  # type: ignore[misc]
        for x in model.layout.layers
    ]


def info_of(model: LossyModel, count: int, start: int = 0) -> BlockInfo:
    return BlockInfo(model.layout, (np.arange(count) * 7 % (VOCABULARY + 3)).astype(np.uint32), start)


def coded(codec: PredictiveCodec, info: BlockInfo, layers: Any) -> tuple[memoryview, tuple[int, ...]]:
    memory = memoryview(bytearray(codec.bound(info)))
    sizes = codec.encode(info, KVView.of_layers(info.layout, layers), memory)
    assert sizes is not None
    return memory[: sum(sizes)].toreadonly(), sizes


def decoded(codec: PredictiveCodec, info: BlockInfo, payload: Any, sizes: Any, count: int | None = None) -> Any:
    count = info.count if count is None else count
    layers = [
        tuple(torch.full((x.heads, count, dim), 7.0).bfloat16() for dim in (x.key_dim, x.value_dim))
        for x in info.layout.layers
    ]
    codec.decode(info, payload, sizes, KVView.of_layers(info.layout, layers))  # type: ignore[arg-type]
    return layers


def largest_error(layers: Any, found: Any) -> float:
    return max(
        (a.float() - b.float()).abs().max().item()
        for pair, other in zip(layers, found, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


@pytest.mark.parametrize(("count", "start"), [(64, 0), (1, 0), (3, 0), (5, 2), (17, 4), (64, 900)])
def test_error_is_what_the_header_says(model: LossyModel, count: int, start: int) -> None:
    codec, info = lossy_codec(model, (0.3, 0.3)), info_of(model, count, start)
    layers = layers_of(model, count)
    payload, sizes = coded(codec, info, layers)
    found = decoded(codec, info, payload, sizes)
    steps, exact, (_, _, bound) = header(payload)
    assert (steps.k, steps.v) == pytest.approx((0.3, 0.3))
    assert exact == max(0, min(count, SINKS - start))
    # What an error is found from is itself rounded.
    assert largest_error(layers, found) == pytest.approx(bound, abs=1e-2)
    assert bound < 6
    assert codec.error_bound(payload, sizes) == bound
    assert codec.fallbacks(payload, sizes) == 0


def test_sinks_are_exact_and_others_are_not(model: LossyModel) -> None:
    codec, info, layers = lossy_codec(model, (0.3, 0.3)), info_of(model, 20), layers_of(model, 20)
    found = decoded(codec, info, *coded(codec, info, layers))
    for pair, other in zip(layers, found, strict=True):
        for a, b in zip(pair, other, strict=True):
            assert torch.equal(a[:, :SINKS], b[:, :SINKS])
            assert not torch.equal(a[:, SINKS:], b[:, SINKS:])


def test_smaller_steps_lose_less_and_take_more(model: LossyModel) -> None:
    info, layers = info_of(model, 64, 8), layers_of(model, 64)
    sizes, errors = [], []
    for step in (1.0, 0.3, 0.1, 0.03):
        codec = lossy_codec(model, (step, step))
        payload, each = coded(codec, info, layers)
        sizes.append(len(payload))
        pairs = zip(layers, decoded(codec, info, payload, each), strict=True)
        errors.append(sum((a.float() - b.float()).square().sum().item() for p, q in pairs for a, b in zip(p, q)))  # noqa: B905
        k, v = header(payload)[2][:2]
        assert 0 < k < step**2
        assert 0 < v < step**2
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 50


def test_part_of_a_block_can_be_decoded(model: LossyModel) -> None:
    codec, info = lossy_codec(model, (0.2, 0.2)), info_of(model, 33, 2)
    payload, sizes = coded(codec, info, layers_of(model, 33))
    whole, part = decoded(codec, info, payload, sizes), decoded(codec, info, payload, sizes, 7)
    for pair, other in zip(whole, part, strict=True):
        for a, b in zip(pair, other, strict=True):
            assert torch.equal(a[:, :7], b)


def test_blocks_are_coded_and_decoded_together_as_alone(engine: Engine) -> None:
    steps, blocks = Steps.of(0.2, 0.3), []
    for seed, (count, start) in enumerate([(20, 0), (33, 20), (7, 100)]):
        layers = [
            tuple(x.transpose(0, 1).flatten(1).view(torch.int16).long() & 0xFFFF for x in pair)
            for pair in layers_of(engine.model, count, seed)
        ]
        blocks.append(Block(torch.arange(count) % VOCABULARY, start, layers))  # type: ignore[arg-type]
    together = encode_blocks(engine, steps, blocks)
    alone = [encode_blocks(engine, steps, [block])[0] for block in blocks]
    asked = [(block.tokens, block.start) for block in blocks]
    once = decode_blocks(engine, asked, together)
    for block, at, sections, single, found in zip(blocks, asked, together, alone, once, strict=True):
        # Sums may be rounded otherwise in another shape, and then a symbol may be another.
        assert abs(sum(map(len, sections)) - sum(map(len, single))) < 20
        for pair, other in zip(found, decode_blocks(engine, [at], [single])[0], strict=True):
            for a, b in zip(pair, other, strict=True):
                assert ((from_bits(a) - from_bits(b)).abs() > 1e-2).float().mean() < 0.02
        assert len(found) == len(block.layers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_kept_exactly_and_counted(model: LossyModel, value: float) -> None:
    codec, info, layers = lossy_codec(model, (0.3, 0.3)), info_of(model, 16, 8), layers_of(model, 16)
    layers[1][1][0, 3, 1] = value
    payload, sizes = coded(codec, info, layers)
    found = decoded(codec, info, payload, sizes)
    assert codec.fallbacks(payload, sizes) == len(sizes)
    for pair, other in zip(layers, found, strict=True):
        for a, b in zip(pair, other, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_positions_beyond_the_tables_are_kept_exactly() -> None:
    model = model_of(LAYOUT)
    last = model.base.positions - 16
    codec, layers = lossy_codec(model, (0.3, 0.3)), layers_of(model, 16)
    for start, kept in ((last, False), (last + 1, True)):
        payload, sizes = coded(codec, info_of(model, 16, start), layers)
        assert (codec.fallbacks(payload, sizes) > 0) == kept
        assert (largest_error(layers, decoded(codec, info_of(model, 16, start), payload, sizes)) == 0) == kept


def test_outliers_are_escaped(model: LossyModel) -> None:
    codec, info, layers = lossy_codec(model, (0.05, 0.05)), info_of(model, 16, 8), layers_of(model, 16)
    layers[1][0][0, 3, 1] = 300.0
    payload, sizes = coded(codec, info, layers)
    found = decoded(codec, info, payload, sizes)
    assert (found[1][0][0, 3, 1].float() - 300).abs() < 3
    assert header(payload)[2][2] < 6


def test_too_short_a_buffer_is_told(model: LossyModel) -> None:
    codec, info, layers = lossy_codec(model, (0.3, 0.3)), info_of(model, 16), layers_of(model, 16)
    size = len(coded(codec, info, layers)[0])
    view = KVView.of_layers(model.layout, layers)
    assert codec.encode(info, view, memoryview(bytearray(size - 1))) is None
    assert codec.encode(info, view, memoryview(bytearray(size))) is not None


def test_usual_size_is_by_the_ladder(model: LossyModel) -> None:
    info = info_of(model, 64, 8)
    sizes = [lossy_codec(model, model.steps_for(bits=bits)).usual(info) for bits in (1.0, 2.0, 3.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] <= lossy_codec(model, (0.1, 0.2)).bound(info)


# -- hostile bytes -----------------------------------------------------------------------------------------------------


def test_damage_is_an_error_or_other_values_never_a_crash(model: LossyModel) -> None:
    codec, info = lossy_codec(model, (0.1, 0.1)), info_of(model, 9)
    payload, sizes = coded(codec, info, layers_of(model, 9))
    rng, refused = np.random.default_rng(5), 0
    for _ in range(150):
        damaged = bytearray(payload)
        for at in rng.integers(0, len(damaged), rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        try:
            decoded(codec, info, memoryview(damaged), sizes)
        except CodecError:
            refused += 1
    assert refused > 30


def test_sections_of_other_lengths_are_refused(model: LossyModel) -> None:
    codec, info = lossy_codec(model, (0.1, 0.1)), info_of(model, 9)
    payload, sizes = coded(codec, info, layers_of(model, 9))
    for layer, cut in ((0, sizes[0]), (0, 3), (1, sizes[1]), (len(sizes) - 1, 2)):
        end = sum(sizes[: layer + 1])
        shorter = memoryview(bytes(payload[: end - cut]) + bytes(payload[end:]))
        with pytest.raises(CodecError):
            decoded(codec, info, shorter, [s - cut * (i == layer) for i, s in enumerate(sizes)])


@pytest.mark.parametrize(
    ("field", "value"), [(0, 6), (1, 10), (2, 401), (3, -401), (4, 0.0), (5, float("nan")), (5, 1e30)]
)
def test_headers_that_cannot_be_are_refused(model: LossyModel, field: int, value: float) -> None:
    codec, info = lossy_codec(model, (0.1, 0.1)), info_of(model, 9)
    payload, sizes = coded(codec, info, layers_of(model, 9))
    fields = list(HEADER.unpack_from(payload))
    assert fields[0] == MODE
    fields[field] = value
    with pytest.raises(CodecError):
        decoded(codec, info, memoryview(HEADER.pack(*fields) + bytes(payload[HEADER.size :])), sizes)


# -- the model ---------------------------------------------------------------------------------------------------------


def _set(name: str, index: Any, value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][index] = value

    return change


def _replace(name: str, value: Any) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("levels", (1, 0), -20),
        _replace("levels", np.zeros((0, 2), np.int16)),
        _set("uses", (1, 0), 0),
        _set("uses", (1, 0), 1 << 5),
        _set("uses", (0, 0), 1),
        _set("freqs", (0, LARGEST), 7),
        _set("freqs", (3, 0), 1),
        _set("row_freqs", (0, 1), 0),
        _set("1.k.focus", 3, np.nan),
        _set("centroids", (0, 1), np.nan),
        _set("centroids", (0, 1), -1),
        _set("expect", (0, 0), 0),
        _set("ladder", (1, 0), 0.05),
        _set("ladder", (1, 3), np.inf),
        _set("2.k.component", 0, 0),
        _set("2.k.unit", 0, np.inf),
        _set("2.v.scale", (0, 0), 401),
        _set("2.v.adapt", 0, 5000),
        _set("2.v.bias", 0, 1 << 29),
        _set("2.v.weight", (0, 0), -128),
        _replace("2.k.weight", np.zeros((3, 3), np.int8)),
        _replace("2.k.basis", np.zeros((16, 16), np.int16)),
        lambda arrays: arrays.pop("1.v.out_scale"),
    ],
)
def test_arrays_that_cannot_be_are_refused_by_name(change: Callable[[Arrays], Any]) -> None:
    base = PredictiveModel.from_arrays(LAYOUT, base_arrays(LAYOUT))
    arrays = lossy_arrays(base, 1)
    LossyModel.from_arrays(base, arrays)
    change(arrays)
    with pytest.raises(ProfileError, match="lossy/"):
        LossyModel.from_arrays(base, arrays)


def test_steps_follow_the_ladder() -> None:
    model = model_of(LAYOUT)
    assert model.steps_for(bits=3.0) == pytest.approx((0.1, 0.2))
    assert model.steps_for(bits=1.0) == pytest.approx((0.4, 0.8))
    assert model.steps_for(kl=0.03) == pytest.approx((0.4, 0.8))
    assert model.steps_for(bits=3.0**0.5) == pytest.approx((0.2, 0.4))
    for bad in ({"bits": 3.1}, {"bits": 0.9}, {"kl": 0.0019}, {"kl": 0.031}, {"bits": float("nan")}, {"kl": 0.0}, {}):
        with pytest.raises(ValueError, match="expected"):
            model.steps_for(**bad)


def test_a_name_says_bits_or_what_may_be_lost() -> None:
    base_values = base_arrays(LAYOUT)
    sections = {"lossless": base_values, "lossy": lossy_arrays(PredictiveModel.from_arrays(LAYOUT, base_values), 1)}
    profile = Profile.new(ModelIdentity("m", "1", "00", "", LAYOUT), sections)
    codecs = [codec_by_name(f"predictive@{quality}", profile) for quality in ("1", "kl0.03", "3")]
    model = model_of(LAYOUT)
    info, layers = info_of(model, 16), layers_of(model, 16)
    by_bits, by_kl, finer = (coded(codec, info, layers)[0] for codec in codecs)
    assert bytes(by_kl) == bytes(coded(lossy_codec(model, (0.4, 0.8)), info, layers)[0])
    assert bytes(by_bits) == bytes(coded(PredictiveCodec(model.base, model, (0.4, 0.8), bits=1.0), info, layers)[0])
    assert len(finer) > len(by_bits)
    for quality in ("0.9", "kl0.5"):
        with pytest.raises(ProfileError, match="expected"):
            codec_by_name(f"predictive@{quality}", profile)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf")])
def test_steps_that_cannot_be_are_refused(step: float) -> None:
    with pytest.raises(ValueError, match="steps"):
        lossy_codec(model_of(LAYOUT), (0.1, step))


def test_rows_that_are_worth_it_get_smaller_steps() -> None:
    """The same block with and without a focus on the rows whose first key is large."""
    base, count = PredictiveModel.from_arrays(UNEQUAL, base_arrays(UNEQUAL)), 32
    arrays = lossy_arrays(base, 1)
    errors = []
    for worth in (0.0, 1.0):
        for number, pair in enumerate(base.parts):
            for name in "kv":
                focus = np.zeros(sum(part.width for part in pair) + 1, np.float32)
                focus[0] = worth
                arrays[f"{number}.{name}.focus"] = focus
        model = LossyModel.from_arrays(base, arrays)
        layers, info = layers_of(model, count), info_of(model, count, 8)
        for k, _ in layers:
            k[0, :, 0] = torch.where(torch.arange(count) % 2 == 0, 3.0, 0.0)
        codec = lossy_codec(model, (0.4, 0.4))
        found = decoded(codec, info, *coded(codec, info, layers))
        error = (found[1][1].float() - layers[1][1].float()).square().mean((0, 2))
        errors.append((error[::2].mean().item(), error[1::2].mean().item()))
    assert errors[1][0] < errors[0][0] / 8
    assert errors[1][1] == pytest.approx(errors[0][1], rel=0.5)


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_scales_between_levels_are_interpolated() -> None:
    levels, scale = np.array([-8, 0, 4], np.int16), np.array([[0, 8], [8, 8], [10, 7]], np.int16)
    found = {q: scale_at(levels, scale, q).tolist() for q in (-20, -8, -4, 0, 2, 4, 9)}
    assert found == {-20: [0, 8], -8: [0, 8], -4: [4, 8], 0: [8, 8], 2: [9, 8], 4: [10, 7], 9: [10, 7]}


def test_logarithm_is_that_of_integers() -> None:
    v = torch.tensor([1, 2, 3, 4, 5, 1000, 2**20, 2**40])
    assert (log2_sixteenths(v) - 16 * torch.log2(v.double())).abs().max() <= 2.5
    assert log2_sixteenths(torch.tensor([1, 2, 1 << 40])).tolist() == [0, 16, 640]


def test_choice_is_between_error_and_price(engine: Engine) -> None:
    """A rare symbol needs a larger number than one that is often; nothing is rounded away from where it is."""
    ratio = torch.arange(0, 12, 0.01)[:, None]
    smallest = []
    for number in (8, 24, 40):
        magnitudes, escaped = choose(engine.tables, ratio, torch.full(ratio.shape, number), 0)
        assert ((magnitudes - ratio).abs() <= (1.0 if number >= 24 else 4.0)).all()
        assert (magnitudes.diff(dim=0) >= 0).all()
        smallest.append(ratio[magnitudes > 0].min().item())
        assert not escaped[ratio < 1].any()
    assert smallest == sorted(smallest, reverse=True)
    assert smallest[0] > smallest[-1] + 0.2
    nothing, none = choose(engine.tables, ratio, torch.full(ratio.shape, -1), 0)
    assert not nothing.any()
    assert not none.any()


def test_tables_have_every_magnitude_where_it_may_come_up() -> None:
    freqs = laplace()["freqs"]
    assert (freqs.sum(1, dtype=np.int64) == 4096).all()
    assert (freqs[[CLASSES - 1, -1]] > 0).all()
    assert freqs[0, LARGEST] + freqs[0, ESCAPE] == 4096
