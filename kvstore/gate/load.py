"""How long a get takes, from the reads and decodings that were seen."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from kvstore.config import MIB
from kvstore.gate.curve import F64, Curve, Observation, PriorRow

TENSORS = "tensors"
"""Stands for the codec of blocks that are tensors already."""
_HALF_LIFE = 8.0  # storage changes faster than a model
_BLOCKS, _USUAL_BLOCKS = 64, 32  # the newest of a codec; as if so many had been seen that took what is usual
_LEAST_GETS = 3  # fewer say less of the rest of a get than what is usual
_RANGE_BYTES = 2 * MIB  # read at once; while it is decoded, the next is read
_LATENCY_S = 1e-4  # of a read, where reads of one size alone were seen
_FAST_DISK = 3e9  # bytes a second
_OVERHEAD_S = 3e-4  # of a get beside reading and decoding, before any was seen

# Raw bytes a second and core, as README.md has them: before any block was decoded.
NOMINAL: Mapping[str, float] = MappingProxyType(
    {TENSORS: 4e9, "raw": 4e9, "splitzip": 5e9, "entropy": 1.2e9, "zstd": 0.6e9, "predictive": 0.4e9}
)
_UNKNOWN_CODEC = 0.3e9
RATIOS: Mapping[str, float] = MappingProxyType(
    {"raw": 1.0, "splitzip": 1.33, "entropy": 1.55, "zstd": 1.2, "predictive": 1.9}
)
"""Raw bytes by stored bytes of bfloat16 caches, as README.md has them; a model may differ by a tenth."""


@dataclass(frozen=True)
class Part:
    """A stored block, as far as loading it takes time. Immutable.

    Attributes:
        tier: the storage that it must be read from; None if it is in memory.
        codec: what it is decoded with, or `TENSORS`.
        nbytes: bytes to read.
        tokens: how many tokens of it are wanted.
    """

    tier: str | None
    codec: str
    nbytes: int
    tokens: int


class DecodeRate:
    """Seconds that a codec takes for a raw byte, on one thread: what the faster ones of the newest blocks took. What
    makes the others slow is other work, which would slow computing, too.

    Args:
        usual: what is expected before any block was seen.
    """

    def __init__(self, usual: float) -> None:
        self._newest = deque([usual] * _USUAL_BLOCKS, _BLOCKS)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Note that decoding so many raw bytes took so long."""
        self._newest.append(seconds / nbytes)

    def restore(self, rate: float) -> None:
        """Begin with what an earlier process saw."""
        self._newest.extend([rate] * _BLOCKS)

    @property
    def rate(self) -> float:
        """Seconds a raw byte."""
        return sorted(self._newest)[len(self._newest) // 4]


@dataclass
class LoadCost:
    """Of one store: reading by tier, decoding by codec, and the rest of a get by device.

    Not thread-safe: its owner has the lock.

    Attributes:
        bytes_per_token: raw.
        threads: that decode at the same time.
        reads: by tier: features 1 and bytes; of all that a get reads from it, with what waits for others.
        rates: by codec.
        rest: by device: features 1 and raw bytes; what a get takes beside reading and decoding.

    Example:
        >>> cost = LoadCost(bytes_per_token=1000, threads=2)
        >>> cost.observe_read("disk", 100_000, 0.01)
        >>> seconds = cost.seconds([Part("disk", "raw", 100_000, 100)] * 2, "cpu")
        >>> [round(float(x), 2) for x in seconds]
        [0.01, 0.02]
    """

    bytes_per_token: int
    threads: int
    reads: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, DecodeRate] = field(default_factory=dict)
    rest: dict[str, Curve] = field(default_factory=dict)

    def observe_read(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note what the reads of one get took, from the begin of the first to the end of the last."""
        self.reads.setdefault(tier, Curve(_HALF_LIFE)).observe((1.0, float(nbytes)), seconds)

    def observe_decode(self, codec: str, nbytes: int, seconds: float) -> None:
        """Note what decoding so many raw bytes took."""
        self._rate(codec).observe(nbytes, seconds)

    def observe_rest(self, device: str, tokens: int, seconds: float) -> None:
        """Note what a get of so many tokens took beside reading and decoding."""
        curve = self.rest.setdefault(device, Curve(_HALF_LIFE, least=True))
        curve.observe((1.0, float(tokens * self.bytes_per_token)), seconds)

    def restore(
        self,
        reads: Mapping[str, Sequence[Observation]],
        rates: Mapping[str, tuple[float, float]],
        rest: Mapping[str, Sequence[Observation]],
    ) -> None:
        """Begin with what an earlier process saw."""
        for mine, theirs, least in ((self.reads, reads, False), (self.rest, rest, True)):
            for name, seen in theirs.items():
                mine[name] = Curve(_HALF_LIFE, least)
                mine[name].restore(seen)
        for codec, (seconds, nbytes) in rates.items():
            self._rate(codec).restore(seconds / nbytes)

    def line(self, tier: str) -> tuple[float, float] | None:
        """Return latency in seconds, and seconds a byte, of a tier; None if none of its reads was seen."""
        curve = self.reads.get(tier)
        if curve is None or not len(curve):
            return None
        latency, per_byte = curve.fit(_expected_read).tolist()
        return latency, per_byte

    def rate(self, codec: str) -> float:
        """Return seconds a raw byte of a codec, on one thread."""
        return self.rates[codec].rate if codec in self.rates else usual_rate(codec)

    def seconds(self, parts: Sequence[Part], device: str, usual: bool = False) -> F64:
        """Return what a get of the first part takes, of the first two, and so on, `[m]`. Lines of all tiers are known.

        Reading and decoding overlap, but for the first range that is read.

        Args:
            parts: the blocks, in order.
            device: where they are wanted.
            usual: take what is done in memory to be as quick as it usually is, whatever was seen.
        """
        rates = {codec: (usual_rate if usual else self.rate)(codec) for codec in {part.codec for part in parts}}
        tokens = np.cumsum([part.tokens for part in parts])
        raw = np.array([part.tokens for part in parts], np.float64) * self.bytes_per_token
        decode = np.cumsum(raw * [rates[part.codec] for part in parts]) / self.threads
        read, nbytes = np.zeros(len(parts)), np.zeros(len(parts))
        for tier in {part.tier for part in parts} - {None}:
            latency, per_byte = self.line(str(tier)) or (0.0, 0.0)
            here = np.cumsum([part.nbytes if part.tier == tier else 0 for part in parts])
            read += latency * (here > 0) + per_byte * here
            nbytes += here
        ranges = np.minimum(np.arange(1, len(parts) + 1), np.maximum(2 * self.threads, nbytes / _RANGE_BYTES))
        overlapped = np.maximum(read, decode) + np.minimum(read, decode) / ranges
        return np.asarray(overlapped + self._rest(tokens, device, usual))

    def loading(self, parts: Sequence[Part]) -> tuple[float, float]:
        """Return the seconds that reading blocks takes, as from a fast disk where nothing is known of their tier, and
        those that decoding them takes one thread."""
        nbytes = defaultdict[str, int](int)
        for part in parts:
            if part.tier is not None:
                nbytes[part.tier] += part.nbytes
        lines = {tier: self.line(tier) or (0.0, 1 / _FAST_DISK) for tier in nbytes}
        reading = sum(latency + per_byte * nbytes[tier] for tier, (latency, per_byte) in lines.items())
        rates = {codec: self.rate(codec) for codec in {part.codec for part in parts}}
        return reading, sum(part.tokens * rates[part.codec] for part in parts) * self.bytes_per_token

    def _rate(self, codec: str) -> DecodeRate:
        if codec not in self.rates:
            self.rates[codec] = DecodeRate(usual_rate(codec))
        return self.rates[codec]

    def _rest(self, tokens: F64, device: str, usual: bool) -> F64:
        curve = self.rest.get(device)
        if usual or curve is None or len(curve) < _LEAST_GETS:
            return np.full(len(tokens), _OVERHEAD_S)
        latency, per_byte = curve.fit(_expected_rest)
        return np.asarray(latency + per_byte * tokens * self.bytes_per_token)


def usual_rate(codec: str) -> float:
    """Return seconds a raw byte of a codec, on one thread, before any block was seen."""
    return 1 / NOMINAL.get(codec, _UNKNOWN_CODEC)


def _expected_read() -> list[PriorRow]:
    return [((0.02 / _LATENCY_S, 0.0), 0.02)]


def _expected_rest() -> list[PriorRow]:
    return [((0.02 / _OVERHEAD_S, 0.0), 0.02)]
