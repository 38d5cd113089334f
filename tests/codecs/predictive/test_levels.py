"""Which mode the codec writes, by its name and what the profile has, and that it decodes the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from kvcases import same_kv
from profilecases import ROPE, identity_of, level_kv, predicted_kv, profile_of

from kvstore import KVLayout, KVStore, StoreConfig, TierConfig
from kvstore.codecs import BlockInfo, KVView, codec_by_id, codec_by_name
from kvstore.codecs.predictive.codec import MODE, PredictiveCodec, mode_of
from kvstore.codecs.predictive.levels.model import LEVELS
from kvstore.codecs.profile import Profile
from kvstore.errors import CodecError, ProfileError

LAYOUT = KVLayout.uniform(3, 2, 16, rope=ROPE)
TOKENS = np.arange(64, dtype=np.uint32)
INFO = BlockInfo(LAYOUT, TOKENS, 0)


def profile(levels: tuple[int, ...] = LEVELS) -> Profile:
    """With these levels; without the section if there are none."""
    whole = profile_of(LAYOUT, "lossless", "levels")
    sections: dict[str, Mapping[str, Any]] = {"lossless": whole.section("lossless")}
    if levels:
        arrays = whole.section("levels")
        gone = tuple(f"{level}." for level in LEVELS if level not in levels)
        kept = {name: array for name, array in arrays.items() if not name.startswith(gone) or name.count(".") == 2}
        sections["levels"] = kept
    return Profile.new(identity_of(LAYOUT), sections)


def written(codec: Any, kv: Any) -> tuple[bytes, tuple[int, ...]]:
    out = bytearray(codec.bound(INFO))
    sizes = codec.encode(INFO, KVView.of_layers(LAYOUT, kv), memoryview(out))
    return bytes(out[: sum(sizes)]), sizes


def read(codec: Any, payload: bytes, sizes: tuple[int, ...]) -> Any:
    found = [(torch.zeros(2, 64, 16).bfloat16(), torch.zeros(2, 64, 16).bfloat16()) for _ in LAYOUT.layers]
    codec.decode(INFO, memoryview(payload), sizes, KVView.of_layers(LAYOUT, found))
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_writes_its_mode_and_every_codec_of_the_profile_reads_it(level: int) -> None:
    kept, kv = profile(), level_kv(profile(), level, TOKENS, 0)
    codec = codec_by_name(f"predictive:{level}", kept)
    payload, sizes = written(codec, kv)
    assert mode_of(memoryview(payload), sizes) == 20 + level
    assert codec.fallbacks(memoryview(payload), sizes) == 0
    for other in (codec, codec_by_id(2, kept), codec_by_name("predictive:1", kept)):
        assert same_kv(read(other, payload, sizes), kv)


def test_without_a_level_the_highest_is_written_and_without_levels_the_first_mode() -> None:
    for levels, mode in ((LEVELS, 23), ((1, 2), 22), ((1,), 21), ((), MODE)):
        kv = level_kv(profile(), levels[-1], TOKENS, 0) if levels else predicted_kv(profile(), TOKENS, 0)
        codec = codec_by_name("predictive", profile(levels))
        payload, sizes = written(codec, kv)
        assert mode_of(memoryview(payload), sizes) == mode
        assert same_kv(read(codec, payload, sizes), kv)


def test_a_level_that_the_profile_lacks_is_named() -> None:
    with pytest.raises(ProfileError, match=r"no level 3 \(it has 1, 2\)"):
        codec_by_name("predictive:3", profile((1, 2)))
    with pytest.raises(ProfileError, match=r"no level 1 \(it has none\)"):
        PredictiveCodec.from_profile(profile(()), level=1)
    payload, sizes = written(codec_by_name("predictive:2", profile()), level_kv(profile(), 2, TOKENS, 0))
    with pytest.raises(CodecError, match="level 2, which the profile does not have"):
        read(codec_by_name("predictive", profile((1,))), payload, sizes)


def test_a_store_keeps_blocks_in_a_level(tmp_path: Any) -> None:
    kept, path = profile(), tmp_path / "profile"
    kept.save(path)
    kv = level_kv(kept, 1, TOKENS, 0)
    settings = StoreConfig(host=TierConfig(0), disk=TierConfig(1 << 30, "predictive:1"), profile=path)
    with KVStore(tmp_path / "store", identity_of(LAYOUT), settings) as store:
        store.put(TOKENS, kv)
        store.flush()
    with KVStore(tmp_path / "store", identity_of(LAYOUT), settings) as store:
        hit = store.get(TOKENS)
        assert hit is not None
        assert hit.tokens == 64
        assert same_kv(hit.layers, kv)
