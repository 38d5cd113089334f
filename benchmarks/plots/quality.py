"""Rate against distortion of coding with loss: `python -m benchmarks.plots.quality FILE.json --out PICTURE.png`

FILE is what `python -m benchmarks.quality --json` wrote. One line a family of methods, one mark a rate; both
divergences of protocol A, over all scored tokens and over the first 64.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.plots.canvas import asked, plotting, save

METRICS = {"kl": "KL, nats a token, all 512", "kl_first64": "KL, nats a token, the first 64"}
OURS = "predictive"
COLORS = ("#3b6ea5", "#5f8f3f", "#8a6d3b", "#7b4fa3", "#2f8f8f", "#777777")
_RATE = re.compile(r"[/@][0-9.]+(bit)?$")

Families = dict[str, list[tuple[float, float]]]
"""Points (bits a value, loss) by family, by growing bits."""


def families(rows: list[dict[str, Any]], metric: str) -> Families:
    """Of all methods that have a rate and `metric`; what ends in a rate ("aqua/2bit") belongs to the family before."""
    values = {(row["case"], row["metric"]): row["value"] for row in rows}
    found: Families = {}
    for (case, name), bits in values.items():
        if name == "bits_per_value" and (case, metric) in values and _RATE.search(case):
            family = _RATE.sub("", case).removesuffix("/lossy")
            found.setdefault(family, []).append((bits, values[case, metric]))
    return {family: sorted(points) for family, points in found.items()}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Writes the picture; the format is that of the name."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for axis, (metric, label) in zip(axes, METRICS.items(), strict=True):
        colors = iter(COLORS * 2)
        for family, points in families(rows, metric).items():
            ours = family == OURS
            axis.plot(
                *zip(*points, strict=True),
                marker="o" if ours else "s",
                color="#b3261e" if ours else next(colors),
                linewidth=2 if ours else 1,
                label=family,
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([0.25, 0.5, 1, 2, 4])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("bits a value (bf16: 16)")
        axis.set_title(label)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    save(figure, axes, out)


def main() -> None:
    file, rows, out = asked("Draws rate against distortion.", "benchmarks.quality")
    if not any(families(rows, metric) for metric in METRICS):
        raise SystemExit(f"{file}: no method with a rate and {' or '.join(METRICS)}")
    draw(rows, out)


if __name__ == "__main__":
    main()
