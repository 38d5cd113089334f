"""What a workload comes to, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Bytes of a workload. put: raw, of all caches that were put. new: raw, of what prefix hashing has to store; part:
    of that, in sequences with a counterpart. stored: of each way of storing, the bytes of `new` and of `part`."""

    put: int = 0
    new: int = 0
    part: int = 0
    stored: dict[str, list[int]] = field(default_factory=dict)

    def arrive(self, put: int, new: int, counterpart: bool, stored: dict[str, int]) -> None:
        """Adds one sequence. stored: the bytes that each way took for its `new` raw bytes."""
        self.put += put
        self.new += new
        self.part += new * counterpart
        for way, size in stored.items():
            sums = self.stored.setdefault(way, [0, 0])
            sums[0] += size
            sums[1] += size * counterpart

    def ratios(self, way: str) -> dict[str, float]:
        """By metric."""
        everything, part = self.stored[way]
        stored = self.new / everything
        ratio = self.part / part if self.part else stored
        return {"ratio": ratio, "ratio_stored": stored, "ratio_put": self.put / everything}
