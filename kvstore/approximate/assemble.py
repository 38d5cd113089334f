"""A cache for tokens whose exact prefix was never computed, put together from stored blocks with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvstore.approximate.estimates import ProfileEstimates
from kvstore.approximate.plan import Plan, plan
from kvstore.codecs import KVView
from kvstore.codecs.donor.rotate import rotate_keys
from kvstore.core.approximate import Approximate, Candidate, ReusedSpan
from kvstore.core.results import ApproximateLayers, Hit
from kvstore.core.rope import can_move
from kvstore.core.tokens import Tokens
from kvstore.dedup.donor_cache import DonorBlock, DonorLost, DonorReader, DonorUnreadable
from kvstore.errors import CodecError
from kvstore.metrics import Metric, Metrics
from kvstore.read.block_read import BlockRead
from kvstore.read.get import GetRequest, Getter
from kvstore.read.result import allocate
from kvstore.residency.residency import Residency
from kvstore.timing import Where


@dataclass(frozen=True)
class Assembler:
    """Serves approximate gets: an exact prefix, and behind it rows of donors. Thread-safe: has no state of its own.

    Attributes:
        reader: gives the donors.
        getter: serves the exact prefix, and the whole get if nothing can be reused.
        estimates: of the store's model.
    """

    residency: Residency
    reader: DonorReader
    getter: Getter
    estimates: ProfileEstimates
    metrics: Metrics

    def get(self, approximate: Approximate, request: GetRequest) -> Hit | None:
        """Return the cache of the longest stored prefix, and behind it what may be reused under `approximate`.

        If nothing may be reused, this is `Getter.get`.
        """
        reads = self.getter.lookup.reads(request.namespace, request.tokens)
        exact = reads[-1].end if reads else 0
        planned = self.plan(approximate, request.namespace, request.tokens, exact)
        if planned is None:
            return self.getter.fetch(request, reads)
        return self.assemble(planned, request, reads) or self.getter.get(request)

    def plan(self, request: Approximate, namespace: bytes, tokens: Tokens, exact: int) -> Plan | None:
        """Plan what stands behind the first `exact` tokens, which are stored; None if it does not pay."""
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
            if shift == 0 or can_move(self.reader.layout):
                candidates.append(Candidate(span.start, span.length, span.run, shift, span.record, span.donor_start))
        if not candidates:
            return None
        estimates = self.estimates.get()
        if estimates is None and not request.probe:
            self.metrics.add(Metric.APPROXIMATE_UNKNOWN)
        return plan(request, exact, len(tokens), candidates, estimates)

    def assemble(self, planned: Plan, request: GetRequest, reads: Sequence[BlockRead]) -> Hit | None:
        """Return the cache of a plan behind the exact blocks, whose sources are released.

        Returns:
            A `Hit`, or None, which is counted, if a block left since the plan was made.
        """
        exact = reads[-1].end if reads else 0
        if request.lazy:
            self.getter.count_not_lazy("it is approximate")
        try:
            reserve = request.reserve_behind(planned.tokens)
            out = allocate(self.reader.layout, planned.tokens, reserve, self.getter.fetcher.results)
        except BaseException:
            self.residency.release([read.source for read in reads])
            raise
        layers = out.layers(planned.tokens)
        view = KVView.of_layers(self.reader.layout, [(k[0], v[0]) for k, v in layers], checked=True)
        fetcher = self.getter.fetcher
        good, tiers = fetcher.fetch(reads, view) if reads else (0, {})
        if good < len(reads) or not self._fill(planned, request.tokens, exact, view):
            self.metrics.add(Metric.APPROXIMATE_FAILED)
            return None
        tiers["donors"] = sum(span.count for span in planned.spans)
        reason = self.getter.count_short(request, reads, good, planned.tokens)
        hit = self.getter.hit(request, out, layers, planned.tokens, tiers, reason, where=Where("donors", "mixed"))
        self.metrics.add(Metric.GET_APPROXIMATE)
        return replace(
            hit,
            layers=ApproximateLayers(hit.layers),
            exact_tokens=exact,
            spans=planned.spans,
            recompute=planned.recompute,
            kl=planned.kl,
            estimates=self.estimates.get(),
        )

    def _fill(self, planned: Plan, tokens: Tokens, end: int, out: KVView) -> bool:
        """Writes the rows of the plan's spans into `out`, which begins at position 0. What is behind `end` and in no
        span is to be recomputed, and gets zeros. Returns False if a donor left since the plan was made."""
        records = list(dict.fromkeys(span.donor for span in planned.spans))
        self.residency.use_donors(records)
        blocks = dict(zip(records, self.getter.fetcher.executor.map(self._block, records), strict=True))
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
        self.getter.fetcher.executor.map(lambda move: rotate_keys(*move), moves)
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
    """(start, count, shift) of neighbouring spans that move together."""
    moves: list[tuple[int, int, int]] = []
    for span in spans:
        start, count, shift = moves[-1] if moves else (-1, 0, 0)
        if moves and shift == span.shift and start + count == span.start:
            moves[-1] = (start, count + span.count, shift)
        else:
            moves.append((span.start, span.count, span.shift))
    return moves
