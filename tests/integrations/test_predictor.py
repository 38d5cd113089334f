"""Archives with a predictor: bit for bit the same cache from a coarser model's, or a miss that is counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny

from kvstore import KVStore, ModelIdentity
from kvstore.codecs.speculative.codec import SPECULATIVE, SpeculativeCodec
from kvstore.codecs.tokens.archive import Archive
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError
from kvstore.integrations.transformers import Predictor, archive, generate, restore, restore_session

IDS = torch.randint(1, VOCABULARY, (1, 150), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}


def _model(name: str = "llama") -> Any:
    return tiny(name).bfloat16()


@torch.no_grad()
def _cache(model: Any) -> Any:
    return model(IDS, use_cache=True).past_key_values


def _same(left: Any, right: Any) -> bool:
    pairs = zip(left.layers, right.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "weights"), [("llama", "int8"), ("llama", "fp8"), ("qwen3", "float32"), ("gpt2", "int8")]
)
def test_a_cache_comes_back_bit_for_bit_from_a_third(name: str, weights: str) -> None:
    model = _model(name)
    cache, predictor = _cache(model), Predictor.of(model, weights, chunk=64)
    data = archive(model, IDS[0], cache, by_model=False, predictor=predictor)
    found = restore(model, data, predictor=predictor)
    assert found.tokens.tolist() == IDS[0].tolist()
    assert _same(found.cache, cache)
    raw = sum(2 * x.keys.nbytes for x in cache.layers)
    assert raw / len(data) > 1.8


def test_a_model_of_its_own_predicts_too() -> None:
    model = _model()
    cache, predictor = _cache(model), Predictor(tiny("llama", seed=1), chunk=64)
    data = archive(model, IDS[0], cache, predictor=predictor)
    assert _same(restore(model, data, predictor=predictor).cache, cache)


def test_a_session_goes_on_from_what_was_predicted(tmp_path: Path) -> None:
    model = _model()
    predictor = Predictor.of(model, chunk=64)
    with KVStore(tmp_path / "a", ModelIdentity.from_transformers(model)) as store:
        out = generate(model, IDS, store=store, return_dict_in_generate=True, **GREEDY)
    data = archive(model, out.sequences[0, :-1], out.past_key_values, by_model=False, predictor=predictor)
    want = model.generate(
        out.sequences, past_key_values=out.past_key_values, attention_mask=torch.ones_like(out.sequences), **GREEDY
    )
    with KVStore(tmp_path / "b", ModelIdentity.from_transformers(model)) as store:
        assert restore_session(model, store, "s", data, predictor=predictor) is not None
        assert torch.equal(generate(model, out.sequences, store=store, **GREEDY), want)
        assert store.stats()["counters"]["archive_hits"] == 1


def test_one_weight_changed_and_another_chunk_are_counted_misses(tmp_path: Path) -> None:
    model = _model()
    predictor = Predictor.of(model, chunk=64)
    data = archive(model, IDS[0], _cache(model), by_model=False, predictor=predictor)
    changed = Predictor.of(model, chunk=64).model
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    others = [Predictor(changed, 64), Predictor.of(model, chunk=65), Predictor.of(model, "fp8", chunk=64), None]
    with KVStore(tmp_path / "a", ModelIdentity.from_transformers(model)) as store:
        for other in others:
            assert restore_session(model, store, "s", data, predictor=other) is None
        assert store.stats()["counters"]["archive_misses"] == len(others)
        assert not store.session("s").exists


def test_a_predictor_whose_fingerprint_lies_is_a_miss_too() -> None:
    """The checksum of what it predicts tells, before anything is decoded."""
    model = _model()
    predictor, other = Predictor.of(model, chunk=64), Predictor.of(model, "fp8", chunk=64)
    data = archive(model, IDS[0], _cache(model), by_model=False, predictor=predictor)
    other.fingerprint = predictor.fingerprint
    with pytest.raises(CodecError, match="predicts other bits"):
        restore(model, data, predictor=other)


def test_a_fitted_profile_takes_less_and_is_named() -> None:
    """Random models carry errors from layer to layer, too; without the profile, or with another, it is a miss."""
    model = _model()
    cache, predictor = _cache(model), Predictor.of(model, chunk=64)
    texts = torch.randint(1, VOCABULARY, (12, 200), generator=torch.Generator().manual_seed(1)).tolist()
    fitted = predictor.fitted(model, texts)
    assert fitted.fingerprint == predictor.fingerprint
    plain, less = (archive(model, IDS[0], cache, by_model=False, predictor=one) for one in (predictor, fitted))
    assert len(less) < len(plain)
    assert _same(restore(model, less, predictor=fitted).cache, cache)
    for data, wrong in ((less, predictor), (plain, fitted), (less, predictor.fitted(model, texts[:3]))):
        with pytest.raises(CodecError, match="another profile"):
            restore(model, data, predictor=wrong)


class _Restless(Predictor):
    """Predicts its second chunk otherwise every time."""

    calls = 0

    def predictions(self, tokens: Sequence[int], layout: KVLayout) -> Iterator[Any]:
        self.calls += 1
        for number, chunk in enumerate(super().predictions(tokens, layout)):
            yield [(k + self.calls * (number == 1), v) for k, v in chunk]


def test_a_chunk_that_is_not_predicted_alike_is_coded_without() -> None:
    model = _model()
    cache, predictor = _cache(model), _Restless(Predictor.of(model).model, chunk=64)
    data = archive(model, IDS[0], cache, by_model=False, predictor=predictor)
    codec = SpeculativeCodec(ModelIdentity.from_transformers(model).layout, predictor.fingerprint)
    assert codec.plain_chunks(Archive.parse(data).body) == 1
    assert _same(restore(model, data, predictor=predictor).cache, cache)


def test_what_does_not_fit_is_refused() -> None:
    model = _model()
    cache, predictor = _cache(model), Predictor.of(model, chunk=64)
    data = archive(model, IDS[0], cache, by_model=False, predictor=predictor)
    assert Archive.parse(data).codec == SPECULATIVE
    with pytest.raises(ValueError, match="passes of its own"):
        archive(model, IDS[0], cache, [], predictor=predictor)
    with pytest.raises(ValueError, match="one of int8, fp8, float32"):
        Predictor.of(model, "int4")
    with pytest.raises(ValueError, match="1 to 16384"):
        Predictor.of(model, chunk=0)
    with pytest.raises(ValueError, match="training"):
        Predictor(tiny("llama").train())
    wide = tiny("llama")
    with pytest.raises(ValueError, match="bfloat16"), torch.no_grad():
        archive(wide, IDS[0], wide(IDS, use_cache=True).past_key_values, predictor=predictor)


_CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
from tiny_models import tiny
from kvstore.codecs.tokens.archive import sum_of_cache
from kvstore.integrations.transformers import Predictor, restore
model = tiny("llama").bfloat16()
for path in sys.argv[3:]:
    found = restore(model, open(path, "rb").read(), predictor=Predictor.of(model, chunk=64))
    print(sum_of_cache(tuple((x.keys[0], x.values[0]) for x in found.cache.layers)).hex())
"""


def test_another_process_with_other_threads_reads_the_same(tmp_path: Path) -> None:
    """Both kinds of archives."""
    model = _model()
    cache, paths, sums = _cache(model), list[str](), list[str]()
    for predictor in (None, Predictor.of(model, chunk=64)):
        data = archive(model, IDS[0], cache, predictor=predictor)
        paths.append(str(tmp_path / str(len(paths))))
        Path(paths[-1]).write_bytes(data)
        sums.append(Archive.parse(data).cache_sum.hex())
    helpers = Path(__file__).parents[1] / "helpers"
    command = [sys.executable, "-c", _CHILD, str(helpers), str(torch.get_num_threads() + 1), *paths]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == sums
