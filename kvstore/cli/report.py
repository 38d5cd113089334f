"""`report`: a store as one page to look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli import stores
from kvstore.cli.errors import DAMAGED, OK, leave, told
from kvstore.cli.output import AsJson, line, print_json, size
from kvstore.report import collect, render
from kvstore.tiers.disk.fs import FileSystem, write_file
from kvstore.transfer.bundle import check_target


def report(
    store: stores.Store,
    out: Annotated[Path, typer.Option(help="HTML file to write; one that is there is replaced.")] = Path("report.html"),
    deep: Annotated[bool, typer.Option("--deep", help="Also read and verify every record.")] = False,
    tokenizer: stores.TokenizerFolder = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page: where the bytes are, what is saved, hit rate over time, the prefix tree, integrity."""
    with told(as_json):
        check_target(FileSystem(), os.path.abspath(out))
        words = stores.load_tokenizer(tokenizer) if tokenizer else None
        with stores.reading(store) as opened:
            data = collect(opened, deep)
        page = render(data, (lambda ids: str(words.decode(list(ids)))) if words else None).encode()
        write_file(FileSystem(), os.path.abspath(out), page)
    problems = len(data.check.problems) + len(data.lost)
    if as_json:
        print_json({"out": str(out), "bytes": len(page), "blocks": data.records, "problems": problems})
    else:
        line(f"{out}: {size(len(page))}, {data.records:,} blocks, {problems} problems")
    leave(DAMAGED if problems else OK)
