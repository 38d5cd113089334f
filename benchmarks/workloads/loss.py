"""What caches decoded from donors with loss do to the model: bits a value, and the KL of what comes next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common import Rows
from benchmarks.workloads.arrival import Arrival, Ids
from benchmarks.workloads.caches import put
from benchmarks.workloads.ledger import Ledger
from kvstore import KVStore
from kvstore.calibration.lossy.quality import divergences, log_probabilities

NEAR = 64  # tokens next to what was decoded


@dataclass
class Loss:
    """Of one workload, in `store`, which codes members in steps. kl, near: a number an arrival, nats; top: the share
    of equal best tokens; members: what blocks with donors take, of their raw bytes."""

    store: KVStore
    ledger: Ledger = field(default_factory=Ledger)
    kl: list[float] = field(default_factory=list)
    near: list[float] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    members: float = 0.0

    def arrive(self, model: Any, arrival: Arrival, layers: Any) -> None:
        """Puts an exact cache; of one with a counterpart, what is got predicts the tokens that follow."""
        size, new = put(self.store, arrival.tokens, layers)
        self.ledger.arrive(0, new, arrival.counterpart, {"lossy": size})
        counters = self.store.stats()["counters"]
        if counters.get("member_raw_bytes"):
            self.members = counters["member_bytes"] / counters["member_raw_bytes"]
        if not arrival.counterpart or arrival.following is None:
            return
        hit = self.store.get(arrival.tokens, reserve=0)
        if hit is None or hit.tokens < len(arrival.tokens):
            raise SystemExit("a sequence that was put is not stored")
        want, found = (predicted(model, arrival.following, x) for x in (layers, hit.layers))
        each = divergences(want, found)
        self.kl.append(each.mean().item())
        self.near.append(each[:NEAR].mean().item())
        self.top.append((want.argmax(-1) == found.argmax(-1)).float().mean().item())

    def report(self, rows: Rows, name: str) -> None:
        if not self.kl:
            return
        case, (_, stored) = f"donor/lossy/{name}", self.ledger.stored["lossy"]
        rows.add(case, "bits_per_value", 8 * stored / (self.ledger.part / 2), "bits")  # bf16: two bytes a value
        if self.members:
            rows.add(case, "bits_per_value_members", 16 * self.members, "bits")
        for metric, values, unit in (
            ("kl", self.kl, "nats"),
            ("kl_first64", self.near, "nats"),
            ("top1", self.top, "share"),
        ):
            rows.add(case, metric, sum(values) / len(values), unit)
        rows.add(case, "kl_max", max(self.kl), "nats")


@torch.inference_mode()
def predicted(model: Any, following: Ids, layers: Any) -> torch.Tensor:
    """Log-probabilities after each token that follows the cache: float32 `[n, vocabulary]`."""
    ids = torch.tensor(following[None].astype("int64"))
    return log_probabilities(model, ids, [tensor for pair in layers for tensor in pair])
