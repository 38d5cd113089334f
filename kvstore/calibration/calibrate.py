"""From a model and a text to a profile: run the model, fit every part, measure on what was kept back, write."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from kvstore.calibration.approximate.cases import check_cases
from kvstore.calibration.donor.passages import check_passages
from kvstore.calibration.dump import KVDump, Progress, check_sizes, silent
from kvstore.calibration.predictive.cholesky import SINGULAR
from kvstore.calibration.sections import DEFAULT, NAMES, Arrays, FitTask, ProfileSection, section
from kvstore.codecs.profile import Profile
from kvstore.codecs.words import FLOAT8
from kvstore.core.identity import ModelIdentity
from kvstore.core.rope_types import SHORT
from kvstore.errors import ConfigError
from kvstore.version import versions

CURVE = (8, 4, 2)  # fits to this fraction of the windows are measured too
_CHARACTERS = 8  # of a token, rather too many


def calibrate(
    model: Any,
    tokenizer: Any,
    text: str,
    out: Path,
    *,
    windows: int = 64,
    length: int = 1024,
    work: Path | None = None,
    parts: Sequence[str] = DEFAULT,
    regime: str = SHORT,
    kv_dtype: str | None = None,
    progress: Progress = silent,
) -> Profile:
    """Make the profile of a model and write it to `out`, whole or not at all.

    Args:
        model: a transformers model in bfloat16, float32 or float16 whose layers are like Llama's, have windows like
            Gemma 3's, or keep latents like DeepSeek V3's.
        tokenizer: the model's tokenizer.
        text: text like what will be stored. Its first `windows` windows of `length` tokens are used, an eighth of
            them for the report alone.
        out: the file to write. It is made durable before it gets this name.
        windows, length: how many windows, at least 2, and the tokens of each, at least 8.
        work: a folder for the raw caches of all windows. What an interrupted run left there is used again. The
            default is `out` with ".work" added, removed at the end.
        parts: the sections to fit, some of `sections.NAMES`. A section that this version lacks, or that is for
            models in bfloat16 without latents or windows alone (all but "lossless", and "levels" with windows), is left
            out and `progress` is told.
        regime: of the model's identity, see `ModelIdentity.from_transformers`; windows must be as long as it says.
        kv_dtype: "float8_e5m2" or "float8_e4m3fn" if caches of a model in bfloat16 are kept so, rounded to the nearest,
            without a scale; the profile's identity has such a layout. The default is that of the model.
        progress: called with what is being done, how much of it is done, and how much there is.

    Returns:
        The profile that was written.

    Raises:
        UnsupportedModel: names what the model lacks.
        UnsupportedLength: keys depend on the length, and those of such windows are not of this regime.
        ConfigError: a bad argument, too little text, or one that is too monotonous.
        OSError: a file cannot be read or written.
    """
    chosen = _chosen(parts)
    identity = _identity(model, tokenizer, regime, kv_dtype)
    if "donor" in chosen:
        check_passages(identity.layout, length)
    if "approximate" in chosen:
        check_cases(model, identity.layout, length)
    folder = work or out.with_name(out.name + ".work")
    dump = KVDump.make(
        model, tokenizer, text, folder, windows=windows, length=length, identity=identity, progress=progress
    )
    sections, reports = _fit_all(chosen, dump, model, progress)
    made_with = versions("numpy", "torch", "transformers")
    profile = Profile.new(identity, sections, _report(dump, model, sections, reports), made_with)
    profile.save(out)
    if work is None:
        dump.remove()
    return profile


def _identity(model: Any, tokenizer: Any, regime: str, kv_dtype: str | None) -> ModelIdentity:
    identity = ModelIdentity.from_transformers(model, tokenizer, regime=regime)
    if kv_dtype is None:
        return identity
    if kv_dtype not in FLOAT8 or identity.layout.dtype != "bfloat16":
        raise ConfigError(
            f"kv_dtype: expected one of {', '.join(FLOAT8)} for a model in bfloat16, found {kv_dtype!r} for one in "
            f"{identity.layout.dtype}"
        )
    return replace(identity, layout=replace(identity.layout, dtype=kv_dtype))


def _chosen(names: Sequence[str]) -> dict[str, ProfileSection | None]:
    """The sections by name, in the order in which they stand on each other; None for one that is not installed."""
    if not names:
        raise ConfigError(f"parts: expected some of {', '.join(NAMES)}, found nothing")
    found = {name: section(name) for name in sorted(names, key=[*NAMES, *names].index)}
    for name in ("levels", "lossy"):
        if name in found and "lossless" not in found:
            raise ConfigError(f"parts: {name} needs lossless as well, because it builds on that; add lossless")
    return found


def _fit_all(
    chosen: Mapping[str, ProfileSection | None], dump: KVDump, model: Any, progress: Progress
) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """(arrays by section, reports by section)."""
    sections: dict[str, Arrays] = {}
    reports = {}
    for name, fitted in chosen.items():
        if fitted is None:
            progress(f"{name}: not in this version of kvstore, left out", 0, 0)
        elif dump.dtype != "bfloat16" and name != "lossless":
            progress(f"{name}: for caches in bfloat16 alone, left out", 0, 0)
        elif dump.layout.is_latent and name not in ("lossless", "approximate"):
            progress(f"{name}: not for latents, left out", 0, 0)
        elif dump.layout.is_grouped and name not in ("lossless", "levels"):
            progress(f"{name}: not for layers with windows, left out", 0, 0)
        else:
            try:
                sections[name], reports[name] = _fit(fitted, dump, sections, model, progress)
            except SINGULAR as error:
                raise ConfigError(f"text: is too monotonous to fit a predictor to ({name}); name another") from error
    return sections, reports


def _report(dump: KVDump, model: Any, sections: Mapping[str, Arrays], reports: dict[str, Any]) -> dict[str, Any]:
    return {
        "windows": {"fit": len(dump.fit_windows), "held_out": len(dump.held_out), "tokens": dump.length},
        "model_bytes": sum(tensor.nbytes for tensor in model.parameters()),
        "bytes": {name: sum(array.nbytes for array in arrays.values()) for name, arrays in sections.items()},
        "parts": reports,
    }


def load_model(folder: Path, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """Load a model and its tokenizer from a checkpoint folder.

    Args:
        folder: of the checkpoint.
        dtype: "bfloat16", "float16" or "float32".

    Returns:
        (model, tokenizer), of transformers, in evaluation mode.

    Raises:
        ConfigError: there is no model, it cannot be loaded, or there is no such dtype.
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype: expected bfloat16, float16 or float32, found {dtype!r}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no model (config.json is missing); name the folder of a checkpoint")
    import torch

    try:
        transformers: Any = import_module("transformers")  # without types
    except ModuleNotFoundError:
        raise ConfigError("a model needs transformers; pip install 'kvstore-lm[transformers]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # transformers and safetensors have many types for a folder that they cannot read
        raise ConfigError(f"{folder}: the model cannot be loaded: {error}") from error
    return model, tokenizer


def load_text(path: Path, windows: int, length: int) -> str:
    """Read as much of a text file as `windows` windows of `length` tokens can need.

    Raises:
        OSError: the file cannot be read.
        ConfigError: `windows` or `length` is too small.
    """
    check_sizes(windows, length)
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(windows * length * _CHARACTERS)


def _fit(
    fitted: ProfileSection, dump: KVDump, made: Mapping[str, Arrays], model: Any, progress: Progress
) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, report); with the held-out bits a value after fits to fewer windows, as "curve"."""
    total, curve = len(dump.fit_windows), []
    counts = sorted({max(1, total // share) for share in CURVE} | {total}) if fitted.has_curve else [total]
    with tempfile.TemporaryDirectory(dir=dump.folder) as scratch:
        task = FitTask(dump, model, made, progress, Path(scratch))
        for count, arrays in zip(counts, fitted.fits(task, counts), strict=True):
            if count == total:
                arrays = fitted.finish(task, arrays)
            report = fitted.report(task, arrays)
            if fitted.has_curve:
                curve.append([count, report["bits_per_value"]])
    return arrays, {**report, "curve": curve} if fitted.has_curve else report
