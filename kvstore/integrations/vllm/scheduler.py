"""What a connector does beside vLLM's scheduler: how much of a request is stored, and what each step loads and saves.

Knows vLLM's requests and outputs by their attributes only. Not thread-safe: the scheduler is one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.core.tokens import as_tokens
from kvstore.errors import KVStoreError
from kvstore.integrations.vllm.counters import Counters
from kvstore.integrations.vllm.steps import Load, Save, Step, blocks_between, whole


class Index(Protocol):
    """What the scheduler asks of a store: how many leading tokens it has."""

    def contains(self, tokens: Any, *, namespace: str | bytes = b"") -> int: ...


@dataclass
class Tracked:
    """A request that the store serves.

    Attributes:
        request: vLLM's.
        namespace: its cache salt, "" if it has none.
        saved: leading tokens that are stored, or on their way to the store.
        matched: the end of what is to be loaded.
        load: what is being loaded for it.
    """

    request: Any
    namespace: str
    saved: int = 0
    matched: int = 0
    load: Load | None = None


class SchedulerSide:
    """See the module.

    Args:
        index: of the store.
        block_tokens: tokens of a block of vLLM.
        unit: tokens of a block of the store; saves are whole blocks of it.
        least: load nothing shorter than so many tokens.
    """

    def __init__(self, index: Index, block_tokens: int, unit: int, least: int, counters: Counters) -> None:
        self._index = index
        self._block_tokens = block_tokens
        self._unit = unit
        self._least = least
        self._counters = counters
        self._tracked: dict[str, Tracked | None] = {}  # None: is not served
        self._loads: list[Load] = []

    def match(self, request: Any, computed: int) -> int:
        """Return how many tokens behind the first `computed` can be loaded: whole blocks, never the last token."""
        name = request.request_id
        if name not in self._tracked:
            self._tracked[name] = Tracked(request, request.cache_salt or "") if self._is_served(request) else None
        tracked = self._tracked[name]
        if tracked is None:
            return 0
        try:
            tokens = as_tokens(list(request.all_token_ids))
            stored = self._index.contains(tokens, namespace=tracked.namespace)
        except (KVStoreError, ValueError) as error:
            self._counters.log("lookup", error)
            self._counters.add("lookup_errors")
            stored = 0
        tracked.saved = whole(stored, self._unit)
        tracked.matched = whole(min(stored, request.num_tokens - 1), self._block_tokens)
        more = tracked.matched - computed
        return more if more >= self._least else 0

    def _is_served(self, request: Any) -> bool:
        """Whether its caches follow from its token ids alone."""
        reason = next(
            (name for name in ("lora_request", "mm_features", "prompt_embeds") if getattr(request, name, None)), None
        )
        if reason is None and request.prompt_token_ids:
            return True
        self._counters.add("requests_not_served")
        return False

    def allocated(self, request: Any, blocks: Iterable[list[int]], external: int) -> None:
        """Note the blocks of a request, of which `external` tokens are to be loaded now."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or external <= 0:
            return
        (table,) = blocks
        start, end = tracked.matched - external, tracked.matched
        where = blocks_between(table, start, end, self._block_tokens)
        tokens = as_tokens(list(request.all_token_ids[:end]))
        tracked.load = Load(request.request_id, tracked.namespace, tokens, start, where)
        self._loads.append(tracked.load)

    def step(self, output: Any) -> Step:
        """Return what the worker is to do with this step of the engine."""
        loads, self._loads = self._loads, []
        saves = [
            save for name, count in output.num_scheduled_tokens.items() if (save := self._save(name, count, output))
        ]
        return Step(loads, saves, idle=output.total_num_scheduled_tokens == 0)

    def _save(self, name: str, scheduled: int, output: Any) -> Save | None:
        """What of a request is complete after this step and not stored."""
        tracked = self._tracked.get(name)
        if tracked is None:
            return None
        request = tracked.request
        certain = scheduled - len(output.scheduled_spec_decode_tokens.get(name, ()))
        end = whole(min(request.num_computed_tokens + certain, len(request.all_token_ids)), self._unit)
        if end <= tracked.saved:
            return None
        tables = output.kv_connector_block_state.get_block_ids(name)
        if tables is None:
            return None
        start, tracked.saved = tracked.saved, end
        where = blocks_between(tables[0], start, end, self._block_tokens)
        return Save(tracked.namespace, as_tokens(list(request.all_token_ids[:end])), start, where)

    def loaded(self, requests: Iterable[str], failed: set[int]) -> None:
        """Note which requests were loaded, and the blocks that were not. What failed is stored anew."""
        for name in requests:
            tracked = self._tracked.get(name)
            if tracked is not None and tracked.load is not None:
                if failed.intersection(tracked.load.blocks):
                    tracked.saved = 0
                tracked.load = None

    def finished(self, request: Any) -> None:
        """Forget a request."""
        self._tracked.pop(request.request_id, None)
