"""`remote stats`, `verify` and `gc`: what lies in a remote tier. They read it whole, and need no store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.errors import DAMAGED, OK, leave, told
from kvstore.cli.output import AsJson, line, parse_seconds, print_json, size, table
from kvstore.cli.space import Really
from kvstore.setting_checks import parse_size
from kvstore.tiers.disk.fs import FileSystem, read_file
from kvstore.tiers.remote.cleaning import older, orphans, remove, to_remove
from kvstore.tiers.remote.engine import RemoteEngine
from kvstore.tiers.remote.names import PARCEL
from kvstore.tiers.remote.opening import open_engine
from kvstore.tiers.remote.sealing import Sealer, key_from
from kvstore.tiers.remote.survey import EXPIRED, Value, survey

app = typer.Typer(
    no_args_is_help=True, help="A remote tier: what it holds, whether that is whole, and giving space back."
)
_KEY_FILE_BYTES = 1 << 10
Url = Annotated[str, typer.Argument(help="As of RemoteConfig.", show_default=False)]
Identity = Annotated[str, typer.Option(help="Only that of one identity: its 16 hex digits, as stats shows them.")]
KeyFile = Annotated[Path | None, typer.Option("--key", help="The file of the fleet key, if values are sealed.")]
Timeout = Annotated[float, typer.Option(help="Seconds that one call of the server may take.")]


@contextlib.contextmanager
def _opened(url: str) -> Iterator[RemoteEngine]:
    engine = open_engine(url, make=False)
    try:
        yield engine
    finally:
        engine.close()


def _sealer(key: Path | None) -> Sealer | None:
    return None if key is None else Sealer(key_from(read_file(FileSystem(), str(key), _KEY_FILE_BYTES)))


@app.command("stats")
def stats(
    url: Url, identity: Identity = "", key: KeyFile = None, timeout: Timeout = 10.0, as_json: AsJson = False
) -> None:
    """Count records, profiles, tokens and bytes by identity."""
    with told(as_json), _opened(url) as engine:
        values = survey(engine, timeout, identity, _sealer(key))
        lost = orphans(values)
    rows = [
        _row(name, [v for v in values if v.identity == name], lost) for name in sorted({v.identity for v in values})
    ]
    if as_json:
        print_json({"identities": rows})
        return
    if rows:
        table(tuple(rows[0]), [(*list(row.values())[:-1], size(row["bytes"])) for row in rows])
    line(f"{len(values)} values, {size(sum(value.nbytes for value in values))}")


def _row(identity: str, values: list[Value], lost: set[str]) -> dict[str, Any]:
    good = [value for value in values if not (value.problem or value.is_profile or value.is_sealed)]
    return {
        "identity": identity,
        "records": sum(value.is_record for value in good),
        "parcels": len({value.object for value in good if value.object.endswith(PARCEL)}),
        "places": sum(bool(value.parts) for value in good),
        "tokens": sum(value.tokens for value in good),
        "profiles": sum(value.is_profile for value in values),
        "sealed": sum(value.is_sealed for value in values),
        "unreachable": sum(value.name in lost for value in values),
        "damaged": sum(bool(value.problem) and value.problem != EXPIRED for value in values),
        "expired": sum(value.problem == EXPIRED for value in values),
        "bytes": sum(value.nbytes for value in values),
    }


@app.command("verify")
def verify(
    url: Url, identity: Identity = "", key: KeyFile = None, timeout: Timeout = 10.0, as_json: AsJson = False
) -> None:
    """Read every value and compare checksums and keys. Repairs nothing."""
    with told(as_json), _opened(url) as engine:
        values = survey(engine, timeout, identity, _sealer(key))
    problems = [f"{value.name}: {value.problem}" for value in values if value.problem not in ("", EXPIRED)]
    expired = sum(value.problem == EXPIRED for value in values)
    unreachable, code = len(orphans(values)), DAMAGED if problems else OK
    if as_json:
        found = {"values": len(values), "unreachable": unreachable, "expired": expired, "problems": problems}
        print_json({**found, "ok": not problems, "exit_code": code})
    else:
        for problem in problems:
            line(problem)
        some = f"{unreachable} of them unreachable, {expired} past their time"
        line(f"{len(problems)} problems; {len(values)} values read, {some}")
    leave(code)


@app.command("gc")
def gc(
    url: Url,
    to: Annotated[str | None, typer.Option(help="What all may take afterwards, such as 400GiB.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Also what was neither written nor used for so long, such as 30d.")
    ] = None,
    identity: Identity = "",
    key: KeyFile = None,
    timeout: Timeout = 10.0,
    yes: Really = False,
    as_json: AsJson = False,
) -> None:
    """Remove values that are damaged or that no get reaches, with --older-than those not used for long, and with
    --to also ends of sequences, until the rest fits.

    A block never goes before those that continue it.
    """
    with told(as_json), _opened(url) as engine:
        seconds = None if older_than is None else parse_seconds(older_than)
        budget = None if to is None else parse_size(to)
        old = set[str]() if seconds is None else older(engine, identity, seconds, timeout)
        sealer = _sealer(key)
        values = survey(engine, timeout, identity, sealer)
        going = to_remove(values, budget, old)
        gone = remove(engine, values, going, timeout, old, seconds or 0.0, sealer) if yes else []
    freed, before = sum(value.nbytes for value in (gone if yes else going)), sum(value.nbytes for value in values)
    if as_json:
        print_json({"before": before, "after": before - freed * yes, "due": len(going), "removed": len(gone)})
        return
    what = f"{len(gone)} values removed" if yes else f"{len(going)} values would be removed; --yes removes them"
    line(f"{what}, {size(freed)}; {size(before)} before")
