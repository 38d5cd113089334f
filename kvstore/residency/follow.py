"""A reader follows a writer process: what that committed since becomes known here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.explanation import Reason
from kvstore.core.guard import PUT, Guard
from kvstore.core.record import FLAG_STATES
from kvstore.core.tokens import Tokens
from kvstore.metrics import Metric
from kvstore.residency.block import StoredBlock
from kvstore.residency.ledger import Bits
from kvstore.residency.residency import Residency
from kvstore.residency.sparing import stored_end
from kvstore.tiers.disk.entry import Scan
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.tier import DiskTier


@dataclass
class Follower:
    """Takes in what a writer process committed. Thread-safe: one thread at a time, the others wait for it.

    What the writer removed is not noticed here, but when it is looked up.
    """

    residency: Residency
    keep_tails: bool = False  # see `load_index`
    # Guards that blocks arrive in the order of their numbers; a reader has no put that would take it.
    _lock: Guard = field(default_factory=lambda: Guard(PUT))

    def follow(self) -> None:
        """Makes everything findable that the writer committed before this call, also what another thread is taking in.

        Blocks of one sequence become findable at once. A failing catalog is counted.
        """
        disk = self.residency.disk
        if disk is not None and disk.has_news():
            self.residency.own.run(self._follow, disk)

    def forget(self, namespace: bytes, tokens: Tokens | None) -> None:
        """A sequence that the writer removed is found here no more; None: everything of the namespace."""
        self.follow()
        self.residency.own.run(self._forget, namespace, tokens)

    def _forget(self, namespace: bytes, tokens: Tokens | None) -> None:
        residency = self.residency
        with self._lock:
            if tokens is None:
                records = residency.erase_namespace(namespace)
            else:
                end = stored_end(residency.index, namespace, tokens)
                records = residency.erase(namespace, tokens[:end]) if end else []
            residency.forget(records, Reason.DELETED)

    def _follow(self, disk: DiskTier) -> None:
        residency = self.residency
        with self._lock:
            try:
                with disk.scan_new() as scan:
                    for blocks, tokens, bits in self._new_blocks(disk, scan) if scan is not None else ():
                        residency.arrive(tokens, blocks, bits, keep_tails=self.keep_tails)
            except CatalogError as error:
                residency.metrics.add(Metric.CATALOG_ERRORS, because=error)

    def _new_blocks(self, disk: DiskTier, scan: Scan) -> Iterator[tuple[list[StoredBlock], Tokens, Bits]]:
        """(blocks that stand behind each other, all tokens of their sequence to the end of the last, bits of each) of
        what has a place and is not known yet.

        Their place is behind the block before the first, which must have arrived by then; that may have a higher
        number, for it filled a hole. Raises `CatalogError`.
        """
        residency, rows = self.residency, scan.entries
        names = {number: digest for digest, number in disk.namespaces.items()}
        by_tag = dict(zip(rows["tag"].tolist(), rows["record"].tolist(), strict=True))
        everything: _Paths | None = None
        for run in _runs(rows, [i for i in range(len(rows)) if self._is_new(rows[i], names)]):
            first = rows[run[0]]
            namespace, start = names[int(first["namespace"])], int(first["start"])
            before = self._tokens_before(
                (int(first["parent"]), by_tag.get(int(first["parent_tag"]), 0)), namespace, start
            )
            if before is None:  # what stood before it left before it was seen here: the catalog may know it still
                everything = everything or _Paths(disk.catalog.scan())
                before = everything.before(first)
            if before is None:
                residency.metrics.add(Metric.UNREACHABLE_RECORDS, len(run))
                continue
            blocks = [_block(scan, i, namespace) for i in run]
            counts = rows["count"][run]
            a_token = (rows["bits"][run] / np.maximum(1, counts)).astype(np.float32)
            counts[0] += start  # what is here already keeps its bits
            yield blocks, np.concatenate([before, *(block.tokens for block in blocks)]), np.repeat(a_token, counts)

    def _is_new(self, row: np.void, names: dict[int, bytes]) -> bool:
        return int(row["namespace"]) in names and int(row["record"]) not in self.residency.index

    def _tokens_before(self, parents: tuple[int, ...], namespace: bytes, start: int) -> Tokens | None:
        """The `start` tokens up to the end of one of `parents`; None if none is known here, or they end elsewhere."""
        if not start:
            return np.zeros(0, np.uint32)
        for parent in parents:
            known = self.residency.whole_path(parent)
            if known is not None and known[0] == namespace and len(known[1]) == start:
                return known[1]
        return None


def _runs(rows: npt.NDArray[np.void], chosen: Sequence[int]) -> list[list[int]]:
    """The chosen rows, in runs of blocks that stand behind each other; a run comes after the one it branches off."""
    runs: list[list[int]] = []
    ends: dict[tuple[int, int, int], list[int]] = {}
    order = np.lexsort((rows["record"][chosen], rows["start"][chosen]))
    for i in np.asarray(chosen, np.intp)[order].tolist():
        namespace, start, count = (int(rows[i][name]) for name in ("namespace", "start", "count"))
        run = ends.pop((namespace, int(rows[i]["parent_tag"]), start), None) if start else None
        if run is None:
            runs.append(run := [])
        run.append(i)
        ends[namespace, int(rows[i]["tag"]), start + count] = run
    return runs


def _block(scan: Scan, i: int, namespace: bytes) -> StoredBlock:
    row = scan.entries[i]
    record, parent, start = (int(row[name]) for name in ("record", "parent", "start"))
    return StoredBlock(
        record=record,
        parent=parent if start else 0,
        namespace=namespace,
        start=start,
        tokens=np.ascontiguousarray(scan.tokens_of(i)),
        expiry=float(row["expiry"]),
        donors=scan.donors.get(record, ()),
        cut=scan.cuts.get(record, 0),
        has_states=bool(int(row["flags"]) & FLAG_STATES),
    )


class _Paths:
    """What stands before each entry of a catalog, by the tags of their keys: whole paths, whatever the numbers are."""

    def __init__(self, scan: Scan) -> None:
        self._rows = np.concatenate([scan.holes, scan.entries])
        self._tokens = scan.tokens
        self._token_at = np.concatenate([scan.hole_token_at, scan.token_at])
        self._by_tag = {tag: i for i, tag in enumerate(self._rows["tag"].tolist())}

    def before(self, row: np.void) -> Tokens | None:
        """The tokens before an entry; None if one of the blocks before it is unknown."""
        blocks: list[Tokens] = []
        while int(row["start"]):
            i = self._by_tag.get(int(row["parent_tag"]))
            above = self._rows[i] if i is not None else None
            if i is None or above is None or above["namespace"] != row["namespace"]:
                return None
            if int(above["start"]) + int(above["count"]) != int(row["start"]):
                return None
            at = int(self._token_at[i])
            blocks.append(self._tokens[at : at + int(above["count"])])
            row = above
        return np.concatenate(blocks[::-1]) if blocks else np.zeros(0, np.uint32)
