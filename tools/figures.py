"""Prints the figures of README.md and docs/ anew from the rows that they name, after benchmarks/results changed.

    python tools/figures.py [PAGE ...]

Each number keeps its digits behind the point. What is said around them stays: read the changes (`git diff`) before they
are committed, for a sentence may no longer be true. The rows are named as tests/helpers/figures.py says.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import figures  # noqa: E402


def anew(text: str) -> str:
    """A page with the figures of today's rows."""
    text = figures.TABLE.sub(lambda found: _block(found[1], found[2], 2), text)
    return figures.PROSE.sub(lambda found: _block(found[1], found[2], 0), text)


def _block(shown: str, comment: str, head: int) -> str:
    """A table or a paragraph with its comment. head: lines without figures."""
    named = [line.partition(" = ")[::2] for line in comment.strip().splitlines()]
    lines = [f"{_printed(old, source)} = {source}\n" for old, source in named]
    waiting = [(old, _printed(old, source)) for old, source in named]
    out = []
    for number, line in enumerate(shown.splitlines(keepends=True)):
        out.append(line if number < head else _line(line, waiting, in_table=head > 0))
    if waiting:
        raise ValueError(f"no number in the text for {waiting[0][0]!r}: {shown.splitlines()[0]}")
    return f"{''.join(out)}\n<!-- rows:\n{''.join(lines)}-->"


def _line(line: str, waiting: list[tuple[str, str]], in_table: bool) -> str:
    """A line with what waits put in, in order; that is waited for no more."""
    hidden = figures.HIDDEN.sub(lambda found: "\0" * len(found[0]), line)
    if in_table:  # the first column has none
        begin = hidden.index("|", 1)
        hidden = "\0" * begin + hidden[begin:]
    out, done = "", 0
    for found in figures.NUMBER.finditer(hidden):
        if waiting and found[0] == waiting[0][0]:
            out += line[done : found.start()] + waiting.pop(0)[1]
            done = found.end()
    return out + line[done:]


def _printed(old: str, source: str) -> str:
    """A value with as many digits behind the point as before."""
    if source == figures.GIVEN:
        return old
    digits = len(old.partition(".")[2])
    return f"{round(figures.value(source), digits) + 0.0:,.{digits}f}"  # + 0.0: never -0.0


def main() -> None:
    pages = [Path(name) for name in sys.argv[1:]] or [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        found = anew(text)
        if found != text:
            page.write_text(found, encoding="utf-8")
            print(page, sum(map(str.__ne__, text.splitlines(), found.splitlines())), "lines")


if __name__ == "__main__":
    main()
