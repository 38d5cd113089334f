"""Pictures of semantic deduplication: `python -m benchmarks.plots.semantic DEDUP.json SEAM.json --out FOLDER`

DEDUP is what `python -m benchmarks.dedup --json` wrote, SEAM what `python -m benchmarks.seam --json` did. Writes
`semantic-ratio.png`, the ratio by workload, and `semantic-seam.png`, how much a donor explains by the distance from
where the common tokens begin.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.plots.canvas import plotting, save

WAYS = {"zipnn": "#b9b9b9", "predictive": "#3b6ea5", "donor": "#b3261e"}
WORKLOADS = ("near-synonym", "other-instruction", "edited-transcript", "retrieval", "sharegpt", "unrelated")
CASES = {"near-synonym": "#5f8f3f", "other-instruction": "#3b6ea5", "retrieval": "#b3261e"}

Values = dict[tuple[str, str], float]
"""By case and metric."""


def values(path: Path) -> Values:
    return {(row["case"], row["metric"]): row["value"] for row in json.loads(path.read_text())}


def bars(found: Values) -> dict[str, list[float]]:
    """Ratios by way, for each of WORKLOADS; 0 where one is missing."""
    return {way: [found.get((f"{way}/lossless/{name}", "ratio"), 0.0) for name in WORKLOADS] for way in WAYS}


def lines(found: Values, case: str, which: str) -> list[tuple[float, float]]:
    """(first token of the distance, share that is not explained), by distance."""
    points = [
        (int(name.rpartition("/")[2]), 1 - value)
        for (name, metric), value in found.items()
        if name.startswith(f"seam/{case}/") and metric == f"explained_{which}"
    ]
    return sorted((max(first, 0.5), left) for first, left in points)


def draw_ratio(found: Values, out: Path) -> None:
    pyplot = plotting()
    figure, axis = pyplot.subplots(figsize=(9.5, 4.2), layout="constrained")
    ways = bars(found)
    for number, (way, heights) in enumerate(ways.items()):
        places = [place + (number - 1) * 0.27 for place in range(len(WORKLOADS))]
        drawn = axis.bar(places, heights, 0.25, color=WAYS[way], label=way)
        axis.bar_label(drawn, fmt="%.2f", fontsize=7)
    axis.set_xticks(range(len(WORKLOADS)), WORKLOADS)
    axis.set_ylabel("raw bytes / stored bytes")
    axis.legend(frameon=False)
    save(figure, [axis], out, dpi=110)


def draw_seam(found: Values, out: Path) -> None:
    pyplot = plotting()
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for case, color in CASES.items():
        for which, style in (("k", "-"), ("v", "--")):
            points = lines(found, case, which)
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    marker="o",
                    markersize=3,
                    color=color,
                    label=f"{case} {which.upper()}",
                )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens from the seam")
    axis.set_ylabel("variance that the donor does not explain")
    axis.legend(frameon=False, fontsize=8)
    save(figure, [axis], out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dedup", type=Path)
    parser.add_argument("seam", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    args = parser.parse_args()
    draw_ratio(values(args.dedup), args.out / "semantic-ratio.png")
    draw_seam(values(args.seam), args.out / "semantic-seam.png")


if __name__ == "__main__":
    main()
