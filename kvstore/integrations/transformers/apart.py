"""Warm-up in parts: each part fills a store of its own, anywhere, and what it holds is merged into the store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.config import GIB, StoreConfig, TierConfig
from kvstore.core.identity import ModelIdentity
from kvstore.core.tokens import Tokens
from kvstore.integrations.transformers.parts import parts_of
from kvstore.integrations.transformers.segments import distinct_tokens, segments_of
from kvstore.integrations.transformers.warming import WarmupReport, warmup
from kvstore.store import KVStore
from kvstore.tiers.disk.fs import FileSystem, remove_tree
from kvstore.transfer.copy import copy_store
from kvstore.transfer.settings import READING


@dataclass(frozen=True)
class Part:
    """What one worker does.

    Attributes:
        prompts: token ids of each.
        identity: of the store that is filled.
        folder: of that store, a new one.
        block_tokens, segment_bytes: as those of the store that it is merged into.
        options: of `warmup`.
    """

    prompts: list[Tokens]
    identity: ModelIdentity
    folder: str
    block_tokens: int
    segment_bytes: int
    options: dict[str, Any] = field(default_factory=dict)


def fill(part: Part, model: Any) -> tuple[str, WarmupReport]:
    """Do a part: fill a store with its prompts, and close it.

    Returns:
        The folder of the store, and what was done.

    Raises:
        The errors of `KVStore` and `warmup`.
    """
    raw = distinct_tokens(segments_of(part.prompts)) * part.identity.layout.bytes_per_token
    config = StoreConfig(
        host=TierConfig(0),
        disk=TierConfig(4 * raw + 4 * part.segment_bytes + GIB, "entropy"),
        block_tokens=part.block_tokens,
        segment_bytes=part.segment_bytes,
        pinned_share=0.9,
        donors=False,
        learn="off",
    )
    remove_tree(FileSystem(), part.folder)
    with KVStore(part.folder, part.identity, config) as store:
        report = warmup(store, model, part.prompts, **part.options)
    return part.folder, report


class PartWorkers(ABC):
    """Workers of `warmup` that do parts apart from each other.

    Beside the store a folder is made for the time being, `STORE.parts`: all workers must see it under that name, and it
    takes as much space again. What is stored already of prompts that are not whole is computed again.
    """

    @abstractmethod
    def count(self) -> int:
        """Return into how many parts the prompts are cut."""

    @abstractmethod
    def run(self, parts: Sequence[Part], model: Any) -> Iterator[tuple[str, WarmupReport]]:
        """Yield what `fill` returns of each part, in any order."""

    def warm(
        self,
        store: KVStore,
        model: Any,
        prompts: Sequence[Tokens],
        options: dict[str, Any],
        done: Callable[[WarmupReport], object],
    ) -> int:
        """Compute prompts and store them. Durable on return.

        Args:
            store: open for writing.
            model: of the store.
            prompts: what is to be computed.
            options: of `warmup`, for each part.
            done: called with the report of a part when it is merged.

        Returns:
            Blocks that the store could not take.
        """
        fs, work, dropped = FileSystem(), store.path + ".parts", 0
        sizes = store.config.block_tokens, store.config.segment_bytes
        parts = [
            Part(each, store.identity, os.path.join(work, f"{number:04}"), *sizes, options)
            for number, each in enumerate(parts_of(prompts, self.count()))
        ]
        remove_tree(fs, work)
        try:
            for folder, report in self.run(parts, model):
                with KVStore(folder, store.identity, READING, read_only=True) as source:
                    dropped += copy_store(source, store).dropped_blocks
                remove_tree(fs, folder)
                done(report)
        finally:
            remove_tree(fs, work)
        return dropped
