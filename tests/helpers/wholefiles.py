"""The entries of a catalog's file as they are found without reading it in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.tiers.disk import environment
from kvstore.tiers.disk.catalog import Catalog
from kvstore.tiers.disk.catalog_file import Metas, problem_of_pages
from kvstore.tiers.disk.entry import Scan
from kvstore.tiers.disk.environment import CatalogError
from kvstore.tiers.disk.fs import FileSystem


def step_by_step(file: Path, beside: bool = True) -> Scan | None:
    """What LMDB finds in a file that was checked; None where anything is wrong.

    beside: what stands there beside entries must be sound, too; without it `CatalogError` is raised where the file has
    no such catalog.
    """
    fs = FileSystem()
    if environment.check(str(file.parent)) or problem_of_pages(fs, str(file)) or not Metas.read(fs, str(file)).agree:
        return None
    try:
        catalog = Catalog(str(file.parent), 1 << 26, readonly=True)
    except CatalogError:
        if not beside:
            raise
        return None
    try:
        scan = catalog.scan() if not beside or catalog.is_sound() else None
    except CatalogError:
        return None
    finally:
        catalog.close()
    return scan if scan is not None and not scan.damaged else None


def is_same(a: Scan, b: Scan) -> bool:
    if (a.donors, a.cuts, a.damaged) != (b.donors, b.cuts, b.damaged):
        return False
    for name in ("entries", "holes"):
        if getattr(a, name).tobytes() != getattr(b, name).tobytes():
            return False
    pairs = zip([*_tokens_by_entry(a)], [*_tokens_by_entry(b)], strict=True)
    return all(found.tobytes() == wanted.tobytes() for found, wanted in pairs)


def _tokens_by_entry(scan: Scan) -> Iterator[npt.NDArray[np.uint32]]:
    for rows, token_at in ((scan.entries, scan.token_at), (scan.holes, scan.hole_token_at)):
        for at, count in zip(token_at.tolist(), rows["count"].tolist(), strict=True):
            assert at + count <= len(scan.tokens)
            yield scan.tokens[at : at + count]
