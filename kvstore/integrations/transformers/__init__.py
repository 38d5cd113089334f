"""Hugging Face transformers 5.17 to 5.24: what a model's caches look like, and `generate` around a store.

Names are imported when they are first used, so that `describe` and `cache`, which the store itself hands over to, do
not import what stands above the store.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.integrations.transformers.archiving import Restored, archive, restore, restore_session
    from kvstore.integrations.transformers.attached import Attachment, attach, detach
    from kvstore.integrations.transformers.batch import BatchHit, get_batch, put_batch
    from kvstore.integrations.transformers.cache import cache_layers
    from kvstore.integrations.transformers.describe import layout_from_config
    from kvstore.integrations.transformers.fingerprint import tokenizer_fingerprint, weights_fingerprint
    from kvstore.integrations.transformers.generation import generate
    from kvstore.integrations.transformers.passes import Passes
    from kvstore.integrations.transformers.predictor import Predictor
    from kvstore.integrations.transformers.warming import Prefilled, WarmupReport, get_or_prefill, warmup

if find_spec("transformers") is None:
    what = "kvstore.integrations.transformers needs transformers; pip install 'kvstore-lm[transformers]'"
    raise ModuleNotFoundError(what, name="transformers")

__all__ = [
    "Attachment",
    "BatchHit",
    "Passes",
    "Predictor",
    "Prefilled",
    "Restored",
    "WarmupReport",
    "archive",
    "attach",
    "cache_layers",
    "detach",
    "generate",
    "get_batch",
    "get_or_prefill",
    "layout_from_config",
    "put_batch",
    "restore",
    "restore_session",
    "tokenizer_fingerprint",
    "warmup",
    "weights_fingerprint",
]

# No module has the name of what it exports: importing the module would hide the function.
_HOMES = {
    "archiving": ("Restored", "archive", "restore", "restore_session"),
    "attached": ("Attachment", "attach", "detach"),
    "batch": ("BatchHit", "get_batch", "put_batch"),
    "cache": ("cache_layers",),
    "describe": ("layout_from_config",),
    "fingerprint": ("tokenizer_fingerprint", "weights_fingerprint"),
    "generation": ("generate",),
    "passes": ("Passes",),
    "predictor": ("Predictor",),
    "warming": ("Prefilled", "WarmupReport", "get_or_prefill", "warmup"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
