"""The profile that benchmarks code with: of the default model, calibrated once on conversations, kept in build/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.conversations import split_text
from kvstore.calibration.calibrate import calibrate
from kvstore.codecs.profile import Profile
from kvstore.errors import ProfileError
from kvstore.identity import ModelIdentity

WINDOWS, LENGTH = 64, 1024
CHARACTERS = 8  # more than a token has, on average
FOLDER = Path("build/profiles")


def profile_path(model: Any, tokenizer: Any, given: Path | None = None, windows: int = WINDOWS) -> Path:
    """`given`, or the file that calibration on the conversations that are not for tests makes: minutes at first."""
    if given is not None:
        return given
    identity = ModelIdentity.from_transformers(model, tokenizer)
    path = FOLDER / f"{identity.digest.hex()[:16]}-{windows}.kvprofile"
    try:
        Profile.load(path, identity)
    except ProfileError:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = split_text(False, windows * LENGTH * CHARACTERS)
        calibrate(model, tokenizer, text, path, windows=windows, length=LENGTH, parts=("lossless", "lossy"))
    return path
