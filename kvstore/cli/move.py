"""`export`, `import` and `backup`: stored sequences on their way to another machine or folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli import stores
from kvstore.cli.errors import DAMAGED, OK, leave, told
from kvstore.cli.output import AsJson, line, print_json, progress_bars, size
from kvstore.transfer.copy import Choice, CopyReport

Names = Annotated[list[str] | None, typer.Option("--session", help="A session; may be given again.")]
Prefixes = Annotated[list[str] | None, typer.Option("--prefix", help="Token ids of a beginning; may be given again.")]


def export(
    store: stores.Store,
    file: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    session: Names = None,
    prefix: Prefixes = None,
    namespace: stores.Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Write sessions or sequences to one file with checksums; all of the store if nothing is named."""
    from kvstore.transfer.portable import export_store

    with told(as_json), stores.reading(store) as opened:
        ids = tuple(stores.parse_tokens(text) for text in prefix or [])
        choice = Choice(tuple(session or ()), ids, stores.namespace_of(namespace))
        if file.resolve().is_relative_to(store.resolve()):
            raise ValueError(f"file: {file} is in the store; name a file apart")
        missing = sorted(set(choice.sessions) - {each.id for each in opened.sessions()})
        if missing:
            raise stores.no_session(missing[0])
        with progress_bars(as_json) as bars:
            report, nbytes = export_store(opened, str(file), choice, bars)
    _tell(report, as_json, {"file": str(file), "bytes": nbytes}, f"{file}: {size(nbytes)}, ")


def import_(
    store: stores.Store,
    file: Annotated[Path, typer.Argument(help="What `export` wrote.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="Settings of the store, TOML.")] = None,
    as_json: AsJson = False,
) -> None:
    """Merge what `export` wrote into a store; it is made if it is missing."""
    from kvstore.transfer.portable import import_bundle

    with told(as_json):
        settings = stores.config_from(config) if config is not None else None
        with progress_bars(as_json) as bars:
            report = import_bundle(str(file), str(store), settings, bars)
    _tell(report, as_json, {"store": str(store)}, f"{store}: ")


def backup(
    store: stores.Store,
    target: Annotated[Path, typer.Argument(help="Folder of the copy; made if it is missing.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Copy a store to another folder beside its writer; what is there already is not copied again."""
    from kvstore.transfer.portable import backup_store

    with told(as_json), stores.reading(store) as opened, progress_bars(as_json) as bars:
        if target.resolve().is_relative_to(store.resolve()):
            raise ValueError(f"target: {target} is the store itself or in it; name a folder apart")
        report = backup_store(opened, str(target), bars)
    _tell(report, as_json, {"target": str(target)}, f"{target}: ")


def _tell(report: CopyReport, as_json: bool, more: dict[str, Any], begin: str) -> None:
    code = DAMAGED if report.short or report.dropped_blocks else OK
    if as_json:
        print_json({**more, **asdict(report), "exit_code": code})
        leave(code)
        return
    lost = f", {report.short} not whole" if report.short else ""
    left = f", {report.left} left meanwhile" if report.left else ""
    dropped = f", {report.dropped_blocks} blocks dropped" if report.dropped_blocks else ""
    line(
        f"{begin}{report.sequences} sequences of {report.tokens} tokens, {report.new_tokens} of them new, "
        f"{report.sessions} sessions{left}{lost}{dropped}"
    )
    leave(code)
