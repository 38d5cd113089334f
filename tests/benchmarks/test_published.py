"""The runner of published tables, and what it says of figures that others published."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from benchmodules import load

from kvstore import KVLayout

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


def test_what_a_growing_sequence_writes_and_how_far_off_its_tokens_are() -> None:
    given, layout = made(), KVLayout.uniform(1, 1, 64, "float32")
    pairs = [tuple(torch.randn(2, 1, tsc.TOKENS, 64, generator=torch.Generator().manual_seed(0)))]
    tsc.grown(given, "m", layout, pairs)
    tsc.errors(given, "m", layout, pairs)
    found = {(x["case"].removeprefix("tsc/m/"), x["metric"]): x["value"] for x in given.rows.rows}
    assert found["grown/again", "bytes_written"] == pytest.approx(8.5 * found["grown/append", "bytes_written"], 1e-5)
    assert 4 < found["grown/append", "ratio_of_32bit_once"] < 32 / 4
    largest = [found[f"errors/{length}", "largest_error"] for length in tsc.LENGTHS]
    assert largest == sorted(largest)
    late = [found[f"errors/{length}", "rms_error_of_last_64"] for length in tsc.LENGTHS]
    assert max(late) < 1.3 * min(late)
