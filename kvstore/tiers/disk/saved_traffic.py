"""The traffic in the catalog: how often each record was used (FORMAT.md, "Catalog").

Every method is called inside a transaction of the catalog. The counts of many records that follow each other in number
stand in one value.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.tiers.disk.entry import SUM_BYTES, checked, with_sum
from kvstore.tiers.disk.environment import Transaction

_RUN = 4096  # records whose counts stand in one value
_KEY = struct.Struct(">Q")


@dataclass(frozen=True)
class SavedTraffic:
    """The database that traffic is kept in. Immutable; what it reads and writes is the transaction's.

    Attributes:
        runs: counts by number of the run.
    """

    runs: Any

    def replace(self, txn: Transaction, records: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint32]) -> None:
        """Replace all counts; see `Catalog.save_traffic`."""
        numbers, firsts = np.unique(records // _RUN, return_index=True)
        ends = [*firsts.tolist(), len(records)][1:]
        txn.drop(self.runs, delete=False)
        for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends, strict=True):
            run = np.zeros(_RUN, "<u4")
            run[records[first:end] % _RUN] = counts[first:end]
            txn.put(_KEY.pack(number), with_sum(run.tobytes()), db=self.runs, append=True)

    def counts(self, txn: Transaction, records: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return the count of each record, `[m]`; 0 if it is not known."""
        found = np.zeros(len(records), np.uint32)
        order = np.argsort(records, kind="stable")  # of what is in order, as it mostly is, in no time
        runs = records[order] // _RUN
        firsts = np.flatnonzero(runs[1:] != runs[:-1]) + 1
        for here in np.split(order, firsts) if len(order) else ():
            number = int(records[here[0]] // _RUN)
            value = txn.get(_KEY.pack(number), db=self.runs)
            body = checked(value) if value is not None else None
            if body is not None and len(body) == 4 * _RUN:
                found[here] = np.frombuffer(body, "<u4")[records[here] % _RUN]
        return found


def is_run_sized(key: bytes, value: bytes) -> bool:
    """Whether a pair of the database has the lengths that it must have."""
    return len(key) == _KEY.size and len(value) == SUM_BYTES + 4 * _RUN
