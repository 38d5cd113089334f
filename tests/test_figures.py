"""Every figure of README.md and docs/figures.md is the one of a kept row of benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmodules import load
from figures import Figure, is_so, numbers, tables, value

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/figures.md")


def test_a_table_is_read() -> None:
    text = (
        "| what 12 | ours | theirs |\n|---|---|---|\n| of 512 | 7.0x; `a 9` 1,024 | in 4-bit [3](x/5.md) |\n"
        "\n<!-- rows:\n7.0 = [a b c]\n1,024 = 2 * [d e f @g]\n3 = [x y z]\n-->\n"
    )
    assert tables(text) == [
        (["7.0", "1,024", "3"], [Figure("7.0", "[a b c]"), Figure("1,024", "2 * [d e f @g]"), Figure("3", "[x y z]")])
    ]


def test_a_wrong_figure_is_found() -> None:
    row = "[resume-entropy resume/512 speedup]"
    assert value(row) == 7.01914
    assert is_so(Figure("7.02", row))
    assert not is_so(Figure("7.1", row))
    with pytest.raises(LookupError):
        value("[resume-entropy resume/512 nothing]")
    with pytest.raises(ValueError, match="formula"):
        value("open('x')")


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_figures_names_its_rows(page: str) -> None:
    """A table with many numbers is one of figures."""
    text = (ROOT / page).read_text()
    every = [table for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M) if len(numbers(table)) > 3]
    assert len(tables(text)) == len(every) >= 1


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(tables((ROOT / page).read_text())))]
)
def test_every_figure_is_that_of_its_row(page: str, number: int) -> None:
    printed, figures = tables((ROOT / page).read_text())[number]
    assert [figure.printed for figure in figures] == printed
    wrong = {figure.printed: (figure.source, value(figure.source)) for figure in figures if not is_so(figure)}
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_a_figure_has_a_command(page: str) -> None:
    commands = (ROOT / "benchmarks/results/README.md").read_text()
    for _, figures in tables((ROOT / page).read_text()):
        for figure in figures:
            for name in re.findall(r"\[(\S+) ", figure.source):
                assert f"{name.replace('*', '')}.json" in commands


def test_the_picture_of_the_readme_is_drawn_from_its_rows() -> None:
    first_token = load("plots.first_token")
    drawn = first_token.drawn(first_token.seconds(ROOT / "benchmarks/results/resume-entropy.json"))
    assert drawn == (ROOT / "docs/first-token.svg").read_text()
