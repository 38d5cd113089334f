"""The decision: how much of what is stored is worth loading, for a caller who could compute it instead."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.config import MIB
from kvstore.core.arguments import check_integer
from kvstore.gate.curve import F64
from kvstore.gate.load import RATIOS, LoadCost, Part
from kvstore.gate.prefill import PrefillCost
from kvstore.gate.saved import Estimates

# A load must promise to take no more than this share of what it saves: estimates are off by some percent. The decision
# before on about as many tokens moves it, so that two ways that take about as long do not alternate.
_SHARE, _AFTER_LOAD, _AFTER_REFUSAL = 0.9, 0.95, 0.85
_MOST_TOKENS = 1 << 40
_RECHECK_S = 10.0  # a tier that is not read any more is looked at again so often
# Of gets that are refused for what was seen in memory, one in so many is loaded: nothing else would show that it was
# other work that made it slow.
_TRIED = 4
_NOTABLE = 1.25
_WORTH_KEEPING_S = 0.1  # seconds of passes: several processes together may see enough
_CHANGED, _NOISE_S = 2.0, 0.001  # a timed read that is so much off the estimate means that the storage has changed


@dataclass(frozen=True)
class Verdict:
    """What to load of the stored blocks of a prefix. Immutable.

    Attributes:
        parts: how many leading blocks.
        load_s: what loading all blocks is expected to take.
        saved_s: what computing them is expected to take; infinite if that is not known.
    """

    parts: int
    load_s: float = 0.0
    saved_s: float = math.inf


@dataclass
class Gate:
    """Decides between loading and computing; `KVStore.gate`. Thread-safe: `_lock` guards all that is estimated.

    As long as nothing is known of what computing takes, everything is worth loading. The integrations tell it; a
    program that calls `put` and `get` itself may, by `observe_prefill` or `StoreConfig.prefill_tokens_per_s`.

    Args:
        enabled: whether gets are decided on, unless they say otherwise.
        load: what is known of the store.
        tokens_per_s: what the settings say of computing, on any device; 0 for nothing.

    Example:
        >>> gate = Gate(True, LoadCost(bytes_per_token=20_000, threads=2))
        >>> gate.observe_prefill(2000, 2.0)
        >>> gate.load.observe_read("disk", 1_000_000, 0.001)
        >>> parts = [Part("disk", "raw", 1_280_000, 64)] * 10
        >>> gate.decide(parts, "cpu").parts
        10
        >>> for _ in range(20):
        ...     gate.load.observe_read("disk", 1_000_000, 0.1)
        >>> gate.decide(parts, "cpu").parts
        0
    """

    enabled: bool
    load: LoadCost
    tokens_per_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _prefill: dict[str, PrefillCost] = field(default_factory=dict)
    _refused: dict[int, int] = field(default_factory=dict)  # by the octave of the tokens: refusals since the last load
    _looked: dict[str, float] = field(default_factory=dict)  # when a tier was last read
    _is_news: bool = False  # whether passes were seen that no process before saw
    _lock: Any = field(default_factory=threading.Lock)

    # ---- what was seen -------------------------------------------------------------------------------------------

    def observe_prefill(self, tokens: int, seconds: float, *, start: int = 0, device: Any = "cpu") -> None:
        """Tell what the model took to compute the cache of some tokens in one pass.

        Conclusions are drawn once such passes have taken a second in all, and for sequences up to four times as long
        as those seen.

        Args:
            tokens: how many were computed.
            seconds: how long it took; on a GPU, until it was done.
            start: how many tokens stood before them.
            device: on which it was.

        Raises:
            ValueError: a number is not finite, or out of range.
        """
        for name, number, least in (("tokens", tokens, 1), ("start", start, 0)):
            check_integer(name, number, least, _MOST_TOKENS)
        if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise ValueError(f"seconds: expected a finite number above 0, found {seconds!r}")
        kind = device_kind(device)
        with self._lock:
            self._prefill.setdefault(kind, PrefillCost(kind)).observe(tokens, float(seconds), start)
            self._is_news = True

    def observe_read(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note what the reads of one get from a tier took, all together."""
        with self._lock:
            self._looked[tier] = self.clock()
            self.load.observe_read(tier, nbytes, max(seconds, 1e-9))

    def observe_decode(self, codec: str, tokens: int, seconds: float) -> None:
        """Note what decoding a block took."""
        with self._lock:
            self.load.observe_decode(codec, tokens * self.load.bytes_per_token, seconds)

    def observe_rest(self, device: Any, tokens: int, seconds: float) -> None:
        """Note what a get took beside reading and decoding."""
        with self._lock:
            self.load.observe_rest(device_kind(device), tokens, max(seconds, 1e-9))

    def loading(self, parts: Sequence[Part]) -> tuple[float, float]:
        """See `LoadCost.loading`."""
        with self._lock:
            return self.load.loading(parts)

    def check(self, tier: str, reads: Sequence[tuple[int, float]]) -> None:
        """Take in timed reads (bytes, seconds). If they are far from the estimate, the tier is estimated anew."""
        with self._lock:
            self._looked[tier] = self.clock()
            line = self.load.line(tier)
            if line is not None and any(_is_off(line[0] + line[1] * nbytes, seconds) for nbytes, seconds in reads):
                del self.load.reads[tier]
            for nbytes, seconds in reads:
                self.load.observe_read(tier, nbytes, max(seconds, 1e-9))

    def is_due(self, tier: str) -> bool:
        """Whether a tier should be looked at: nothing is known of it, or it was not read for a while. Asked for by one
        caller at a time: who is told so is to `check` it."""
        with self._lock:
            now = self.clock()
            if now - self._looked.get(tier, -math.inf) < _RECHECK_S:
                return False
            self._looked[tier] = now
            return True

    # ---- the decision --------------------------------------------------------------------------------------------

    def knows(self, device: Any) -> bool:
        """Whether anything is known of what computing on a device takes."""
        with self._lock:
            cost = self._prefill.get(device_kind(device))
            return bool(self.tokens_per_s) or (cost is not None and cost.knows(1))

    @property
    def is_informed(self) -> bool:
        """Whether anything is known of what computing takes, on any device."""
        with self._lock:
            return bool(self.tokens_per_s) or any(cost.knows(1) for cost in self._prefill.values())

    def lacks(self, tier: str) -> bool:
        """Whether nothing is known of a tier."""
        with self._lock:
            curve = self.load.reads.get(tier)
            return curve is None or not len(curve)

    def decide(self, parts: Sequence[Part], device: Any, *, total: int = 0, whole: bool = False) -> Verdict:
        """Return how many leading blocks of a stored prefix are worth loading. Changes nothing.

        Args:
            parts: the blocks, in order.
            device: where they are wanted, and would be computed.
            total: tokens of the whole sequence; at least one more than the blocks have.
            whole: they are of use only all together.
        """
        kind, everything = device_kind(device), Verdict(len(parts))
        if not parts:
            return everything
        ends = np.cumsum([part.tokens for part in parts])
        with self._lock:
            saved = self._saved(ends.tolist(), max(total, int(ends[-1]) + 1), kind)
            tiers = {part.tier for part in parts if part.tier is not None}
            if saved is None or any(self.load.line(tier) is None for tier in tiers):
                return everything
            load, refusals = self.load.seconds(parts, kind), self._refused.get(int(ends[-1]).bit_length())
            is_turn = (refusals or 0) % _TRIED == _TRIED - 1
            usual = self.load.seconds(parts, kind, usual=True) if is_turn else None
        share = _SHARE if refusals is None else _AFTER_REFUSAL if refusals else _AFTER_LOAD
        count = _best(share * saved - load, whole)
        if usual is not None:
            count = max(count, _best(share * saved - usual, whole))
        return Verdict(count, float(load[-1]), float(saved[-1]))

    def growth(self) -> float:
        """Return by which share of what it takes alone each token before it makes a token take longer to compute, on
        the device that most was seen of; 0 where that is not known."""
        with self._lock:
            seen = [cost for cost in self._prefill.values() if cost.knows(1)]
            if not seen:
                return 0.0
            _, token, pair = max(seen, key=lambda cost: cost.seen_s).coefficients()
            return max(0.0, float(pair / token)) if token > 0 else 0.0

    def faster_codec(self, codec: str, tier: str) -> tuple[str, float] | None:
        """Return the codec without a profile whose blocks load soonest from a tier, and how many times longer those of
        `codec` take; None if that is no notable difference, or nothing is known of the tier."""
        with self._lock:
            line = self.load.line(tier)
            if line is None:
                return None
            seconds = {
                name: max(line[1] / RATIOS.get(name, 1.0), self.load.rate(name) / self.load.threads)
                for name in (codec, "entropy", "splitzip")
            }
        best = min(seconds, key=lambda name: seconds[name])
        times = seconds[codec] / seconds[best]
        return (best, times) if times > _NOTABLE else None

    def note(self, tokens: int, refused: bool) -> None:
        """Remember what was decided on so many tokens."""
        with self._lock:
            size = tokens.bit_length()
            self._refused[size] = self._refused.get(size, 0) + 1 if refused else 0

    def _saved(self, ends: Sequence[int], total: int, kind: str) -> F64 | None:
        """Seconds that computing the first tokens takes, `[m]`; None if that is not known."""
        cost = self._prefill.get(kind)
        if cost is not None and cost.knows(ends[-1]):
            return cost.saved(ends, total)
        return np.array(ends, np.float64) / self.tokens_per_s if self.tokens_per_s else None

    # ---- what is known -------------------------------------------------------------------------------------------

    def prefill_seconds(self, tokens: int, *, start: int = 0, device: Any = "cpu") -> float | None:
        """Return about how long the model takes to compute so many tokens; None if that is not known.

        Raises:
            ValueError: a number is out of range.
        """
        for name, number, least in (("tokens", tokens, 1), ("start", start, 0)):
            check_integer(name, number, least, _MOST_TOKENS)
        with self._lock:
            cost = self._prefill.get(device_kind(device))
            if cost is not None and cost.knows(start + tokens):
                return cost.seconds(tokens, start)
        return tokens / self.tokens_per_s if self.tokens_per_s else None

    def stats(self) -> dict[str, float]:
        """Return numbers: what passes, reads and decoding are estimated to take; only what is known."""
        found: dict[str, float] = {"enabled": int(self.enabled)}
        with self._lock:
            for kind, cost in self._prefill.items():
                found[f"{kind}_prefill_seen_s"] = cost.seen_s
                if not len(cost.curve):
                    continue
                names = ("pass_s", "token_s", "pair_s")
                found |= {f"{kind}_{name}": x for name, x in zip(names, cost.coefficients().tolist(), strict=True)}
            for tier in self.load.reads:
                latency, per_byte = self.load.line(tier) or (0.0, 0.0)
                found |= {f"{tier}_latency_s": latency, f"{tier}_s_per_MB": per_byte * 1e6}
            for codec in self.load.rates:
                found[f"{codec}_decode_s_per_MB"] = self.load.rate(codec) * 1e6
        return found

    def news(self) -> Estimates | None:
        """Return what the next process should know; None if it is nothing new, or hardly any pass was seen."""
        with self._lock:
            if not self._is_news or sum(cost.seen_s for cost in self._prefill.values()) < _WORTH_KEEPING_S:
                return None
            return Estimates(
                {
                    kind: (cost.seen_s, cost.reach, cost.curve.observations(), tuple(cost.short))
                    for kind, cost in self._prefill.items()
                    if len(cost.curve)
                },
                {tier: curve.observations() for tier, curve in self.load.reads.items()},
                {codec: (self.load.rate(codec) * MIB, MIB) for codec in self.load.rates},
                {kind: curve.observations() for kind, curve in self.load.rest.items()},
            )

    def restore(self, estimates: Estimates) -> None:
        """Begin with what an earlier process saw; what is seen from now on counts more."""
        with self._lock:
            for kind, (seen, reach, passes, short) in estimates.prefill.items():
                cost = self._prefill[kind] = PrefillCost(kind, seen, reach)
                cost.curve.restore(passes)
                cost.short.extend(short)
            self.load.restore(estimates.reads, estimates.rates, estimates.rest)


def _best(gain: F64, whole: bool) -> int:
    """How many blocks gain most, the more the better; 0 if none gains."""
    best = len(gain) - 1 if whole else len(gain) - 1 - int(np.argmax(gain[::-1]))
    return best + 1 if gain[best] > 0 else 0


def device_kind(device: Any) -> str:
    """Return the type of a device, as "cuda" of "cuda:1"; None is the CPU."""
    return "cpu" if device is None else str(device).partition(":")[0]


def _is_off(expected: float, seconds: float) -> bool:
    return abs(expected - seconds) > _NOISE_S and not 1 / _CHANGED < seconds / expected < _CHANGED
