"""`doctor`: what this machine gives a store, and what a configuration costs for each token."""

from __future__ import annotations

import errno
import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

import kvstore
from kvstore.cli import stores
from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, line, print_json, size, table
from kvstore.config import MIB, StoreConfig
from kvstore.core.layout import KVLayout
from kvstore.errors import ConfigError
from kvstore.gate.load import RATIOS
from kvstore.stored import stored_identity
from kvstore.tiers.disk.ceiling import disk_ceiling
from kvstore.tiers.disk.files import most_open
from kvstore.tiers.disk.fs import FileSystem

_DISK_BYTES = 64 * MIB  # of the file that the disk is measured with


def doctor(
    path: Annotated[Path | None, typer.Option(help="Folder whose disk is measured: 64 MiB are written.")] = None,
    store: Annotated[Path | None, typer.Option(help="A store, for what a token of its model costs.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of a checkpoint, for what a token of it costs.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings, TOML; default are those of StoreConfig().")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, which paths the codecs take, how fast the disk is, and what a token costs."""
    with told(as_json):
        settings = stores.config_from(config)
        document: dict[str, Any] = {"machine": _machine(settings), "codecs": _codecs()}
        if path is not None:
            document["disk"] = _disk(path)
        if store is not None or model is not None:
            layout = stored_identity(store).layout if store is not None else _layout(model)
            document["cost"] = _cost(layout, settings)
    if as_json:
        print_json(document)
        return
    table(("", ""), document["machine"].items(), title="machine")
    table(("codec", "on the CPU", "on a GPU"), [(c["name"], c["cpu"], c["gpu"]) for c in document["codecs"]])
    if "disk" in document:
        disk = document["disk"]
        direct = "past the page cache" if disk["direct_io"] else "without O_DIRECT, which this file system lacks"
        line(
            f"disk: writes {size(disk['write_bytes_per_s'])}/s with one sync, reads "
            f"{size(disk['read_bytes_per_s'])}/s, {direct}"
        )
    if "cost" in document:
        rows = [
            (c["tier"], c["codec"], size(c["bytes_per_token"]), size(c["budget"]), c["tokens"])
            for c in document["cost"]
        ]
        table(("tier", "codec", "a token", "budget", "tokens that fit, about"), rows, title="cost")


def _disk(path: Path) -> dict[str, float]:
    """What `disk_ceiling` measures. Raises `ConfigError`, `OSError` with the folder's name."""
    try:
        return disk_ceiling(str(path), _DISK_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from error
        free = FileSystem().free(str(path))
        raise ConfigError(
            f"path: {path}: {error.strerror}; the disk is measured with a file of {size(_DISK_BYTES)}, and "
            f"{size(free)} are free: free space, or name a folder on another disk"
        ) from error


def _machine(config: StoreConfig) -> dict[str, Any]:
    import torch

    from kvstore.codecs.levels import cpu_level

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    cuda = torch.cuda.is_available()
    return {
        "kvstore": kvstore.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cpu_level": cpu_level(),
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "triton": _installed("triton"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "descriptors": "no limit" if limit == resource.RLIM_INFINITY else limit,
        "open_segments": most_open(config.open_segments),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _codecs() -> list[dict[str, str]]:
    import torch

    from kvstore.codecs import codec_by_name, codec_names
    from kvstore.codecs.levels import cpu_level

    rows = []
    for name in codec_names():
        codec = codec_by_name(name)
        gpu = "no GPU here"
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            gpu = "kernels" if codec.codes_on(device, "bfloat16") else "copied to the CPU first, and counted"
        rows.append({"name": name, "cpu": cpu_level(), "gpu": gpu})
    return rows


def _layout(folder: Path | None) -> KVLayout:
    try:
        from transformers import AutoConfig  # type: ignore[attr-defined]
    except ModuleNotFoundError:
        raise ValueError("--model: needs transformers; pip install 'kvstore-lm[transformers]'") from None
    import torch

    from kvstore.integrations.transformers import layout_from_config

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers has many types for a config that it cannot read
        raise ValueError(f"{folder}: no model's config can be loaded ({error})") from error
    return layout_from_config(config, getattr(config, "dtype", None) or torch.bfloat16)


def _cost(layout: KVLayout, config: StoreConfig) -> list[dict[str, Any]]:
    raw, rows = layout.bytes_per_token, []
    for tier in ("device", "host", "disk"):
        settings = getattr(config, tier)
        codec = settings.codec
        if codec == "auto":
            codec = "splitzip" if tier == "host" else "predictive" if config.profile else "entropy"
        taken = raw / RATIOS.get(codec.split("@")[0], 1.0)
        rows.append(
            {
                "tier": tier,
                "codec": codec,
                "raw_bytes_per_token": raw,
                "bytes_per_token": round(taken),
                "budget": settings.bytes,
                "tokens": int(settings.bytes / taken) if taken else 0,
            }
        )
    return rows
