"""`warmup`: computes the caches of prompts before they are asked for."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli import stores
from kvstore.cli.errors import FAILED, OK, leave, told
from kvstore.cli.output import AsJson, err, line, print_json, progress_bars, size
from kvstore.core.identity import ModelIdentity
from kvstore.errors import StoreNotFound
from kvstore.metrics import NOTICES, Metric
from kvstore.stored import stored_identity
from kvstore.tiers.disk.fs import FileSystem
from kvstore.transfer.settings import writing_config

if TYPE_CHECKING:
    from kvstore.integrations.transformers.warming import WarmupReport, Workers
    from kvstore.store import KVStore


def warmup(
    store: Annotated[Path, typer.Argument(help="Folder of the store; made if it is missing.", show_default=False)],
    model: Annotated[Path, typer.Option(help="Folder of a transformers checkpoint.")],
    prompts: Annotated[Path, typer.Option(help="The prompts, UTF-8.")],
    form: Annotated[
        str | None,
        typer.Option("--format", help="text, jsonl or chat (docs/warmup.md); default: as the file's name ends."),
    ] = None,
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
            from kvstore.integrations.transformers.warming import warmup as warm
            from kvstore.store import KVStore
        except ModuleNotFoundError as error:
            raise ValueError(f"warmup needs {error.name}; pip install 'kvstore-lm[transformers]'") from None
        apart = _workers(workers, tasks, model, dtype)
        loaded, tokenizer, ids = _loaded(model, dtype, prompts, form)
        settings = stores.config_from(config) if config is not None else writing_config(str(store))
        identity = ModelIdentity.from_transformers(loaded, tokenizer)
        with (
            progress_bars(as_json) as bars,
            _folder(store, dry_run) as folder,
            KVStore(folder, identity, settings) as opened,
        ):
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
            why = _why_dropped(opened) if report.dropped_blocks else ""
    code = FAILED if report.dropped_blocks else OK
    if as_json:
        more = {"tokens_per_s": report.tokens_per_s, "disk_capacity": capacity, "dropped_because": why}
        print_json({**asdict(report), **more, "dry_run": dry_run, "exit_code": code})
    else:
        line(_planned(report, capacity) if dry_run else _said(report, why))
    leave(code)


@contextlib.contextmanager
def _folder(store: Path, dry_run: bool) -> Iterator[Path]:
    """What is opened: an empty folder that goes again, where there is no store and none is to be made."""
    with contextlib.ExitStack() as held:
        if dry_run:
            try:
                stored_identity(store)
            except StoreNotFound:
                store = Path(held.enter_context(tempfile.TemporaryDirectory()))
        yield store


def _loaded(model: Path, dtype: str, prompts: Path, form: str | None) -> tuple[Any, Any, list[list[int]]]:
    """The model, its tokenizer, and the token ids of the prompts."""
    from kvstore.calibration.calibrate import load_model
    from kvstore.integrations.transformers.prompts import format_of, read_prompts

    lines = stores.text_of(prompts).split("\n")  # splitlines() would cut texts in JSON, too
    form = format_of(str(prompts), lines) if form is None else form
    loaded, tokenizer = load_model(model, dtype)
    return loaded, tokenizer, list(read_prompts(lines, tokenizer, form, str(prompts)))


def _why_dropped(store: KVStore) -> str:
    """Why the store could not take blocks, and what to do."""
    counters, segment, free = store.stats()["counters"], store.config.segment_bytes, FileSystem().free(store.path)
    found = [metric for metric in NOTICES if metric.value.startswith("dropped_") and counters.get(metric.value)]
    if counters.get(Metric.DISK_FULL.value) or (not found and free < segment):
        return (
            f"the file system of {store.path} is full: {size(free)} are free, and the store takes {size(segment)} at a "
            "time. Free space there, or begin a store with a disk.bytes (--config) of what is free: it takes less at a "
            "time"
        )
    told = [f"{counters[metric.value]:g} {metric.meaning}: {NOTICES[metric].advice}" for metric in found]
    return "; ".join(told) or "the log says why"


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
            self._bars("tokens", report.done_tokens, report.tokens, left)
        if not self._hidden and not err.is_terminal and time.monotonic() >= self._next:
            self._next += 10.0
            done = f"{report.done_tokens:,} of {report.tokens:,} tokens{_again(report)}, {left}"
            err.print(done, markup=False, highlight=False, soft_wrap=True)


def _again(report: WarmupReport) -> str:
    return f", {report.repeated_tokens:,} computed again" if report.repeated_tokens else ""


def _begin(report: WarmupReport) -> str:
    return f"{report.prompts:,} prompts of {report.tokens:,} distinct tokens, {report.stored_tokens:,} stored before; "


def _planned(report: WarmupReport, capacity: int) -> str:
    room = "" if report.bytes <= capacity else f"; the store holds at most {size(capacity)}: raise disk.bytes"
    seconds = f"about {report.seconds:,.0f} s" if report.seconds >= 1 else "less than a second"
    return f"{_begin(report)}{report.computed_tokens:,} to compute: {size(report.bytes)} before coding, {seconds}{room}"


def _said(report: WarmupReport, why: str) -> str:
    lost = f"; {report.dropped_blocks} blocks could not be stored: {why}" if report.dropped_blocks else ""
    return (
        f"{_begin(report)}{report.computed_tokens - report.repeated_tokens:,} computed{_again(report)} in "
        f"{report.seconds:,.1f} s ({report.tokens_per_s:,.0f} tokens/s, {report.passes} passes){lost}"
    )
