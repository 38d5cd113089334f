"""`calibrate`: fits a profile to a model."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, line, print_json, progress_bars
from kvstore.cli.output import out as console


def calibrate(
    model: Annotated[Path, typer.Option(help="Folder of a transformers checkpoint.")],
    text: Annotated[Path, typer.Option(help="Text like what will be stored, UTF-8.")],
    out: Annotated[Path, typer.Option(help="The profile to write.")],
    windows: Annotated[int, typer.Option(help="Windows of text; an eighth of them is kept for the report.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    work: Annotated[Path | None, typer.Option(help="Folder for raw caches, kept; default: OUT.work, removed.")] = None,
    parts: Annotated[str, typer.Option(help="What to fit: of lossless, levels, lossy, aqua, donor, approximate.")] = (
        "lossless,levels,lossy"
    ),
    regime: Annotated[str, typer.Option(help="Of rope type longrope: short or long sequences.")] = "short",
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of caches: float8_e5m2 or float8_e4m3fn; default: the model's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model's profile: what codecs need to make its caches smaller.

    The same command continues an interrupted run.
    """
    with told(as_json, "interrupted; the same command goes on from here"):
        from kvstore.calibration.calibrate import calibrate as make
        from kvstore.calibration.calibrate import load_model, load_text
        from kvstore.calibration.report import size_line, table
        from kvstore.codecs.profile import check_target

        words = load_text(text, windows, length)
        if not out.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(out.parent))
        check_target(out)
        loaded, tokenizer = load_model(model)
        with progress_bars(as_json) as progress:
            names = tuple(name.strip() for name in parts.split(",") if name.strip())
            profile = make(
                loaded,
                tokenizer,
                words,
                out,
                windows=windows,
                length=length,
                work=work,
                parts=names,
                regime=regime,
                kv_dtype=kv_dtype,
                progress=progress,
            )
        if as_json:
            print_json({"out": str(out), "id": profile.id.hex(), "bytes": profile.nbytes, "report": profile.report})
            return
        console.print(table(profile))
        line(f"{out}: {size_line(profile)}")
