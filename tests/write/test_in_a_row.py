"""Groups that are written one after another: when the next one begins, and who else gets a turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from queuecases import Sink, batch, numbers
from remotestores import until
from threadruns import HANGS_S

from kvstore.config import PAGE_BYTES
from kvstore.core.results import FlushResult
from kvstore.metrics import Metrics
from kvstore.tiers.disk.writes import SealedRecord
from kvstore.write import queue
from kvstore.write.queue import WriteBatch, WriteQueue


class Rows(Sink):
    """Notes what is begun and finished, and while nobody else may write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        self.calls.append("[")
        yield
        self.calls.append("]")

    def begin(self, sealed: Sequence[SealedRecord], beside: bool) -> Any:
        self.calls.append("beside" if beside else "begin")
        return super().begin(sealed, beside)

    def finish(self, group: Sequence[WriteBatch], begun: Any) -> FlushResult:
        self.calls.append(f"finish {group[0].blocks[0].record}")
        return super().finish(group, begun)


def test_a_group_that_is_ready_is_begun_before_the_one_before_it_is_committed() -> None:
    rows = Rows()
    writer = WriteQueue(1000, 5, rows.encode, rows, rows.ticks.set, Metrics())
    rows.gate.clear()
    for record in (1, 2):
        writer.submit(batch(record))
    writer.begin()
    assert rows.second.wait(HANGS_S)  # encoded, while the first is being begun
    until(lambda: writer._ready is not None)
    rows.gate.set()
    writer.wait()
    writer.close()
    assert rows.calls[:6] == ["[", "begin", "beside", "finish 1", "finish 2", "]"]


def test_a_small_group_waits_for_the_commit_before_it() -> None:
    rows = Rows()
    writer = WriteQueue(1 << 30, 64 * PAGE_BYTES, rows.encode, rows, rows.ticks.set, Metrics())
    rows.gate.clear()
    writer.submit(batch(1))
    writer.begin()
    assert rows.entered.wait(HANGS_S)
    for record in (2, 3):
        writer.submit(batch(record))
    writer.begin()
    until(lambda: writer._ready is not None)
    rows.gate.set()
    writer.wait()
    writer.close()
    assert "beside" not in rows.calls
    assert [record for group in numbers(rows) for record in group] == [1, 2, 3]


def test_what_a_group_left_behind_is_coded_again_while_others_may_write() -> None:
    class Ages(Rows):
        def age(self, records: Sequence[int]) -> None:
            self.calls.append(f"age {records}")
            assert writer.pending_blocks > 0  # it is not through before

    rows = Ages()
    writer = WriteQueue(1000, 5, rows.encode, rows, rows.ticks.set, Metrics())
    rows.gate.clear()
    writer.submit(batch(1, aged=[7, 8]))
    writer.submit(batch(2))
    writer.begin()
    assert rows.second.wait(HANGS_S)
    until(lambda: writer._ready is not None)
    rows.gate.set()
    writer.wait()
    writer.close()
    assert rows.calls[:5] == ["[", "begin", "finish 1", "]", "age [7, 8]"]
    assert "finish 2" in rows.calls


def test_after_some_groups_in_a_row_others_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    monkeypatch.setattr(queue, "_IN_A_ROW", 2)
    writer = WriteQueue(1000, 5, rows.encode, rows, rows.ticks.set, Metrics())
    for record in range(1, 40):
        writer.submit(batch(record))
    writer.wait()
    writer.close()
    inside = "".join(call for call in rows.calls if call in ("[", "]") or call.startswith("finish"))
    assert [int(call.removeprefix("finish ")) for call in rows.calls if call.startswith("finish")] == list(range(1, 40))
    assert max(part.count("finish") for part in inside.split("]")) <= 2
