"""What `make site` builds its site from: `python tools/pages.py build/pages`

mkdocs wants all pages in one folder, the repository has them where they belong. This makes a folder of links with the
same tree, so that relative links hold in both.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "ARCHITECTURE.md", "FORMAT.md", "CHANGELOG.md", "docs", "examples", "benchmarks/results")
MORE = ("ci/gpu-wheels.txt", "trie/prior.py", "benchmarks/peers/quality")  # that pages link to


def make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name in (*PAGES, *MORE):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(ROOT / name)


def on_page_markdown(markdown: str, **_: object) -> str:
    """mkdocs calls this for every page: a list begins without an empty line in CommonMark, not in Python-Markdown."""
    lines: list[str] = []
    in_code = False
    for line in markdown.split("\n"):
        before = lines[-1] if lines else ""
        is_item = re.match(r"(?:[-*]|\d+\.) ", line) is not None
        if is_item and not in_code and before.strip() and not re.match(r"(?:[-*]|\d+\.) | ", before):
            lines.append("")
        if line.startswith("```"):
            in_code = not in_code
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
