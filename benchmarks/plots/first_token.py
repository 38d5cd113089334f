"""The picture of the README: `python -m benchmarks.plots.first_token RESUME.json --out docs/first-token.svg`

RESUME is what `python -m benchmarks.resume --codec entropy --json` wrote. Bars of seconds to the first token: computing
the prefix, and opening the store and resuming it. Plain SVG, so that nothing needs to be installed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WIDTH, LEFT, BAR, GAP = 720, 130, 18, 22
COMPUTED, RESUMED = "#b9b9b9", "#3b6ea5"
TEXT = 'font-family="sans-serif" font-size="13" fill="#444"'


def seconds(path: Path) -> dict[int, tuple[float, float]]:
    """(computing, opening and resuming) by tokens of the prefix."""
    found = {(row["case"], row["metric"]): row["value"] for row in json.loads(path.read_text())}
    lengths = sorted(
        int(case.partition("/")[2]) for case, metric in found if case.startswith("resume/") and metric == "ttft_s"
    )
    resumed = {n: found[f"resume/{n}", "ttft_s"] + found[f"resume/{n}", "open_s"] for n in lengths}
    return {n: (found[f"recompute/{n}", "ttft_s"], resumed[n]) for n in lengths}


def drawn(found: dict[int, tuple[float, float]]) -> str:
    scale = (WIDTH - LEFT - 150) / max(computed for computed, _ in found.values())
    height = 34 + len(found) * (2 * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Seconds to the first token: the prefix computed, or resumed by a new process</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" {TEXT}>Seconds to the first token: '
        f'<tspan fill="#888">prefix computed</tspan>, <tspan fill="{RESUMED}">store opened and resumed</tspan></text>',
    ]
    for number, (tokens, (computed, resumed)) in enumerate(found.items()):
        y = 34 + number * (2 * BAR + GAP)
        lines.append(f'<text x="{LEFT - 10}" y="{y + BAR + 5}" text-anchor="end" {TEXT}>{tokens:,} tokens</text>')
        faster = f", {computed / resumed:.1f} times faster"
        for value, color, more in ((computed, COMPUTED, ""), (resumed, RESUMED, faster)):
            length = max(1.0, value * scale)
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{color}"/>')
            lines.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}" {TEXT}>{value:.2f} s{more}</text>')
            y += BAR
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws how fast a prefix is resumed, as SVG.")
    parser.add_argument("resume", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(drawn(seconds(args.resume)))


if __name__ == "__main__":
    main()
