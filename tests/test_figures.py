"""Every figure in a table of README.md and the pages under docs/ is the one of a kept row of benchmarks/results, or the
page says that it has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmodules import load, tool
from figures import GIVEN, Figure, is_so, numbers, paragraphs, tables, value, without_rows

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
WITH_FIGURES = [page for page in PAGES if tables((ROOT / page).read_text())]
WITH_PROSE = [page for page in PAGES if paragraphs((ROOT / page).read_text())]
WITHOUT = re.compile(r"nothing here is measured|(`[^`]+`[^`]*)+, \d\d? November 2026")


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


def test_a_paragraph_is_read() -> None:
    text = "# A title\n\nOf 512 it takes\n7.0x; `a 9` [3](x/5.md).\n\n<!-- rows:\n7.0 = [a b c]\n-->\n"
    assert paragraphs(text) == [(["512", "7.0", "3"], [Figure("7.0", "[a b c]")])]
    assert not tables(text)


def test_a_table_may_say_why_it_has_no_rows() -> None:
    text = "| a | b |\n|---|---|\n| c | 1, 2, 3, 4 |\n\n<!-- no rows: nothing here is measured -->\n"
    assert without_rows(text) == ["nothing here is measured"]
    assert not without_rows(text.replace("\n\n<!--", "\n\nText.\n\n<!--"))


def test_the_pages_with_figures_are_found() -> None:
    assert {"README.md", "docs/figures.md", "docs/codecs/predictive.md", "docs/gate.md"} <= set(WITH_FIGURES)
    assert {"docs/choosing.md", "docs/learning.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_figures_names_its_rows(page: str) -> None:
    """A table with many numbers is one of figures, unless it says otherwise."""
    text = (ROOT / page).read_text()
    every = [table for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M) if len(numbers(table)) > 3]
    named = [printed for printed, _ in tables(text) if len(printed) > 3]
    reasons = without_rows(text)
    assert len(named) + len(reasons) == len(every)
    assert all(WITHOUT.fullmatch(reason) for reason in reasons)


@pytest.mark.parametrize("page", WITH_FIGURES)
def test_every_figure_of_a_table_is_that_of_its_row(page: str) -> None:
    for printed, figures in tables((ROOT / page).read_text()):
        assert [figure.printed for figure in figures] == printed
        assert not _wrong(figures)


@pytest.mark.parametrize("page", WITH_PROSE)
def test_every_figure_of_a_paragraph_is_that_of_its_row(page: str) -> None:
    for printed, figures in paragraphs((ROOT / page).read_text()):
        remaining = iter(printed)
        assert all(figure.printed in remaining for figure in figures), "the paragraph lacks it, or has it elsewhere"
        assert not _wrong(figures)


def _wrong(figures: list[Figure]) -> dict[str, tuple[str, float]]:
    """The figures that are not those of their rows, and what these say."""
    return {figure.printed: (figure.source, value(figure.source)) for figure in figures if not is_so(figure)}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_a_figure_has_a_command(page: str) -> None:
    text = (ROOT / page).read_text()
    commands = (ROOT / "benchmarks/results/README.md").read_text()
    for _, figures in tables(text) + paragraphs(text):
        for figure in figures:
            files = re.findall(r"\[(\S+) ", figure.source)
            assert files or figure.source == GIVEN, f"{figure} names no row"
            assert all(f"{name.replace('*', '')}.json" in commands for name in files)


@pytest.mark.parametrize("page", PAGES)
def test_printing_the_figures_anew_changes_nothing(page: str) -> None:
    text = (ROOT / page).read_text()
    assert tool("figures").anew(text) == text


def test_figures_are_printed_anew_as_their_rows_are() -> None:
    row = "[resume-entropy resume/512 speedup]"
    table = "| a | b |\n|---|---|\n| 9.1 | `9.1` 9.1x; 8 |\n\n<!-- rows:\n9.1 = ROW\n8 = 1000 * ROW\n-->\n"
    text = table.replace("ROW", row) + f"\nIt is 3 or\n9.1x.\n\n<!-- rows:\n9.1 = {row}\n-->\n"
    anew = tool("figures").anew(text)
    assert "| 9.1 | `9.1` 7.0x; 7,019 |" in anew
    assert "It is 3 or\n7.0x." in anew
    assert tool("figures").anew(anew) == anew
    with pytest.raises(ValueError, match="no number"):
        tool("figures").anew(text.replace("9.1x.", "9.2x."))


def test_the_picture_of_the_readme_is_drawn_from_its_rows() -> None:
    first_token = load("plots.first_token")
    drawn = first_token.drawn(first_token.seconds(ROOT / "benchmarks/results/resume-entropy.json"))
    assert drawn == (ROOT / "docs/first-token.svg").read_text()
