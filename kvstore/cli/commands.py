"""The list of commands. Exit codes: docs/cli.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kvstore.cli import bench, calibrate, doctor, health, learn, look, move, remote, report, sessions, space, warmup
from kvstore.cli.usage import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        import kvstore

        typer.echo(f"kvstore {kvstore.__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """A persistent store for the KV caches of language models."""


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(look.ls, look.inspect, look.explain, look.stats, report.report, health.check, health.verify),
    *(space.gc, space.compact, space.evict, space.erase, move.export, move.import_, move.backup),
    *(warmup.warmup, calibrate.calibrate, learn.learn, doctor.doctor, bench.bench),
)
for _command in _COMMANDS:
    app.command(_command.__name__.rstrip("_"))(_command)
app.add_typer(sessions.app, name="sessions")
app.add_typer(remote.app, name="remote")
