"""Log-probabilities to bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.trie import MAX_BITS_PER_TOKEN, bits_from_logprobs


def test_nats_become_bits() -> None:
    bits = bits_from_logprobs([0.0, math.log(0.5), math.log(1 / 1024)], 3)
    assert bits.dtype == np.float32
    assert bits.tolist() == pytest.approx([0, 1, 10])
    assert not np.signbit(bits).any()


def test_the_impossible_is_capped() -> None:
    assert bits_from_logprobs(np.array([-np.inf, -1e6], np.float32), 2).tolist() == [MAX_BITS_PER_TOKEN] * 2


def test_no_tokens_no_bits() -> None:
    assert bits_from_logprobs([], 0).shape == (0,)


@pytest.mark.parametrize("wrong", [[0.1], [math.nan], [-1.0, -1.0], [[-1.0]], -1.0, ["x"], [math.inf], [-(10**400)]])
def test_what_is_no_logprob_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        bits_from_logprobs(wrong, 1)  # type: ignore[arg-type]
