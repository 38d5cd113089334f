"""Ratio against speed of the codecs in a file of rows: `python -m benchmarks.plots.codecs FILE.json --out PICTURE.png`

FILE is what `python -m benchmarks.codecs --json` wrote. One point a codec and a peer, of one thread on all real keys
and values in bfloat16 (in the tensors that the peers code where the run has them, else in the store's blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.codecs.base import LIBRARIES
from benchmarks.plots.canvas import asked, plotting, save

CASES = ("bf16/KV", "bf16/KV/store-blocks")
WAYS = ("encode", "decode")
OURS, PEERS, MEMCPY = "#b3261e", "#3b6ea5", "#777777"
FONT = 9  # points
MARK, LETTER = 4.5, 6  # half the height of a mark and of a label, in points

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


@dataclass(frozen=True)
class Point:
    """speeds: raw GB/s of encoding and of decoding."""

    name: str
    ratio: float
    speeds: dict[str, float]

    @property
    def ours(self) -> bool:
        return self.name not in LIBRARIES


def points(rows: list[dict[str, Any]]) -> list[Point]:
    """The points in `rows`, in their order. A codec that lacks a figure has none."""
    figures: dict[str, dict[str, float]] = {}
    for row in rows:
        figures.setdefault(row["case"].removesuffix("/tiled"), {})[row["metric"]] = row["value"]
    found = []
    for name in dict.fromkeys(case.split("/")[0] for case in figures):
        for case in CASES:
            values = figures.get(f"{name}/{case}", {})
            if {"ratio", "encode_GBps", "decode_GBps"} <= values.keys():
                found.append(Point(name, values["ratio"], {way: values[f"{way}_GBps"] for way in WAYS}))
                break
    return found


def memcpy(rows: list[dict[str, Any]]) -> float | None:
    """GB/s that one thread copied in the same rounds."""
    for row in rows:
        if row["case"].removesuffix("/tiled") == "memcpy/bf16/KV" and row["metric"] == "copy_GBps":
            return float(row["value"])
    return None


def place(marks: list[tuple[float, float]], widths: list[float]) -> list[Box]:
    """A box for the label of each mark, in points of the page as the marks: beside, above or below it, the first place
    that covers neither a mark nor a label that was placed before; the one that covers least if there is none."""
    taken: list[Box] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks]
    found = []
    for (x, y), width in zip(marks, widths, strict=True):
        away, half = MARK + 3, LETTER
        boxes: list[Box] = []
        for dy in (0, half, -half, 2 * half, -2 * half, 3 * half, -3 * half):
            boxes.append((x + away, y + dy - half, x + away + width, y + dy + half))
            boxes.append((x - away - width, y + dy - half, x - away, y + dy + half))
        found.append(min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken)))
        taken.append(found[-1])
    return found


def _overlap(a: Box, b: Box) -> float:
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def draw(found: list[Point], ceiling: float | None, out: Path) -> None:
    """Writes the picture; the format is that of the name."""
    figure, axes = plotting().subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axis, way in zip(axes, WAYS, strict=True):
        _draw_points(axis, way, found, ceiling)
    axes[0].set_ylabel("GB/s of raw bytes, one thread")
    _draw_legend(figure)
    figure.draw_without_rendering()  # fixes the axes: only then is it known where a mark lies
    figure.set_layout_engine("none")
    for axis, way in zip(axes, WAYS, strict=True):
        _draw_names(axis, way, found, figure.dpi)
    save(figure, axes, out)


def _draw_points(axis: Any, way: str, found: list[Point], ceiling: float | None) -> None:
    from matplotlib.ticker import NullLocator

    speeds = [speed for point in found for speed in point.speeds.values()] + ([ceiling] if ceiling else [])
    bottom, top = min(speeds) / 1.6, max(speeds) * 1.6
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    axis.set_xlim(0.9, max(point.ratio for point in found) + 0.15)
    axis.set_yticks([tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if bottom <= tick <= top])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_title(way)
    axis.set_xlabel("raw bytes / coded bytes")
    if ceiling:
        axis.axhline(ceiling, color=MEMCPY, linestyle="--", linewidth=1)
        axis.annotate("memcpy", (1, ceiling), (0, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", color=MEMCPY, fontsize=FONT)  # fmt: skip
    for point in found:
        color, marker = (OURS, "o") if point.ours else (PEERS, "s")
        axis.plot(point.ratio, point.speeds[way], marker, color=color, markersize=7)


def _draw_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", marker=marker, color=color, label=label)
        for marker, color, label in (("o", OURS, "codecs of this project"), ("s", PEERS, "other libraries"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def _draw_names(axis: Any, way: str, found: list[Point], dpi: float) -> None:
    pixels = axis.transData.transform([(point.ratio, point.speeds[way]) for point in found])
    marks = [(float(x), float(y)) for x, y in pixels * 72 / dpi]
    boxes = place(marks, [0.62 * FONT * len(point.name) for point in found])
    for point, (x, y), box in zip(found, marks, boxes, strict=True):
        left = box[0] > x
        offset = (box[0] - x if left else box[2] - x, (box[1] + box[3]) / 2 - y)
        axis.annotate(
            point.name,
            (point.ratio, point.speeds[way]),
            offset,
            textcoords="offset points",
            ha="left" if left else "right",
            va="center",
            color=OURS if point.ours else PEERS,
            fontsize=FONT,
        )


def main() -> None:
    file, rows, out = asked("Draws ratio against speed of the codecs.", "benchmarks.codecs")
    found = points(rows)
    if not found:
        raise SystemExit(f"{file}: no codec with a ratio and both speeds on {' or '.join(CASES)}")
    draw(found, memcpy(rows), out)


if __name__ == "__main__":
    main()
