"""The list of commands. Exit codes: docs/cli.md."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli import bench, calibrate, doctor, health, look, move, sessions, space

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


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


for _command in (look.ls, look.inspect, look.explain, look.stats, health.check, health.verify):
    app.command()(_command)
for _command in (space.gc, space.compact, space.evict, space.erase, move.export):
    app.command()(_command)
app.command("import")(move.import_)
app.command()(move.backup)
app.add_typer(sessions.app, name="sessions")
for _command in (calibrate.calibrate, doctor.doctor, bench.bench):
    app.command()(_command)
