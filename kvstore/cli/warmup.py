"""`warmup`: computes the caches of prompts before they are asked for."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli import stores
from kvstore.cli.errors import FAILED, OK, leave, told
from kvstore.cli.output import AsJson, err, line, print_json, progress_bars, size
from kvstore.core.identity import ModelIdentity
from kvstore.store import KVStore
from kvstore.transfer.portable import writing_config

if TYPE_CHECKING:
    from kvstore.integrations.transformers.warming import WarmupReport, Workers


def warmup(
    store: Annotated[Path, typer.Argument(help="Folder of the store; made if it is missing.", show_default=False)],
    model: Annotated[Path, typer.Option(help="Folder of a transformers checkpoint.")],
    prompts: Annotated[Path, typer.Option(help="The prompts, UTF-8.")],
    form: Annotated[
        str, typer.Option("--format", help="Of the prompts: text, jsonl or chat (docs/warmup.md).")
    ] = "text",
    namespace: Annotated[str, typer.Option(help="Name of the namespace.")] = "",
    ttl: Annotated[float | None, typer.Option(help="Seconds after which the prompts are removed.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict the prompts.")] = False,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a pass: bounds the memory.")] = 4096,
    chunk: Annotated[int | None, typer.Option(min=1, help="Most tokens of a prompt at a time.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model as it is served: bfloat16, float16, float32.")] = "bfloat16",
    config: Annotated[Path | None, typer.Option(help="Settings of the store, TOML.")] = None,
    workers: Annotated[
        str | None, typer.Option(help="Compute apart: ray, on the cluster that RAY_ADDRESS names, or this machine.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="With --workers: how many parts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be computed, and how long.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute and store the caches of prompts, each shared token once. The same command goes on after a kill."""
    with told(as_json, "interrupted; the same command goes on from here"):
        try:
            from kvstore.integrations.transformers.prompts import read_prompts
            from kvstore.integrations.transformers.warming import warmup as warm
        except ModuleNotFoundError as error:
            raise ValueError(f"warmup needs {error.name}; pip install 'kvstore-lm[transformers]'") from None
        from kvstore.calibration.calibrate import load_model

        apart = _workers(workers, tasks, model, dtype)
        lines = stores.text_of(prompts).splitlines()
        loaded, tokenizer = load_model(model, dtype)
        ids = list(read_prompts(lines, tokenizer, form))
        settings = stores.config_from(config) if config is not None else writing_config(str(store))
        identity = ModelIdentity.from_transformers(loaded, tokenizer)
        with progress_bars(as_json) as bars, KVStore(store, identity, settings) as opened:
            report = warm(
                opened,
                loaded,
                ids,
                namespace=namespace,
                ttl=ttl,
                pin=pin,
                batch_tokens=batch_tokens,
                chunk=chunk,
                dry_run=dry_run,
                workers=apart,
                progress=_Progress(bars, as_json),
            )
            capacity = int(opened.stats()["disk"]["capacity"])
    code = FAILED if report.dropped_blocks else OK
    if as_json:
        rate = {"tokens_per_s": report.tokens_per_s, "disk_capacity": capacity}
        print_json({**asdict(report), **rate, "dry_run": dry_run, "exit_code": code})
    else:
        line(_said(report, dry_run, capacity))
    leave(code)


def _workers(name: str | None, tasks: int | None, model: Path, dtype: str) -> Workers | None:
    if name is None:
        return None
    if name != "ray":
        raise ValueError(f"--workers: expected ray, found {name!r}")
    try:
        from kvstore.integrations.ray import RayWorkers
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    return RayWorkers(tasks=tasks, load=partial(_load, model, dtype))


def _load(folder: Path, dtype: str) -> Any:
    from kvstore.calibration.calibrate import load_model

    return load_model(folder, dtype)[0]


class _Progress:
    """Tells tokens a second and the time left: a bar on a terminal, else a line now and then."""

    def __init__(self, bars: Any, hidden: bool) -> None:
        self._bars, self._hidden, self._next = bars, hidden, time.monotonic() + 10.0

    def __call__(self, report: WarmupReport) -> None:
        left = f"{report.tokens_per_s:,.0f} tokens/s, {report.seconds_left:,.0f} s left"
        if report.tokens:
            self._bars("tokens", report.stored_tokens + report.computed_tokens, report.tokens, left)
        if not self._hidden and not err.is_terminal and time.monotonic() >= self._next:
            self._next += 10.0
            done = report.stored_tokens + report.computed_tokens
            err.print(f"{done:,} of {report.tokens:,} tokens, {left}", markup=False, highlight=False, soft_wrap=True)


def _said(report: WarmupReport, dry_run: bool, capacity: int) -> str:
    begin = f"{report.prompts:,} prompts of {report.tokens:,} distinct tokens, {report.stored_tokens:,} stored before; "
    if dry_run:
        room = "" if report.bytes <= capacity else f"; the store holds at most {size(capacity)}: raise disk.bytes"
        return (
            f"{begin}{report.computed_tokens:,} to compute: {size(report.bytes)} before coding, "
            f"about {report.seconds:,.0f} s{room}"
        )
    lost = f"; {report.dropped_blocks} blocks could not be stored" if report.dropped_blocks else ""
    return (
        f"{begin}{report.computed_tokens:,} computed in {report.seconds:,.1f} s "
        f"({report.tokens_per_s:,.0f} tokens/s, {report.passes} passes){lost}"
    )
