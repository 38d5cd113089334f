"""Finding 17, nothing was logged: what means a loss or a fallback has words, and is said once and then rarely."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_stores
from faultfs import Fault, FaultFS

from kvstore import KVStore
from kvstore.log import EventLog, Notice
from kvstore.metrics import NOTICES, Metric, Metrics
from kvstore.residency.lifecycle import SlowCall

LOSS = re.compile(
    r"^(dropped|damaged|quarantined|lost|unknown|unreachable|mended|catalog|fallback|slow)_(?!compacted)|_(errors|full|lost)$"
)
SPACE = Notice(logging.WARNING, "raise disk.bytes")


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What was logged below "kvstore"."""
    found: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("kvstore")
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


def said(lines: list[logging.LogRecord], event: str) -> list[str]:
    return [record.getMessage() for record in lines if record.name == f"kvstore.{event}"]


@pytest.mark.parametrize("metric", list(Metric))
def test_finding_17_every_counter_of_a_loss_or_a_fallback_has_words(metric: Metric) -> None:
    if LOSS.search(metric.value):
        assert metric in NOTICES, f"{metric.value} means a loss or a fallback: give it a line in NOTICES"
    notice = NOTICES.get(metric)
    if notice is not None:
        assert notice.level in (logging.INFO, logging.WARNING, logging.ERROR)
        assert notice.advice.strip()
        assert not notice.advice.endswith(".")


@pytest.mark.parametrize("metric", sorted(NOTICES))
def test_finding_17_every_such_counter_logs_what_happened_and_what_to_do(
    metric: Metric, lines: list[logging.LogRecord]
) -> None:
    Metrics(EventLog("/var/kv")).add(metric, 3)
    assert said(lines, metric.value) == [f"store /var/kv: {metric}: 3 {metric.meaning}; {NOTICES[metric].advice}"]
    assert [record.levelno for record in lines] == [NOTICES[metric].level]


def test_what_happens_while_all_is_well_is_not_logged(lines: list[logging.LogRecord]) -> None:
    metrics = Metrics()
    for metric in Metric:
        metrics.add(metric, 0 if metric in NOTICES else 5)
    metrics.log.close()
    assert lines == []


def test_the_first_time_is_logged_at_once_and_then_at_most_one_line_an_interval(
    lines: list[logging.LogRecord],
) -> None:
    now = [1000.0]
    log = EventLog(interval_s=60.0, clock=lambda: now[0])

    def note(amount: int = 1, event: str = "a") -> None:
        log.note(event, SPACE, "blocks", amount)

    note(2)
    for _ in range(100):
        now[0] += 0.5
        note()
    assert said(lines, "a") == ["a: 2 blocks; raise disk.bytes"]
    note(event="b")  # has a clock of its own
    now[0] = 1060.0
    note(3)
    assert said(lines, "a")[1:] == ["a: 103 blocks (105 since the store was opened); raise disk.bytes"]
    now[0] += 59
    note(4)
    assert [len(said(lines, event)) for event in ("a", "b")] == [2, 1]


def test_what_was_not_said_yet_is_said_on_close_and_once(lines: list[logging.LogRecord]) -> None:
    log = EventLog(clock=lambda: 5.0)
    for _ in range(4):
        log.note("a", SPACE, "blocks", 1)
    log.close()
    log.close()
    assert said(lines, "a")[1:] == ["a: 3 blocks (4 since the store was opened); raise disk.bytes"]


def test_an_error_is_part_of_the_line(lines: list[logging.LogRecord]) -> None:
    Metrics().add(Metric.DISK_WRITE_ERRORS, because=OSError(5, "Input/output error"))
    Metrics().add(Metric.SLOW_CALLS, because="get took 12.0 s")
    assert "[OSError: [Errno 5] Input/output error]; check the disk" in said(lines, "disk_write_errors")[0]
    assert "[get took 12.0 s]; " in said(lines, "slow_calls")[0]


def test_a_handler_that_raises_does_no_harm(lines: list[logging.LogRecord]) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("no")

    handler = Broken()
    logging.getLogger("kvstore").addHandler(handler)
    try:
        metrics = Metrics()
        metrics.add(Metric.DROPPED_NO_SPACE)
        assert metrics[Metric.DROPPED_NO_SPACE] == 1
    finally:
        logging.getLogger("kvstore").removeHandler(handler)


def test_a_program_without_logging_sees_nothing() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("kvstore").handlers)


def test_a_call_that_takes_longer_than_the_setting_is_counted_and_logged(lines: list[logging.LogRecord]) -> None:
    now, metrics = [0.0], Metrics()
    for seconds, limit in ((9.0, 10.0), (11.0, 10.0), (99.0, 0.0)):
        with SlowCall("get", limit, metrics, clock=lambda: now[0]):
            now[0] += seconds
    assert metrics[Metric.SLOW_CALLS] == 1
    assert "get took 11.0 s" in said(lines, "slow_calls")[0]


def test_every_call_of_a_store_that_works_is_watched(tmp_path: Path) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(slow_call_s=1e-9)) as store:
        tokens = small_stores.tokens_of(1, 9)
        for number, call in enumerate(
            (
                lambda: small_stores.put(store, tokens),
                lambda: store.get(tokens),
                store.flush,
                lambda: store.delete(tokens),
            ),
            1,
        ):
            call()
            assert store.stats()["counters"]["slow_calls"] == number


def test_finding_17_a_store_says_what_it_drops_and_why(tmp_path: Path, lines: list[logging.LogRecord]) -> None:
    fs = FaultFS()
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(), fs=fs) as store:
        small_stores.put(store, small_stores.tokens_of(1, 9))
        store.flush()
        assert lines == []
        fs.fault = Fault("pwritev", nth=1, code=errno.EIO, sticky=True)
        small_stores.put(store, small_stores.tokens_of(2, 9))
        store.flush()
        (line,) = said(lines, "dropped_write_error")
        assert f"store {tmp_path}: dropped_write_error: 3 blocks that the disk refused to write" in line
        assert "OSError" in said(lines, "disk_write_errors")[0]


def test_finding_17_a_store_says_what_is_damaged(tmp_path: Path, lines: list[logging.LogRecord]) -> None:
    tokens = small_stores.tokens_of(1, 9)
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=0)) as store:
        small_stores.put(store, tokens)
        store.flush()
        (segment,) = (tmp_path / "segments").iterdir()
        small_stores.flip(segment, small_stores.catalog_entries(store)[0].extent.offset + 250, 1)
        assert small_stores.stored(store, tokens) == 0
        assert len(said(lines, "quarantined_records")) == 1
        assert [record.levelname for record in lines if "record 1 in the disk tier" in record.getMessage()] == [
            "WARNING"
        ]


def test_finding_17_a_store_says_that_it_rebuilt_its_catalog(tmp_path: Path, lines: list[logging.LogRecord]) -> None:
    with KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()) as store:
        small_stores.put(store, small_stores.tokens_of(1, 9))
    (tmp_path / "catalog" / "data.mdb").unlink()
    KVStore(tmp_path, small_stores.IDENTITY, small_stores.config()).close()
    assert "[it is missing]" in said(lines, "catalog_damaged")[0]
    assert "3 records that such a rebuild found" in said(lines, "catalog_rebuilt_records")[0]
