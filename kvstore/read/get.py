"""A get, from tokens to a hit: looks the prefix up, decides where to decode it, and fetches it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.arguments import check_integer
from kvstore.core.explanation import Reason
from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.lazy_layers import LazyLayers
from kvstore.core.results import Hit
from kvstore.core.rope import check_length
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.metrics import Metric, Metrics, hit_tokens
from kvstore.read.block_read import BlockRead
from kvstore.read.fetch import Begun, Fetcher
from kvstore.read.layerwise import LayerDecode, first_share, free_processors
from kvstore.read.lookup import Lookup
from kvstore.read.place import place_of
from kvstore.read.placement import Placement
from kvstore.read.remote import RemoteReader, RemoteRequest, RemoteRun
from kvstore.read.remote_resume import RemoteResumer, Resumed
from kvstore.read.result import OutputBuffers, allocate, check_device, is_on_cpu, to_device
from kvstore.read.worth import Worth
from kvstore.timing import NOWHERE, Where

# Reserved behind the tensors of a hit, for what is generated first.
_RESERVE_TOKENS = 64
_MOST_RESERVE = 1 << 24


@dataclass(frozen=True)
class GetRequest:
    """What a caller of `KVStore.get` asked for; checked.

    Attributes:
        namespace: its digest.
        tokens: the longest stored prefix of these is wanted.
        given: how many tokens the caller's sequence has.
        device: where the tensors go.
        on_cpu: whether that is the CPU.
        reserve: tokens to reserve behind the tensors; None for as many as are likely to follow.
        begin: when the get began, by `time.perf_counter`.
        gated: whether to leave out what is computed sooner than loaded.
        lazy: whether the last layers may come later than the first.
    """

    namespace: bytes
    tokens: Tokens
    given: int
    device: Any
    on_cpu: bool
    reserve: int | None
    begin: float
    gated: bool = False
    lazy: bool = False

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        tokens: Any,
        namespace: bytes,
        max_tokens: int | None,
        device: Any,
        reserve: int | None,
        gated: bool = False,
        lazy: bool = False,
    ) -> GetRequest:
        """Check the arguments of `KVStore.get`.

        Raises:
            UnsupportedLength: sequences of this length have other keys than those of the layout.
            ValueError: an argument is malformed; as ConfigError, if there is no such device.
        """
        begin = time.perf_counter()
        ids = as_tokens(tokens)
        check_length(layout, len(ids))
        wanted = ids[: check_integer("max_tokens", max_tokens, 1)]
        check_integer("reserve", reserve, 0, _MOST_RESERVE)
        check_device(device)
        return cls(namespace, wanted, len(ids), device, is_on_cpu(device), reserve, begin, gated, lazy)

    def reserve_behind(self, count: int) -> int:
        """Return how many tokens to reserve behind the first `count`; 0 on other devices than the CPU."""
        if not self.on_cpu:
            return 0
        return min(self.given - count, count) + _RESERVE_TOKENS if self.reserve is None else self.reserve


@dataclass(frozen=True)
class Getter:
    """Serves exact gets and prefetches. Thread-safe: has no state of its own."""

    lookup: Lookup
    placement: Placement
    fetcher: Fetcher
    worth: Worth
    layout: KVLayout
    metrics: Metrics
    remote: RemoteReader | None = None
    resumer: RemoteResumer | None = None

    def get(self, request: GetRequest) -> Hit | None:
        """Return the cache of the longest stored prefix, as far as it is worth loading; None for nothing."""
        reads = self.lookup.reads(request.namespace, request.tokens)
        kept = self.worth.kept(reads, request.device, request.given) if request.gated else reads
        withheld = (reads[-1].end if reads else 0) - (kept[-1].end if kept else 0)
        if self.resumer is not None and not withheld:
            return self._at_place(self.resumer, request, reads)
        run = None if withheld else self._begin(request, reads)
        if run is None or not run.checks:
            return self.fetch(request, kept, withheld if run is None else run.withheld)
        try:
            return self._fetch_with(run, request, reads)
        finally:
            run.done()

    def _begin(self, request: GetRequest, reads: Sequence[BlockRead]) -> RemoteRun | None:
        """Begins to read what follows in the remote tier, if there is one."""
        if self.remote is None:
            return None
        try:
            return self.remote.begin(self._wanted(request, reads))
        except BaseException:
            self.fetcher.residency.release([read.source for read in reads])
            raise

    def _wanted(self, request: GetRequest, reads: Sequence[BlockRead]) -> RemoteRequest:
        """What is asked of the remote tier, behind blocks that are here."""
        gated = request.gated and self.worth.gate.knows(request.device)
        return RemoteRequest(
            self.lookup.root(request.namespace),
            request.namespace,
            request.tokens,
            reads[-1].end if reads else 0,
            request.given,
            request.device,
            gated,
            self.worth.parts(reads) if gated else (),
        )

    def _at_place(self, resumer: RemoteResumer, request: GetRequest, reads: Sequence[BlockRead]) -> Hit | None:
        """Return the cache at the last place that can be gone on from, here or in the remote tier; None for none."""
        sources = [read.source for read in reads]
        try:
            wanted = self._wanted(request, reads)
            got = resumer.resume(wanted, request.reserve_behind) if wanted.local < len(wanted.tokens) else None
        except BaseException:
            self.fetcher.residency.release(sources)
            raise
        if not isinstance(got, Resumed):
            return self.fetch(request, reads, known=got)
        self.fetcher.residency.release(sources)
        if request.lazy:
            self.count_not_lazy("layers have windows or states")
        end = got.out.view.tokens
        reason = self.count_short(request, got.reads, len(got.reads), end, known=got.why)
        place = place_of([read.source for read in got.reads])
        return self._count_saved(
            request, self.hit(request, got.out, got.out.layers(end), end, got.tiers, reason, 0, place)
        )

    def _fetch_with(self, run: RemoteRun, request: GetRequest, reads: Sequence[BlockRead]) -> Hit | None:
        """Return the cache of local blocks and of those that come behind them; None if there is none."""
        try:
            if request.lazy:
                self.count_not_lazy("the rest comes from the remote tier")
            out = allocate(self.layout, run.end, request.reserve_behind(run.end), self.fetcher.results)
        except BaseException:
            self.fetcher.residency.release([read.source for read in reads])
            raise
        good, tiers = self.fetcher.fetch(reads, out.view) if reads else (0, dict[str, int]())
        have = list(reads[:good])
        while good == len(reads) and (came := run.next()):
            if have and have[-1].end > came[0].start:  # the beginning of this block: its rows are written anew
                partial = have.pop()
                tiers[partial.source.tier] -= len(partial.tokens)
            decoded, more = self.fetcher.fetch(came, out.view)
            have += came[:decoded]
            tiers = {name: tiers.get(name, 0) + more.get(name, 0) for name in {**tiers, **more}}
            if decoded < len(came):
                run.refuse(len(came) - decoded)
        if not have:
            self._count_miss(request, reads, 0, run.why)
            return None
        end = have[-1].end
        shown, number = (reads, good) if good < len(reads) else (have, len(have))
        withheld = run.withheld if good == len(reads) and run.why is None else 0
        reason = self.count_short(request, shown, number, end, withheld, run.why)
        place = place_of([read.source for read in have])
        tiers = {name: count for name, count in tiers.items() if count}
        return self._count_saved(request, self.hit(request, out, out.layers(end), end, tiers, reason, withheld, place))

    def fetch(
        self, request: GetRequest, reads: Sequence[BlockRead], withheld: int = 0, known: Reason | None = None
    ) -> Hit | None:
        """Return the cache of blocks that were looked up, and release their sources; None if the first is lost.

        withheld: tokens behind them that are stored and not worth loading. known: why no more comes, if that is known.
        """
        if not reads:
            self._count_miss(request, reads, withheld, known)
            return None
        count = reads[-1].end
        try:
            is_lazy = self._is_lazy(request)
            begun = self.fetcher.begin(reads, by_layers=len(self.layout.layers) if is_lazy else 0)
            where = self.placement.decode_device(reads, request.device)
            out = allocate(self.layout, count, request.reserve_behind(count), self.fetcher.results, where)
            layers: Any = out.layers(count)  # while the disk reads
        except BaseException:
            self.fetcher.residency.release([read.source for read in reads])  # or their space is never used again
            raise
        later = self._later(reads, begun) if is_lazy else None
        fetching = time.perf_counter()
        good, tiers = self.fetcher.fetch(reads, out.view, later=later, begun=begun)
        fetched = time.perf_counter() - fetching
        if not good:
            self._count_miss(request, reads)
            return None
        end = reads[good - 1].end
        if good < len(reads) and self.layout.is_grouped:  # a shorter prefix needs other tokens of its windows
            return self.fetch(request, self.lookup.reads(request.namespace, request.tokens[:end]))
        withheld = withheld if good == len(reads) else 0
        reason = self.count_short(request, reads, good, end, withheld, known)
        place = place_of([read.source for read in reads[:good]])
        if end < count:
            layers = out.layers(end)
        if later is not None and later.begin(out.view, end):
            layers = LazyLayers(layers, later.ready)
        hit = self.hit(request, out, layers, end, tiers, reason, withheld, place)
        self.worth.gate.observe_rest(request.device, end, hit.seconds - fetched)
        return self._count_saved(request, hit)

    def _is_lazy(self, request: GetRequest) -> bool:
        """Whether the last layers are to be decoded later: if that is asked for and possible."""
        if not request.lazy:
            return False
        if not request.on_cpu or self.layout.is_grouped:
            self.count_not_lazy("it is for another device" if not request.on_cpu else "layers have windows or states")
            return False
        if not free_processors():
            self.count_not_lazy("torch computes on all processors, so that layers that come later take longer")
            return False
        return True

    def _later(self, reads: Sequence[BlockRead], begun: Begun) -> LayerDecode:
        """What is to decode the last layers."""
        fetcher, striping = self.fetcher, begun.striping
        share = 0.0  # the first layer alone: no other one was read
        if striping is None:
            reading, decoding = fetcher.gate.loading(self.worth.parts(reads))
            share = first_share(reading, decoding, fetcher.threads, free_processors())
        layers = len(self.layout.layers)
        return LayerDecode(fetcher.residency, fetcher.executor, fetcher.threads, fetcher.gate, layers, share, striping)

    def count_not_lazy(self, why: str) -> None:
        """Count a get that decodes all layers at once, though its caller would take them one by one."""
        self.metrics.add(Metric.FALLBACK_NOT_LAZY, because=why)

    def _count_saved(self, request: GetRequest, hit: Hit) -> Hit:
        computing = self.worth.gate.prefill_seconds(hit.tokens, device=request.device)
        if computing is not None:
            self.metrics.add(Metric.GET_SAVED_S, max(0.0, computing - hit.seconds))
        return hit

    def count_short(
        self,
        request: GetRequest,
        reads: Sequence[BlockRead],
        good: int,
        tokens: int,
        withheld: int = 0,
        known: Reason | None = None,
    ) -> Reason:
        """Return why only `tokens` tokens are returned, and count it; STORED if they are all. The first `good` of
        `reads` were read; behind them so many tokens were withheld. known: the reason, if all of `reads` were read."""
        if tokens >= len(request.tokens):
            return Reason.STORED
        reason = Reason.NOT_WORTH
        if not withheld:
            reason = (
                known
                if known is not None and good == len(reads)
                else self.lookup.why_short(request.namespace, request.tokens, reads, good)
            )
        if reason.metric is not None:
            self.metrics.add(reason.metric)
        return reason

    def _count_miss(
        self, request: GetRequest, reads: Sequence[BlockRead], withheld: int = 0, known: Reason | None = None
    ) -> None:
        self.metrics.add(Metric.GET_MISSES)
        self.count_short(request, reads, 0, 0, withheld, known)

    def hit(
        self,
        request: GetRequest,
        out: OutputBuffers,
        layers: KVLayers,
        tokens: int,
        tiers: dict[str, int],
        reason: Reason,
        withheld: int = 0,
        where: Where = NOWHERE,
    ) -> Hit:
        """Make the result for the caller, and count it.

        Args:
            layers: those of `out`, of as many tokens as are good.
            tokens: how many that are.
            tiers: tokens by where they came from.
            reason: why they are no more.
            withheld: how many more are stored, and not worth loading.
            where: what the time of the get is told apart by.
        """
        layers = to_device(layers, request.device)
        self.metrics.add(Metric.GET_HITS)
        for name, amount in tiers.items():
            self.metrics.add(hit_tokens(name), amount)
        reserved = [lambda: out.tensors] if out.has_reserve else []  # made with the first cache, if there is one
        states = tuple(state if request.on_cpu else state.to(request.device) for state in out.states)
        seconds = time.perf_counter() - request.begin
        return Hit(
            tokens,
            tiers,
            seconds,
            layers,
            states=states,
            reason=reason,
            withheld=withheld,
            _room=reserved,
            _layout=self.layout,
            _where=where,
        )

    def prefetch(self, namespace: bytes, tokens: Tokens) -> int:
        """Bring the stored prefix into the host tier; return how many leading tokens are in memory then."""
        reads = self.lookup.reads(namespace, tokens)
        good = self.fetcher.fetch(reads, None)[0] if reads else 0
        in_memory = 0
        for read, found in zip(reads[:good], self.lookup.in_memory([r.record for r in reads[:good]]), strict=True):
            if not found:
                break
            in_memory = read.end
        return in_memory
