"""What stands behind a write queue, in small: notes what it is given."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from threadruns import HANGS_S

from kvstore.core.results import FlushResult
from kvstore.tiers.disk.writes import SealedRecord
from kvstore.write.queue import WriteBatch


class Sink:
    """What the store does with groups, in small: notes them; waits while the gate is shut."""

    def __init__(self) -> None:
        self.groups: list[list[WriteBatch]] = []
        self.encoded: list[int] = []
        self.aged: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.ticks = threading.Event()
        self.second = threading.Event()  # block 2 was encoded

    def encode(self, blocks: Sequence[Any]) -> list[SealedRecord]:
        self.encoded += [block.record for block in blocks]
        if 2 in self.encoded:
            self.second.set()
        return []

    def exclusive(self) -> Any:
        return contextlib.nullcontext()

    def begin(self, sealed: Sequence[SealedRecord], beside: bool) -> Any:
        self.entered.set()
        assert self.gate.wait(HANGS_S)
        return threading.Barrier(1)

    def age(self, records: Sequence[int]) -> None:
        self.aged.append(list(records))

    def finish(self, group: Sequence[WriteBatch], begun: Any) -> FlushResult:
        self.groups.append(list(group))
        return FlushResult(sum(len(batch.blocks) for batch in group), 0)


def batch(record: int, nbytes: int = 10, aged: Sequence[int] = ()) -> WriteBatch:
    blocks: Any = [SimpleNamespace(record=record, view=SimpleNamespace(nbytes=nbytes))]
    return WriteBatch(blocks=blocks, aged=aged)


def numbers(sink: Sink) -> list[list[int]]:
    return [[block.record for j in group for block in j.blocks] for group in sink.groups]
