"""The golden store of a layout with windows, coded with a profile: how it was made, and what a reader must find.

`write` is run once for ever (tests/golden/make.py); `tests/store/test_golden_windows.py` reads what it wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_stores
import numpy as np
from goldenstore import digest_of
from kvcases import Layers
from profilecases import VOCABULARY, predicted_kv, profile_of

from kvstore import KVLayout, KVStore, LayerLayout, ModelIdentity, StoreConfig
from kvstore.codecs.group_sections import joined, profile_of_group
from kvstore.codecs.profile import Profile

FULL, SLIDING = LayerLayout(2, 8, 8), LayerLayout(2, 8, 8, "sliding", 24)
ROPE = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
LAYOUT = KVLayout((SLIDING, FULL, SLIDING, SLIDING, FULL), "bfloat16", json.dumps(ROPE, sort_keys=True))
LENGTHS = (5, 23, 24, 60)  # below, at and above the window


def identity() -> ModelIdentity:
    return ModelIdentity("golden windows", "1", "00", "", LAYOUT)


def config(codec: str = "auto", **settings: Any) -> StoreConfig:
    return family_stores.config(disk=1 << 20, codec=codec, **settings)


def profile_of_store() -> Profile:
    """Of random arrays."""
    made = [profile_of(group.layout, "lossless", "levels") for group in LAYOUT.groups]
    return Profile.new(identity(), {name: joined([part.section(name) for part in made]) for name in made[0].sections})


def kept(profile: Profile, tokens: Any) -> Layers:
    """About what the profile predicts of a sequence, as far as a model would keep it."""
    found: dict[int, Any] = {}
    for number, group in enumerate(LAYOUT.groups):
        pairs = predicted_kv(profile_of_group(profile, number), tokens, 0)
        found |= dict(zip(group.layers, pairs, strict=True))
    firsts = [layer.first_kept(len(tokens)) for layer in LAYOUT.layers]
    return [(found[i][0][:, first:], found[i][1][:, first:]) for i, first in enumerate(firsts)]


def write(path: Path) -> dict[str, Any]:
    """Makes the store at `path`; returns what must be found in it, plain JSON values."""
    profile, saved, found = profile_of_store(), path.parent / "profile.safetensors", []
    profile.save(saved)
    for number, count in enumerate(LENGTHS):
        tokens = ((np.arange(count) * 37 + 11 * number) % VOCABULARY).astype(np.uint32)
        layers = kept(profile, tokens)
        codec = ("predictive", "predictive:1", "predictive:2", "predictive:3")[number]
        with KVStore(path, identity(), config(codec, profile=saved)) as store:
            store.put(tokens, layers)
        found.append({"tokens": tokens.tolist(), "sha256": digest_of(layers)})
    return {"sequences": found}
