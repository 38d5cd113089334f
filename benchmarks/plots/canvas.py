"""What all pictures share: matplotlib without a screen, light grids, open frames."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def asked(description: str, bench: str) -> tuple[Path, list[dict[str, Any]], Path]:
    """What the command line names: the file of rows of a benchmark, these rows, and where the picture goes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("rows", type=Path, metavar="FILE", help=f"rows of {bench}, as JSON")
    parser.add_argument("--out", type=Path, required=True, metavar="PICTURE", help="where the picture goes")
    args = parser.parse_args()
    return args.rows, json.loads(args.rows.read_text()), args.out


def plotting() -> Any:
    """`matplotlib.pyplot`, which draws into files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, axes: Iterable[Any], out: Path, dpi: int = 150) -> None:
    """Adds grids to the axes and writes the picture; the format is that of the name."""
    for axis in axes:
        axis.grid(color="#e4e4e4", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=dpi)
    plotting().close(figure)
