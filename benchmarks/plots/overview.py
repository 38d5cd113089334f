"""Every codec and every peer in one picture and one table: `python -m benchmarks.plots.overview --out PICTURE.png`

From the rows in benchmarks/results: of exact codecs those of `benchmarks.codecs`, `dedup` and `speculative`, of those
with loss what `benchmarks.quality --json benchmarks/results/quality-systems.json` measured: whatever has
`bits_per_value` and `kl` there is drawn, a line a family. `--table` prints the table of docs/codecs/README.md with the
rows that it names.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.codecs.base import LIBRARIES
from benchmarks.plots.canvas import plotting, save
from benchmarks.plots.codecs import CASES, place

RESULTS = Path(__file__).parents[1] / "results"
LOSSY = ("quality-systems", "quality")  # what is in the first is not looked for in the second, of other windows
OURS = ("raw", "splitzip", "entropy", "zstd", "predictive", "donor", "speculative", "tokens", "predictive-recent")
RED, BLUE, GREEN = "#b3261e", "#3b6ea5", "#5f8f3f"
COLORS = ("#3b6ea5", "#5f8f3f", "#8a6d3b", "#7b4fa3", "#2f8f8f", "#c77f1b", "#777777", "#444444")
FONT = 8
WORST = 1.0  # nats a token: more is out of the picture
_RATE = re.compile(r"[/@][0-9.]+(bit)?$")


@dataclass(frozen=True)
class Cell:
    """A value and the formula of rows that it is, as tests/test_figures.py reads them."""

    value: float
    source: str


@dataclass(frozen=True)
class Entry:
    """ratio: raw bytes / coded. speed: GB/s of raw bytes decoded by one core. kl: nats a token, None if exact."""

    name: str
    ratio: Cell
    speed: Cell | None = None
    kl: Cell | None = None
    near: Cell | None = None

    @property
    def family(self) -> str:
        """What its line is called."""
        family = _RATE.sub("", self.name)
        return family if self.kl is None or family != "predictive" else "predictive, with loss"


class Rows:
    """The kept rows, by file, case and metric."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._values = {
            (path.stem, row["case"], row["metric"]): row["value"]
            for path in sorted(folder.glob("*.json"))
            for row in json.loads(path.read_text())
            if isinstance(row, dict) and {"case", "metric", "value"} <= row.keys()
        }

    def cell(self, file: str, case: str, metric: str, formula: str = "{}") -> Cell | None:
        """formula: of the row, with {} for it."""
        value = self._values.get((file, case, metric))
        if value is None:
            return None
        before, _, after = formula.partition("{}")
        number = float(before.removesuffix(" / ")) / value if before else value
        assert not after
        return Cell(number, formula.format(f"[{file} {case} {metric}]"))

    def cases(self, file: str) -> list[str]:
        return list(dict.fromkeys(case for name, case, _ in self._values if name == file))


def exact(rows: Rows) -> list[Entry]:
    """Codecs without loss, of real caches in bfloat16."""
    found: dict[str, Entry] = {}

    def add(name: str, ratio: Cell | None, speed: Cell | None = None) -> None:
        if ratio is not None and name not in found:
            found[name] = Entry(name, ratio, speed)

    for file in ("codecs", "codecs-predictive"):
        for name in dict.fromkeys(case.split("/")[0] for case in rows.cases(file)):
            for case in (*CASES, "lossless/KV"):
                ratio = rows.cell(file, f"{name}/{case}", "ratio")
                add(name, ratio, rows.cell(file, f"{name}/{case}", "decode_GBps"))
    for case in ("near-synonym", "other-instruction", "retrieval"):
        speed = rows.cell("dedup", f"donor/decode/{case}", "decode_GBps")
        add(f"donor, {case}", rows.cell("dedup", f"donor/lossless/{case}", "ratio"), speed)
    for weights in ("fp8", "int8"):
        add(f"speculative, {weights}", rows.cell("speculative", weights, "ratio"))
    return list(found.values())


def lossy(rows: Rows) -> list[Entry]:
    found: list[Entry] = []
    for file in LOSSY:
        families = {entry.family for entry in found}
        for case in rows.cases(file):
            ratio, kl = rows.cell(file, case, "bits_per_value", "16 / {}"), rows.cell(file, case, "kl")
            if ratio is not None and kl is not None:
                name = case.replace("/lossy@", "@").replace("/recent@", "-recent@")
                near, speed = rows.cell(file, case, "kl_first64"), rows.cell(file, case, "decode_GBps")
                found += [entry for entry in [Entry(name, ratio, speed, kl, near)] if entry.family not in families]
    return sorted(found, key=lambda entry: (entry.family, entry.ratio.value))


def is_ours(entry: Entry) -> bool:
    return entry.family.split(",")[0] in OURS and entry.name not in LIBRARIES


# -- the table -----------------------------------------------------------------------------------------------------


def table(entries: list[Entry]) -> str:
    """Markdown, with the comment that names the rows."""
    lines = ["| codec | raw / coded | KL, nats a token | of the first 64 | decodes, GB/s |", "|---|---|---|---|---|"]
    sources = []
    for entry in entries:
        name = f"**{entry.name}**" if is_ours(entry) else entry.name
        cells = []
        without = "exact" if entry.kl is None else "-"
        for cell, digits, missing in (
            (entry.ratio, 2, "-"), (entry.kl, 4, without), (entry.near, 4, without), (entry.speed, 3, "-")
        ):  # fmt: skip
            if cell is None:
                cells.append(missing)
                continue
            printed = f"{cell.value:,.{digits}f}"
            cells.append(printed)
            sources.append(f"{printed} = {cell.source}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "<!-- rows:", *sources, "-->"])


# -- the picture ---------------------------------------------------------------------------------------------------


def draw(entries: list[Entry], out: Path) -> None:
    """Above how fast a codec decodes, below what it loses, over how much smaller it makes a cache."""
    figure, (speeds, losses) = plotting().subplots(
        2, 1, figsize=(11, 10), sharex=True, layout="constrained", height_ratios=(1, 1.2)
    )
    families = list(dict.fromkeys(entry.family for entry in entries if entry.kl is not None))
    others = [family for family in families if family.split(",")[0] not in OURS]
    colors = {family: COLORS[at % len(COLORS)] for at, family in enumerate(others)}
    styles = {family: "-" if at < len(COLORS) else "--" for at, family in enumerate(others)}
    _draw_losses(losses, entries, colors, styles)
    _draw_speeds(speeds, entries, colors, styles)
    for axis in (speeds, losses):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    losses.set_xticks([1, 1.5, 2, 3, 4, 8, 16, 32, 64])
    losses.xaxis.set_major_formatter("{x:g}")
    losses.minorticks_off()
    losses.set_xlim(0.92, 80)
    losses.set_xlabel("raw bytes / coded bytes: further right is smaller")
    speeds.set_ylabel("decodes, GB/s of raw bytes, one core")
    losses.set_ylabel("KL, nats a token: further down is nearer to the exact cache")
    speeds.set_title("● exact   ■ with loss   red: codecs of this project", fontsize=10)
    figure.draw_without_rendering()  # fixes the axes: only then is it known where a mark lies
    figure.set_layout_engine("none")
    _label(speeds, _speed_labels(entries, colors), figure.dpi)
    _label(losses, _loss_labels(entries, colors), figure.dpi)
    save(figure, (speeds, losses), out)


def _color(entry: Entry, colors: dict[str, str]) -> str:
    if is_ours(entry):
        return RED
    return colors.get(entry.family, BLUE)


def _draw_losses(axis: Any, entries: list[Entry], colors: dict[str, str], styles: dict[str, str]) -> None:
    for family in dict.fromkeys(entry.family for entry in entries):
        points = [x for x in entries if x.family == family and x.kl is not None and x.kl.value <= WORST]
        if points:
            axis.plot(
                [x.ratio.value for x in points],
                [x.kl.value for x in points if x.kl is not None],
                marker="s",
                markersize=5,
                color=_color(points[0], colors),
                linestyle=styles.get(family, "-"),
                linewidth=2 if is_ours(points[0]) else 1,
            )


def _draw_speeds(axis: Any, entries: list[Entry], colors: dict[str, str], styles: dict[str, str]) -> None:
    for family in dict.fromkeys(entry.family for entry in entries):
        points = [x for x in entries if x.family == family and x.speed is not None]
        for point in points if points and points[0].kl is None else points[:1]:
            line = points if point.kl is not None else [point]
            axis.plot(
                [x.ratio.value for x in line],
                [x.speed.value for x in line if x.speed is not None],
                marker="o" if point.kl is None else "s",
                markersize=6 if point.kl is None else 5,
                color=_color(point, colors),
                linestyle=styles.get(family, "-"),
                linewidth=1,
            )


Labels = list[tuple[str, float, float, str]]
"""(name, x, y, color)."""


def _speed_labels(entries: list[Entry], colors: dict[str, str]) -> Labels:
    first = {entry.family: entry for entry in reversed(entries) if entry.speed is not None}
    return [
        (family, x.ratio.value, x.speed.value, _color(x, colors))
        for family, x in reversed(first.items())
        if x.speed is not None
    ]


def _loss_labels(entries: list[Entry], colors: dict[str, str]) -> Labels:
    """At the end of each line that loses least."""
    found: Labels = []
    for family in dict.fromkeys(entry.family for entry in entries):
        points = [(x.kl.value, x) for x in entries if x.family == family and x.kl is not None and x.kl.value <= WORST]
        if points:
            kl, best = min(points, key=lambda point: point[0])
            found.append((family, best.ratio.value, kl, _color(best, colors)))
    return found


def _label(axis: Any, labels: Labels, dpi: float) -> None:
    pixels = axis.transData.transform([(x, y) for _, x, y, _ in labels])
    marks = [(float(x), float(y)) for x, y in pixels * 72 / dpi]
    boxes = place(marks, [0.6 * FONT * len(name) for name, *_ in labels])
    for (name, *at, color), (x, y), box in zip(labels, marks, boxes, strict=True):
        left = box[0] > x
        offset = (box[0] - x if left else box[2] - x, (box[1] + box[3]) / 2 - y)
        axis.annotate(
            name,
            at,
            offset,
            textcoords="offset points",
            ha="left" if left else "right",
            va="center",
            color=color,
            fontsize=FONT,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws, or prints, all codecs and peers from the kept rows.")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="where the picture goes")
    parser.add_argument("--table", action="store_true", help="print the table")
    args = parser.parse_args()
    rows = Rows()
    entries = exact(rows) + lossy(rows)
    if args.out:
        draw(entries, args.out)
    if args.table:
        print(table(entries))


if __name__ == "__main__":
    main()
