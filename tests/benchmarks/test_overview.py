"""The picture and the table of all codecs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmodules import load
from figures import tables

overview = load("plots.overview")


def rows(folder: Path, **files: list[tuple[str, str, float]]) -> Any:
    for name, found in files.items():
        made = [{"case": case, "metric": metric, "value": value} for case, metric, value in found]
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(made))
    (folder / "other.json").write_text('{"of": "another form"}')
    return overview.Rows(folder)


def entries(folder: Path) -> Any:
    found = rows(
        folder,
        codecs=[("zipnn/bf16/KV", "ratio", 1.5), ("zipnn/bf16/KV", "decode_GBps", 2.0), ("raw/bf16/KV", "ratio", 1.0)],
        speculative=[("int8", "ratio", 3.0)],
        quality_systems=[
            ("predictive/lossy@0.5", "bits_per_value", 0.5), ("predictive/lossy@0.5", "kl", 0.01),
            ("tsc/4bit", "bits_per_value", 4.0), ("tsc/4bit", "kl", 0.02), ("tsc/4bit", "kl_first64", 0.03),
            ("tsc/4bit", "decode_GBps", 0.25), ("refused/1bit", "refused", 1),
        ],
        quality=[("tsc/4bit", "bits_per_value", 5.0), ("tsc/4bit", "kl", 0.5), ("rtn/2bit", "bits_per_value", 2.0),
                 ("rtn/2bit", "kl", 5.0)],
    )  # fmt: skip
    return overview.exact(found) + overview.lossy(found)


def test_every_codec_with_rows_is_there_and_the_newer_file_counts(tmp_path: Path) -> None:
    found = {x.name: (x.ratio.value, x.kl and x.kl.value, overview.is_ours(x)) for x in entries(tmp_path)}
    assert found == {
        "zipnn": (1.5, None, False),
        "raw": (1.0, None, True),
        "speculative, int8": (3.0, None, True),
        "predictive@0.5": (32.0, 0.01, True),
        "tsc/4bit": (4.0, 0.02, False),
        "rtn/2bit": (8.0, 5.0, False),
    }


def test_the_table_names_the_row_of_each_figure(tmp_path: Path) -> None:
    printed = overview.table(entries(tmp_path))
    ((numbers, figures),) = tables(printed + "\n")
    assert numbers == [figure.printed for figure in figures]
    assert "| tsc/4bit | 4.00 | 0.0200 | 0.0300 | 0.250 |" in printed
    assert "| **speculative, int8** | 3.00 | exact | exact | - |" in printed
    assert "4.00 = 16 / [quality-systems tsc/4bit bits_per_value]" in printed


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    overview.draw(entries(tmp_path), tmp_path / "new" / "all.png")
    assert (tmp_path / "new" / "all.png").read_bytes().startswith(b"\x89PNG")
