"""The probe that takes a model apart for calibration, by what its layers keep."""

from __future__ import annotations

from typing import Any

from kvstore.calibration.latent_probe import LatentProbe
from kvstore.calibration.model_probe import ModelProbe, layout_of
from kvstore.calibration.window_probe import WindowProbe
from kvstore.core.rope_types import SHORT


def probe_of(model: Any, regime: str = SHORT) -> ModelProbe | LatentProbe | WindowProbe:
    """The probe for a model. Raises `UnsupportedModel` naming what it lacks."""
    layout = layout_of(model, regime)
    if layout.is_grouped:
        return WindowProbe(model, regime)
    return LatentProbe(model, regime) if layout.is_latent else ModelProbe(model, regime)
