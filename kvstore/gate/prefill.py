"""How long a model takes to compute tokens, from the passes that were seen."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.gate.curve import F64, Curve, PriorRow

_HALF_LIFE = 32.0
# Tokens that take as long as a pass takes by itself (integrations/transformers/prefill.py): what a pass of few tokens
# is expected to take where only long ones were seen, and the other way round.
_PASS_TOKENS = {"cpu": 32.0}
_DEVICE_PASS_TOKENS = 256.0
_MOST_PASS = 4  # times that, at most: or one pass that was held up would show that tokens cost nothing
_SHORT = 8  # passes of fewer tokens take as long as the weights take to be read, however many they are
_MOST_SHORT = 9
_PRIOR = 0.02  # the weight of what is only expected
ENOUGH_S = 1.0
"""Seconds of passes that must have been seen before anything is concluded from them."""
_FARTHEST = 4  # no conclusion about sequences so many times longer than those that were seen


@dataclass
class PrefillCost:
    """Of one model on one device: a pass of `n` tokens behind `start` others takes a + b n + c n (start + n / 2), but
    no less than a pass of a few tokens. What a pass takes by itself, a, is no more than some tokens take.

    Not thread-safe: its owner has the lock.

    Attributes:
        device: the type of it, "cpu" or "cuda".
        seen_s: seconds of all passes seen but the short ones.
        reach: length of the longest sequence seen.
        curve: passes of 8 tokens and more.
        short: seconds of the newest passes of fewer.

    Example:
        >>> cost = PrefillCost("cpu")
        >>> for n in (64, 512, 2048):
        ...     cost.observe(n, 0.03 + 0.001 * n + 5e-7 * n * n / 2, 0)
        >>> round(float(cost.saved([2048], 2049)[0]), 1)
        3.1
    """

    device: str
    seen_s: float = 0.0
    reach: int = 0
    curve: Curve = field(init=False)
    short: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SHORT))

    def __post_init__(self) -> None:
        least = 1 / (_MOST_PASS * self._pass_tokens)  # b by a
        self.curve = Curve(_HALF_LIFE, parts=np.array([[1.0, 0.0, 0.0], [least, 1.0, 0.0], [0.0, 0.0, 1.0]]))

    @property
    def _pass_tokens(self) -> float:
        return _PASS_TOKENS.get(self.device, _DEVICE_PASS_TOKENS)

    def observe(self, tokens: int, seconds: float, start: int) -> None:
        """Note that a pass over `tokens` tokens behind `start` others took so long."""
        if tokens < _SHORT:
            self.short.append(seconds)
            return
        self.curve.observe(_features(tokens, start), seconds)
        self.seen_s += seconds
        self.reach = max(self.reach, start + tokens)

    def knows(self, tokens: int) -> bool:
        """Whether enough was seen to say what a sequence of so many tokens takes."""
        return self.seen_s >= ENOUGH_S and tokens <= _FARTHEST * self.reach

    def seconds(self, tokens: int, start: int = 0) -> float:
        """Return about how long a pass takes; of at least one observation."""
        return max(self._least(), float(np.dot(self.coefficients(), _features(tokens, start))))

    def saved(self, ends: Sequence[int], total: int) -> F64:
        """Return the seconds that are saved if the first tokens of a sequence need not be computed, `[m]`.

        Args:
            ends: how many first tokens, `[m]`; below `total`.
            total: of the sequence; what is left of it is a pass in any case.
        """
        a, b, c = self.coefficients()
        done = np.array(ends, np.float64)
        rest = total - done
        left = np.maximum(self._least(), a + b * rest + c * rest * (done + rest / 2))
        return np.asarray(self.seconds(total) - left)

    def _least(self) -> float:
        """What any pass takes; if no short one was seen, what is expected of it."""
        if self.short:
            return statistics.median(self.short)
        return self._pass_tokens * float(self.coefficients()[1])

    def coefficients(self) -> F64:
        """Return a, b and c: seconds of a pass, of a token, and of a pair of tokens."""
        return self.curve.fit(self._prior)

    def _prior(self) -> list[PriorRow]:
        """a is some b, and c is 0, unless what was seen says otherwise; in shares of what was seen."""
        seen = self.curve.observations()
        passes = self._pass_tokens
        seconds = sum(taken for _, taken in seen)
        per_token = seconds / sum(features[1] + passes for features, _ in seen)
        per_pair = seconds / sum(features[2] for features, _ in seen)
        scale = passes * per_token
        return [((_PRIOR / scale, -_PRIOR / per_token, 0.0), 0.0), ((0.0, 0.0, _PRIOR / per_pair), 0.0)]


def _features(tokens: int, start: int) -> tuple[float, ...]:
    return 1.0, float(tokens), tokens * (start + tokens / 2)
