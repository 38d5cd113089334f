"""`warmup` and `get_or_prefill`: computes prompts before they are asked for, each token once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from kvstore.core.fingerprints import SAMPLED
from kvstore.core.rope import check_length, regime_of
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.errors import IdentityMismatch, UnsupportedCache, UnsupportedModel
from kvstore.integrations.transformers.cache import cache_from_layers
from kvstore.integrations.transformers.feeding import advance
from kvstore.integrations.transformers.logprobs import Logprobs, prompt_scores
from kvstore.integrations.transformers.mode import check_mode
from kvstore.integrations.transformers.observed import observed
from kvstore.integrations.transformers.padding import check_rows
from kvstore.integrations.transformers.prefill import Passes, check_layers, pass_tokens
from kvstore.integrations.transformers.segments import Segment, distinct_tokens, segments_of
from kvstore.integrations.transformers.watch import identity_now
from kvstore.store import KVStore

_TRIAL_TOKENS = 128  # of the pass by which a dry run guesses the speed
_PASS_TOKENS = 4096  # of all rows of a pass: memory
_PADDING = 0.1  # of a pass, at most
_FLUSH_S = 30.0  # what a kill may cost


@dataclass(frozen=True)
class Prefilled:
    """A cache of all tokens that were asked for.

    Attributes:
        cache: a transformers cache that the caller owns.
        tokens: how many it holds.
        reused_tokens: among them those that came from the store.
        tiers: these by where they came from.
    """

    cache: Any
    tokens: int
    reused_tokens: int
    tiers: dict[str, int] = field(default_factory=dict)


@dataclass
class WarmupReport:
    """What a warmup did, or would do. Mutable while it goes on.

    Attributes:
        prompts: distinct ones.
        tokens: distinct ones of all prompts: what is computed if nothing is stored.
        stored_tokens: among them those that were stored before.
        computed_tokens: tokens that were computed; of a dry run, that would be.
        repeated_tokens: among those, what was known before: the store had dropped it, or did not have it in time, or
            several workers begin with it. At the end stored_tokens + computed_tokens - repeated_tokens is tokens.
        bytes: raw bytes of those.
        seconds: so far; of a dry run, about how many it would take.
        dropped_blocks: blocks that the store could not take.
        passes: of the model.
    """

    prompts: int = 0
    tokens: int = 0
    stored_tokens: int = 0
    computed_tokens: int = 0
    repeated_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    dropped_blocks: int = 0
    passes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed in a second."""
        return self.computed_tokens / self.seconds if self.seconds else 0.0

    @property
    def done_tokens(self) -> int:
        """Tokens of all prompts that are stored or computed by now: never more than there are."""
        return min(self.tokens, self.stored_tokens + self.computed_tokens - self.repeated_tokens)

    @property
    def seconds_left(self) -> float:
        """About how many it still takes."""
        return (self.tokens - self.done_tokens) / self.tokens_per_s if self.tokens_per_s else 0.0


class Workers(Protocol):
    """Computes prompts apart from the process that has the store; `PartWorkers` says the arguments."""

    def warm(
        self,
        store: KVStore,
        model: Any,
        prompts: Sequence[Tokens],
        options: dict[str, Any],
        done: Callable[[WarmupReport], object],
    ) -> int: ...


def get_or_prefill(
    store: KVStore,
    tokens: Any,
    model: Any,
    *,
    namespace: str | bytes = b"",
    ttl: float | None = None,
    pin: bool = False,
    chunk: int | None = None,
) -> Prefilled:
    """Return the cache of all of a sequence: from the store as far as it has it, the rest computed, and stored.

    Args:
        store: of the model.
        tokens: `[n]` or `[1, n]`, see `KVStore.get`.
        model: a transformers model in evaluation mode.
        namespace, ttl, pin: see `KVStore.put`.
        chunk: compute at most so many tokens at a time.

    Raises:
        ValueError: tokens, namespace or ttl are malformed; see `mode.check_mode`.
        IdentityMismatch: the store is another model's.
        UnsupportedLength: see `KVStore.get`.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from kvstore import ModelIdentity
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with KVStore(folder, ModelIdentity.from_transformers(model)) as store:
        ...         [get_or_prefill(store, ids, model).reused_tokens for ids in ([1, 2, 3], [1, 2, 3, 4])]
        [0, 3]
    """
    check_model(model, store)
    ids = as_tokens(tokens)
    check_length(store.identity.layout, len(ids))
    hit = store.get(ids, namespace=namespace, device=model.device)
    held = 0 if hit is None else hit.tokens
    cache = DynamicCache(config=model.config) if hit is None else hit.cache()
    logprobs = None
    if held < len(ids):
        logprobs = _computed(store, model, cache, ids.tolist(), held, chunk)
    store.put(ids, cache, namespace=namespace, logprobs=logprobs, ttl=ttl, pin=pin)
    return Prefilled(cache, len(ids), held, {} if hit is None else hit.tiers)


def warmup(
    store: KVStore,
    model: Any,
    prompts: Iterable[Sequence[int] | Tokens],
    *,
    namespace: str | bytes = b"",
    ttl: float | None = None,
    pin: bool = False,
    batch_tokens: int = _PASS_TOKENS,
    chunk: int | None = None,
    dry_run: bool = False,
    progress: Callable[[WarmupReport], object] | None = None,
    workers: Workers | None = None,
) -> WarmupReport:
    """Compute and store the caches of prompts, each token that they share once. Durable on return.

    Prompts are taken as a tree: what several begin with is computed first, and parts of about the same length together.
    What is stored already is skipped, so a run that was killed goes on where it stopped, but for the last half minute.

    Args:
        store: of the model, open for writing, with space for the result.
        model: a transformers model in evaluation mode.
        prompts: token ids of each.
        namespace, ttl, pin: see `KVStore.put`; pins are for whole prompts.
        batch_tokens: tokens of all rows of a pass, stored ones included: bounds the memory. A longer prompt is computed
            alone.
        chunk: compute at most so many tokens of a row at a time.
        dry_run: compute nothing but a short trial of the speed, and say what would be done.
        progress: called after each pass, and once before the first; with workers, after each part.
        workers: compute apart and are merged into the store: `kvstore.integrations.ray.RayWorkers`. The store holds the
            same sequences as without; the last bits of caches depend on what was computed beside them.

    Raises:
        ValueError: an argument or a prompt is malformed; see `mode.check_mode`.
        IdentityMismatch: the store is another model's.
        UnsupportedLength: a prompt is too long for the keys of the store.
        ReadOnlyStore: the store was opened with read_only=True.
    """
    check_model(model, store)
    levels = segments_of(prompts)
    for segment in (segment for level in levels for segment in level):
        check_length(store.identity.layout, segment.end)
    stored = {id(s): store.contains(s.tokens, namespace=namespace) for level in levels for s in level}
    missing = [[s for s in level if stored[id(s)] < s.end] for level in levels]
    todo = sum(s.end - max(s.start, stored[id(s)]) for level in missing for s in level)
    report = WarmupReport(sum(s.is_prompt for level in levels for s in level), distinct_tokens(levels))
    report.stored_tokens = report.tokens - todo
    if dry_run:
        report.computed_tokens, report.bytes = todo, todo * store.identity.layout.bytes_per_token
        report.seconds = todo * _trial(model, missing) if todo else 0.0
        return report
    options: dict[str, Any] = {"ttl": ttl, "pin": pin}
    if workers is None:
        _Warmup(store, model, namespace, options, batch_tokens, chunk, report, progress, stored).run(missing)
    else:
        options |= {"namespace": namespace, "batch_tokens": batch_tokens, "chunk": chunk}
        _apart(workers, store, model, missing, options, report, progress)
    return report


def _apart(
    workers: Workers,
    store: KVStore,
    model: Any,
    missing: list[list[Segment]],
    options: dict[str, Any],
    report: WarmupReport,
    progress: Callable[[WarmupReport], object] | None,
) -> None:
    begin = time.monotonic()

    def done(part: WarmupReport | None = None) -> None:
        if part is not None:
            report.computed_tokens += part.computed_tokens
            report.repeated_tokens += part.repeated_tokens
            report.bytes += part.bytes
            report.passes += part.passes
            report.dropped_blocks += part.dropped_blocks
        report.seconds = time.monotonic() - begin
        if progress is not None:
            progress(report)

    done()
    prompts = [segment.tokens for level in missing for segment in level if segment.is_prompt]
    if prompts:
        report.dropped_blocks += workers.warm(store, model, prompts, options, done)
        report.repeated_tokens = max(0, report.stored_tokens + report.computed_tokens - report.tokens)
    report.seconds = time.monotonic() - begin


def check_model(model: Any, store: KVStore) -> None:
    """Check that a store is the model's, as it is now.

    Raises:
        ValueError: see `mode.check_mode`.
        IdentityMismatch: it is not.
    """
    check_mode(model)
    identity, theirs = identity_now(model, regime_of(store.identity.layout)), store.identity
    mine = dict(identity.fields(), codec_family=theirs.codec_family, shard=theirs.shard)
    if not theirs.weights.startswith(SAMPLED):
        mine["weights"] = theirs.weights
    difference = theirs.difference({**mine, "tokenizer": theirs.tokenizer})
    if difference:
        raise IdentityMismatch(
            f"the store holds caches of another identity ({difference}); open a store with "
            "ModelIdentity.from_transformers(model, tokenizer)"
        )


@dataclass
class _Warmup:
    """One run of `warmup`. batch_tokens bounds a pass; options are those of a put. stored: how many tokens the store
    had of each segment before, by id."""

    store: KVStore
    model: Any
    namespace: str | bytes
    options: dict[str, Any]
    batch_tokens: int
    chunk: int | None
    report: WarmupReport
    progress: Callable[[WarmupReport], object] | None
    stored: dict[int, int]

    def run(self, levels: list[list[Segment]]) -> None:
        begin = flushed = time.monotonic()
        self._tell()
        for level in levels:
            for group in self._groups(level):
                self._compute(group)
                now = time.monotonic()
                self.report.seconds = now - begin
                if now - flushed > _FLUSH_S:
                    self.report.dropped_blocks += self.store.flush().dropped_blocks
                    flushed = now
                self._tell()
        self.report.dropped_blocks += self.store.flush().dropped_blocks
        self.report.seconds = time.monotonic() - begin

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.report)

    def _groups(self, level: list[Segment]) -> Iterator[list[Segment]]:
        """Segments that are computed in one pass: about equally long, so that padding costs a tenth at most, or less
        than a pass of their own."""
        worth = pass_tokens(self.model)
        apart = self._must_be_alone() or worth < 0
        taken: list[Segment] = []
        for row in sorted(level, key=lambda s: (-s.new, -s.start)):
            both = [*taken, row]
            longest, real = both[0].new, sum(s.new for s in both)
            columns = max(s.start for s in both) + longest
            padded = len(both) * longest - real > max(worth, real * _PADDING)
            if taken and (apart or padded or len(both) * columns > self.batch_tokens):
                yield taken
                taken = []
            taken.append(row)
        if taken:
            yield taken

    def _must_be_alone(self) -> bool:
        try:
            check_rows(self.store.identity.layout)
            check_layers(self.model)
        except (UnsupportedCache, UnsupportedModel):
            return True
        return False

    def _compute(self, group: list[Segment]) -> None:
        prompts = [segment.tokens.tolist() for segment in group]
        hits = [
            self.store.get(s.tokens, namespace=self.namespace, max_tokens=s.end, device=self.model.device)
            for s in group
        ]
        held = [0 if hit is None else hit.tokens for hit in hits]
        if len(group) == 1:
            if held[0] == group[0].end:
                self._count(group[0], held[0])
                return
            cache = DynamicCache(config=self.model.config) if hits[0] is None else hits[0].cache()
            made = [(cache, _computed(self.store, self.model, cache, prompts[0], held[0], self.chunk))]
        else:
            passes = Passes(self.model, self.store, self.chunk)
            # No row of a batch is ever written again.
            made = [(cache_from_layers(layers), scored) for layers, scored in passes.together(prompts, hits)]
        self.report.passes += 1
        for segment, (cache, logprobs), known in zip(group, made, held, strict=True):
            self._put(segment, cache, logprobs)
            self._count(segment, known)

    def _count(self, segment: Segment, held: int) -> None:
        """A segment is whole, and the store held so many tokens of it."""
        report, done = self.report, max(segment.start, self.stored[id(segment)])
        report.computed_tokens += segment.end - held
        report.repeated_tokens += max(0, done - held)
        report.stored_tokens += max(0, held - done)  # another process stored them meanwhile
        report.bytes += (segment.end - held) * self.store.identity.layout.bytes_per_token

    def _put(self, segment: Segment, cache: Any, logprobs: Logprobs | None) -> None:
        options = {"logprobs": logprobs, "ttl": self.options["ttl"], "pin": self.options["pin"] and segment.is_prompt}
        done = self.store.put(segment.tokens, cache, namespace=self.namespace, **options)
        if done.dropped_blocks:  # the disk is slower than the model
            self.store.flush()
            done = self.store.put(segment.tokens, cache, namespace=self.namespace, **options)
            self.report.dropped_blocks += done.dropped_blocks


def _computed(
    store: KVStore, model: Any, cache: Any, tokens: list[int], held: int, chunk: int | None
) -> Logprobs | None:
    """Run the model over what a cache lacks of tokens; it grows by them. Returns their log-probabilities, if the store
    is to have those of prompts."""
    with prompt_scores(model, cache, store) as scores, observed(store.gate, model, held, len(tokens) - held):
        _go_on(model, cache, tokens, held, chunk)
    return None if scores is None else scores.logprobs(len(tokens))


def _go_on(model: Any, cache: Any, tokens: list[int], held: int, chunk: int | None = None) -> None:
    """Run the model over the tokens behind the first `held`, in at most `chunk` at a time; the cache grows by them."""
    advance(model, cache, held, torch.tensor([tokens[held:]]), torch.arange(held, len(tokens))[None], chunk=chunk)


def _trial(model: Any, missing: list[list[Segment]]) -> float:
    """About how many seconds a token takes: of a short pass, after one that warms up."""
    longest = max((s for level in missing for s in level), key=lambda s: s.end)
    ids = longest.tokens[:_TRIAL_TOKENS].tolist()
    taken = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        _go_on(model, DynamicCache(config=model.config), ids, 0)
        taken = time.perf_counter() - begin
    return taken / len(ids)
