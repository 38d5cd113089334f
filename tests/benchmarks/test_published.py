"""The runner of published tables, and what it says of figures that others published."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from benchmodules import load

ROOT = Path(__file__).parent.parent.parent
published, common = load("published"), load("common")
paper, tsc = load("published.paper"), load("published.tsc")


def made(name: str = "tsc"):
    return paper.Paper(name, common.Rows("published"), argparse.Namespace(quick=True, model=None, text=None, windows=1))


def test_every_file_is_a_paper_and_every_paper_a_file() -> None:
    files = {path.stem for path in (ROOT / "benchmarks/published").glob("*.py")}
    assert set(published.PAPERS) <= files
    assert not {name for name in published.PAPERS if not callable(load(f"published.{name}").run)}


def test_a_published_figure_is_the_peer_of_its_row() -> None:
    given = made("some")
    given.row("a", "ratio", 6.0, "x", 3.0)
    given.row("b", "ratio", 6.0, "x")
    assert [(x["case"], x["peer"], x["ratio"]) for x in given.rows.rows] == [
        ("some/a", "paper", 2.0),
        ("some/b", None, None),
    ]


def test_what_tsc_counts_comes_to_its_published_figures() -> None:
    given = made()
    tsc.counted(given)
    found = {x["case"]: x for x in given.rows.rows}
    assert found["tsc/counted/4bit/of-32bit"]["ratio"] == pytest.approx(1, abs=0.03)
    assert found["tsc/counted/put-again-every-kappa/of-32bit"]["ratio"] == pytest.approx(1, abs=0.05)
    assert found["tsc/counted/kappa64/of-16bit"]["value"] == pytest.approx(16 / (16 / 64 + 63 / 64 * 4.125), 1e-5)
    assert tsc.growth(1024, 64) == 8.5
