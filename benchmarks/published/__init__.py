"""The tables of papers, measured here: `python -m benchmarks.published [--only NAME ...]`.

Of each paper one file, with a function `run(paper)` that measures and adds rows; its docstring says where the figures
were published, what they count, and what differs here. A row with the peer `paper` is a figure that was published, and
`ratio` is ours divided by it; rows without a peer say what the paper leaves out.
"""

from __future__ import annotations

PAPERS = {
    "aqua": "AQUA-KV, arXiv 2501.19392, 2025",
    "splitzip": "SplitZip, arXiv 2605.01708, 2026",
    "tsc": "Temporal state compression, technical reports I to IV, Solstice EIM, 2026",
}
"""What the files of this folder measure, by their names: only ever added to."""
