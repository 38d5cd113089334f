"""A profile that knows layer 0 of some tokens codes like one that knows nothing of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codeccontract import decode, encode
from kvcases import same_kv
from profilecases import VOCABULARY, identity_of, level_kv, predicted_kv, profile_of

from kvstore import KVLayout
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.profile import Profile
from kvstore.errors import ProfileError

LAYOUT = KVLayout.uniform(3, 2, 16, rope='{"rope_theta": 10000.0, "rope_type": "default"}')
SEEN = np.array([0, 2, 3, 7, VOCABULARY - 1], np.uint32)


def profile_with(level: int | None, **changed: Any) -> Profile:
    """The small profile with other arrays in its section "lossless"; None takes one away."""
    small = profile_of(LAYOUT, "lossless", *(["levels"] if level else []))
    sections = {name: dict(small.section(name)) for name in small.sections}
    sections["lossless"] = {k: v for k, v in {**sections["lossless"], **changed}.items() if v is not None}
    return Profile.new(identity_of(LAYOUT), sections)


def table() -> np.ndarray:
    return np.asarray(profile_of(LAYOUT, "lossless").section("lossless")["token_kv"])


@pytest.mark.parametrize("level", [None, 1, 3])
def test_it_codes_as_a_table_of_all_tokens_whose_other_rows_are_zero(level: int | None) -> None:
    zeros = np.zeros_like(table())
    zeros[SEEN] = table()[SEEN]
    whole = profile_with(level, token_kv=zeros)
    some = profile_with(level, token_kv=None, seen_kv=table()[SEEN], seen_tokens=SEEN)
    tokens = np.array([*SEEN, 1, 5, VOCABULARY, 1 << 31, *SEEN[::-1]], np.uint32)
    info = BlockInfo(LAYOUT, tokens, 64)
    kv = level_kv(whole, level, tokens, 64) if level else predicted_kv(whole, tokens, 64)
    payload, sizes = encode(PredictiveCodec.from_profile(whole, level=level), info, kv)
    codec = PredictiveCodec.from_profile(some, level=level)
    assert (payload, sizes) == encode(codec, info, kv)
    assert codec.fallbacks(memoryview(payload), sizes) == 0
    assert same_kv(decode(codec, info, payload, sizes), kv)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"seen_tokens": SEEN[::-1]}, "seen_tokens"),
        ({"seen_tokens": np.array([0, 2, 2, 7, 9], np.uint32)}, "seen_tokens"),
        ({"seen_tokens": SEEN[:-1]}, "seen_tokens"),
        ({"seen_tokens": SEEN.astype(np.int64)}, "seen_tokens"),
        ({"seen_tokens": None}, "seen_tokens"),
        ({"seen_kv": table()[SEEN, :-1]}, "seen_kv"),
        ({"seen_kv": table()[:0], "seen_tokens": SEEN[:0]}, "seen_kv"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    arrays = {**profile_of(LAYOUT, "lossless").section("lossless"), "seen_kv": table()[SEEN], "seen_tokens": SEEN}
    arrays = {k: v for k, v in {**arrays, **wrong}.items() if v is not None and k != "token_kv"}
    with pytest.raises(ProfileError, match=named):
        PredictiveModel.from_arrays(LAYOUT, arrays)
