"""Calibration writes a profile of what was fitted, and measures on windows that nothing was fitted to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from calibrated import LENGTH, WINDOWS

from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.calibration import calibrate as module
from kvstore.calibration import sections
from kvstore.calibration.calibrate import calibrate, load_model, load_text
from kvstore.calibration.dump import KVDump
from kvstore.codecs import Profile, codec_by_id, codec_by_name
from kvstore.config import MIB
from kvstore.errors import ConfigError

MODEL, TOKENIZER = calibrated.model(), calibrated.tokenizer()


def run(out: Path, **changes: Any) -> Profile:
    settings = {"windows": WINDOWS, "length": LENGTH, "parts": ("aqua",)}
    return calibrate(MODEL, TOKENIZER, calibrated.text(), out, **{**settings, **changes})


class Counted(sections.ProfileSection):
    """A part that says how many windows it was fitted to."""

    def fit(self, task: sections.FitTask) -> sections.Arrays:
        (task.scratch / "rows").touch()
        return {"windows": np.array(list(task.dump.fit_windows), np.int32)}

    def finish(self, task: sections.FitTask, arrays: sections.Arrays) -> sections.Arrays:
        assert task.model is MODEL
        return {**arrays, "before": np.array(len(task.made))}

    def report(self, task: sections.FitTask, arrays: sections.Arrays) -> sections.Report:
        assert not task.scratch.samefile(task.dump.folder)
        return {"bits_per_value": 8 + 1 / len(arrays["windows"]), "on": list(task.dump.held_out)}


def test_the_profile_holds_the_parts_and_the_report(tmp_path: Path) -> None:
    made = run(tmp_path / "p")
    read = Profile.load(tmp_path / "p", ModelIdentity.from_transformers(MODEL, TOKENIZER))
    assert read.id == made.id
    assert read.sections == ("aqua",)
    assert read.report["windows"] == {"fit": 8, "held_out": 1, "tokens": LENGTH}
    assert read.report["bytes"] == {"aqua": read.section_bytes("aqua")}
    assert read.report["model_bytes"] == sum(p.nbytes for p in MODEL.parameters())
    assert set(read.versions) == {"kvstore", "numpy", "torch", "transformers"}
    row = read.report["parts"]["aqua"]
    assert 2 < row["bits_per_value"] < 16
    assert all(0 < error < 1 for error in row["error"])
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_the_profile_makes_codecs(tmp_path: Path) -> None:
    profile = run(tmp_path / "p")
    codec = codec_by_name("aqua@3", profile)
    assert (codec.id, codec.profile, codec.exact) == (5, profile.id, False)
    assert codec_by_id(5, profile).profile == profile.id


def test_the_same_calibration_gives_the_same_bytes(tmp_path: Path) -> None:
    assert run(tmp_path / "p").data == run(tmp_path / "q").data


def test_the_curve_is_of_fits_to_fewer_windows_measured_on_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "section", lambda _name: Counted())
    profile = run(tmp_path / "p", parts=("lossless",))
    row = profile.report["parts"]["lossless"]
    assert row["curve"] == [[1, 9.0], [2, 8.5], [4, 8.25], [8, 8.125]]
    assert row["on"] == [8]
    assert profile.section("lossless")["windows"].tolist() == list(range(8))
    assert profile.section("lossless")["before"] == 0


def test_few_windows_make_a_short_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "section", lambda _name: Counted())
    assert run(tmp_path / "p", windows=2).report["parts"]["aqua"]["curve"] == [[1, 9.0]]


def test_a_part_that_is_not_there_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections.util, "find_spec", lambda name: None if "lossy" in name else name)
    told: list[str] = []
    profile = run(tmp_path / "p", parts=("lossless", "lossy"), progress=lambda what, *_: told.append(what))
    assert profile.sections == ("lossless",)
    assert "lossy: not in this version of kvstore, left out" in told


def test_an_unknown_part_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="parts: expected some of lossless, levels, aqua, lossy, donor, approximate, found 'lossles'"
    ):
        run(tmp_path / "p", parts=("aqua", "lossles"))
    assert not list(tmp_path.iterdir())


def test_lossy_needs_lossless_in_whatever_order_they_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parts: lossy needs lossless as well"):
        run(tmp_path / "p", parts=("lossy", "aqua"))
    assert not list(tmp_path.iterdir())
    profile = run(tmp_path / "p", parts=("lossy", "lossless"))
    assert profile.sections == ("lossless", "lossy")
    row = profile.report["parts"]["lossy"]
    assert [len(level) for level in row["ladder"]] == [5] * 6
    exact = profile.report["parts"]["lossless"]
    assert exact["curve"][-1] == [8, exact["bits_per_value"]]


def test_the_exact_profile_serves_a_store(tmp_path: Path) -> None:
    """From the model's own cache to the disk and back, by the predictive codec that the store chose itself."""
    profile = run(tmp_path / "p", parts=("lossless",))
    assert profile.report["parts"]["lossless"]["bits_per_value"] < 12
    ids = TOKENIZER(calibrated.text(), return_tensors="pt").input_ids[:, -100:]
    with torch.inference_mode():
        cache = MODEL(ids, use_cache=True).past_key_values
    identity = ModelIdentity.from_transformers(MODEL, TOKENIZER)
    settings = {"host": TierConfig(0), "disk": TierConfig(8 * MIB, "auto"), "segment_bytes": MIB, "block_tokens": 32}
    with KVStore(tmp_path / "store", identity, StoreConfig(**settings, profile=tmp_path / "p")) as store:
        store.put(ids[0], cache)
    (tmp_path / "p").unlink()
    with KVStore(tmp_path / "store", identity, StoreConfig(**settings)) as store:
        hit = store.get(ids[0])
        assert hit is not None
        assert hit.tokens == 100
        for (k, v), layer in zip(hit.layers, cache.layers, strict=True):
            assert torch.equal(k, layer.keys)
            assert torch.equal(v, layer.values)
        disk = store._residency.disk
        assert disk is not None
        assert {entry.codec for entry in disk.catalog.get([1, 2, 3, 4]) if entry is not None} == {2}


def test_a_named_work_folder_is_kept_without_scratch_files(tmp_path: Path) -> None:
    run(tmp_path / "p", work=tmp_path / "work")
    assert KVDump.open(tmp_path / "work").windows == WINDOWS
    assert not [path for path in (tmp_path / "work").iterdir() if path.is_dir()]


def test_a_failing_fit_keeps_the_work_and_writes_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Counted, "fit", fail)
    monkeypatch.setattr(module, "section", lambda _name: Counted())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p.work"]
    assert KVDump.open(tmp_path / "p.work").windows == WINDOWS


def test_a_checkpoint_is_loaded_in_bfloat16(tmp_path: Path) -> None:
    model, tokenizer = load_model(calibrated.checkpoint(tmp_path / "m"))
    assert str(model.dtype) == "torch.bfloat16"
    assert tokenizer("ab").input_ids == TOKENIZER("ab").input_ids
    assert not model.training


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path)


def test_only_the_text_that_is_needed_is_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("é".encode() * 1000 + b"\xff")
    assert load_text(tmp_path / "text", 2, 16) == "é" * 256
    assert load_text(tmp_path / "text", 64, 1024) == "é" * 1000 + "\ufffd"
