"""The profile that benchmarks code with, calibrated once and kept in build/; by default on conversations."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import Rows
from benchmarks.conversations import calibration_text
from kvstore.calibration.calibrate import calibrate
from kvstore.codecs.profile import Profile
from kvstore.core.identity import ModelIdentity
from kvstore.errors import ProfileError, UnsupportedModel

WINDOWS, LENGTH = 64, 1024
CHARACTERS = 8  # more than a token has, on average
FOLDER = Path("build/profiles")
PARTS = ("lossless", "levels", "lossy", "donor")


def needs_profile(codec: str) -> bool:
    """Whether the codec of this name is made from a profile."""
    return codec.partition("@")[0].partition(":")[0] in ("predictive", "aqua")


def profile_path(
    model: Any,
    tokenizer: Any,
    given: Path | None = None,
    windows: int = WINDOWS,
    text: str | None = None,
    parts: Sequence[str] = PARTS,
    length: int = LENGTH,
    kv_dtype: str | None = None,
) -> Path:
    """`given`, or the file that calibration makes, minutes at first. text: by default conversations not for tests.
    parts: the sections. kv_dtype: see `calibrate`."""
    if given is not None:
        return given
    identity = ModelIdentity.from_transformers(model, tokenizer)
    if kv_dtype is not None:
        identity = replace(identity, layout=replace(identity.layout, dtype=kv_dtype))
    characters = windows * length * CHARACTERS
    words = calibration_text(characters) if text is None else text[:characters]
    key = hashlib.sha256(identity.digest + " ".join(parts).encode() + words.encode()).hexdigest()[:16]
    path = FOLDER / f"{key}-{windows}.kvprofile"
    try:
        Profile.load(path, identity)
    except ProfileError:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibrate(model, tokenizer, words, path, windows=windows, length=length, parts=parts, kv_dtype=kv_dtype)
    return path


def profile_of(
    rows: Rows,
    model: Any,
    tokenizer: Any,
    given: Path | None = None,
    windows: int = WINDOWS,
    kv_dtype: str | None = None,
) -> Profile | None:
    """The profile of `profile_path`, loaded; None, and a row `missing`, if none can be fitted to this model."""
    try:
        return Profile.load(profile_path(model, tokenizer, given, windows, kv_dtype=kv_dtype))
    except (ProfileError, UnsupportedModel) as error:
        print(f"predictive: {error}", file=sys.stderr, flush=True)
        rows.add("predictive/lossless/KV", "missing", 1, "profile")
        return None
