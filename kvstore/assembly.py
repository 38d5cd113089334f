"""A cache for tokens whose exact prefix was never computed, put together from stored blocks with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.approximate import Approximate, ReusedSpan
from kvstore.approximate_plan import Candidate, Plan, plan
from kvstore.codecs import KVView
from kvstore.codecs.rotate import rotate_keys
from kvstore.errors import CodecError
from kvstore.families.reader import DonorBlock, DonorLost, DonorReader, DonorUnreadable
from kvstore.fetch import Fetcher, Part, release
from kvstore.hit import ApproximateLayers, Hit
from kvstore.identity import Tokens
from kvstore.metrics import Metrics
from kvstore.residency import Residency
from kvstore.result import allocate, deliver, stays
from kvstore.rope import can_rotate


@dataclass(frozen=True)
class Assembler:
    """Thread-safe."""

    residency: Residency
    reader: DonorReader
    fetcher: Fetcher
    metrics: Metrics

    def plan(self, request: Approximate, namespace: bytes, tokens: Tokens, exact: int) -> Plan | None:
        """What could stand behind the first `exact` tokens, which are stored; None where it does not pay."""
        content = self.residency.content
        if content is None or exact >= len(tokens):
            return None
        found = content.find(namespace, np.ascontiguousarray(tokens), exact)
        candidates = []
        for span in found:
            start = self.reader.start(span.record)
            if start is None:
                continue
            shift = span.start - start - span.donor_start
            if shift == 0 or can_rotate(self.reader.layout):
                candidates.append(Candidate(span.start, span.length, span.run, shift, span.record, span.donor_start))
        return plan(request, exact, len(tokens), candidates) if candidates else None

    def assemble(
        self, planned: Plan, parts: Sequence[Part], tokens: Tokens, device: Any, reserve: int, begin: float
    ) -> Hit | None:
        """The cache of the plan behind the exact parts, whose disk entries it releases; None, which is counted, where
        a block left since. begin: when the get began."""
        reserve = reserve if stays(device) else 0
        exact = parts[-1].start + len(parts[-1].tokens) if parts else 0
        try:
            result = allocate(self.reader.layout, planned.tokens, reserve)
        except BaseException:
            release(self.residency, [part.source for part in parts])
            raise
        layers = result.layers(planned.tokens)
        out = KVView.of_layers(self.reader.layout, [(k[0], v[0]) for k, v in layers])
        good, tiers = self.fetcher.fetch(parts, out) if parts else (0, {})
        if good < len(parts) or not self._fill(planned, tokens, exact, out):
            self.metrics.add("approximate_failed")
            return None
        layers = deliver(layers, device)
        tiers["donors"] = sum(span.count for span in planned.spans)
        self.metrics.add("get_hits")
        self.metrics.add("get_approximate")
        for name, amount in tiers.items():
            self.metrics.add(f"get_hit_tokens_{name}", amount)
        return Hit(
            planned.tokens,
            tiers,
            time.perf_counter() - begin,
            ApproximateLayers(layers),
            exact_tokens=exact,
            spans=planned.spans,
            recompute=planned.recompute,
            kl=planned.kl,
            _room=[result.room] if reserve else [],
        )

    def _fill(self, planned: Plan, tokens: Tokens, end: int, out: KVView) -> bool:
        """Writes the rows of the plan's spans into `out`, which begins at position 0, and zeros behind `end` where
        there are none, which are to be recomputed. False where a donor left since the plan was made."""
        records = list(dict.fromkeys(span.donor for span in planned.spans))
        self.residency.use_donors(records)
        blocks = dict(zip(records, self.fetcher.executor.map(self._block, records), strict=True))
        for span in planned.spans:
            block = blocks[span.donor]
            rows = slice(span.donor_start, span.donor_start + span.count)
            if block is None or block.start + span.donor_start + span.shift != span.start:
                return False
            if not np.array_equal(block.tokens[rows], tokens[span.start : span.end]):
                return False
            _clear(out, end, span.start)
            end = span.end
            block.view.narrow(span.donor_start, span.count).copy_to(out.narrow(span.start, span.count))
        _clear(out, end, planned.tokens)
        moves = [(out.narrow(start, count), shift) for start, count, shift in _moves(planned.spans)]
        list(self.fetcher.executor.map(lambda move: rotate_keys(*move), moves))
        return True

    def _block(self, record: int) -> DonorBlock | None:
        try:
            return self.reader.of([record])[0]
        except (DonorLost, DonorUnreadable, CodecError):
            return None


@torch.inference_mode()  # the tensors may have been made in it
def _clear(out: KVView, start: int, end: int) -> None:
    """Zeros in positions [start, end): memory is handed out as it is."""
    if end > start:
        for tensor in out.narrow(start, end - start).tensors():
            tensor.zero_()


def _moves(spans: Sequence[ReusedSpan]) -> list[tuple[int, int, int]]:
    """(start, count, shift) of runs that move together."""
    moves: list[tuple[int, int, int]] = []
    for span in spans:
        start, count, shift = moves[-1] if moves else (-1, 0, 0)
        if moves and shift == span.shift and start + count == span.start:
            moves[-1] = (start, count + span.count, shift)
        else:
            moves.append((span.start, span.count, span.shift))
    return moves
