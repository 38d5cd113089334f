"""`check` and `verify`: whether a store agrees with itself, without or with reading every record."""

from __future__ import annotations

from dataclasses import asdict

from kvstore.cli import stores
from kvstore.cli.errors import DAMAGED, OK, leave, told
from kvstore.cli.output import AsJson, line, print_json
from kvstore.residency.check import CheckReport, lost_at_open


def check(store: stores.Store, as_json: AsJson = False) -> None:
    """Compare index, catalog and segments with each other. Reads no payload and repairs nothing."""
    with told(as_json), stores.reading(store) as opened:
        report = opened.check()
        counters = opened.stats()["counters"]
    _tell(report, counters, as_json)


def verify(store: stores.Store, as_json: AsJson = False) -> None:
    """Read every record and compare checksums, keys and tokens, too. Repairs nothing."""
    with told(as_json), stores.reading(store) as opened:
        report = opened.check(deep=True)
        counters = opened.stats()["counters"]
    _tell(report, counters, as_json)


def _tell(report: CheckReport, counters: dict[str, int | float], as_json: bool) -> None:
    problems = [*report.problems, *lost_at_open(counters)]
    code = DAMAGED if problems else OK
    if as_json:
        print_json({**asdict(report), "problems": problems, "ok": not problems, "exit_code": code})
    else:
        for problem in problems:
            line(problem)
        read = f", {report.verified_records} of them read" if report.verified_records else ""
        if report.unreadable_records:
            read += f", {report.unreadable_records} cannot be decoded here: their profile or codec is not here"
        line(f"{len(problems)} problems; {report.disk_records} records{read}, {report.sessions} sessions")
    leave(code)
