"""The rates that the quality benchmark reads off a ladder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmodules import load

frontier, kept, plot = load("peers.quality.frontier"), load("peers.quality.kept"), load("plots.quality")
CURVE = [(0.2, 0.08), (0.4, 0.02), (0.8, 0.005)]


def test_a_rung_is_found_exactly_and_between_rungs_logarithms_are_interpolated() -> None:
    assert frontier.bits_at(CURVE, 0.02) == pytest.approx(0.4)
    assert frontier.bits_at(CURVE, 0.01) == pytest.approx(0.4 * math.sqrt(2))
    assert frontier.bits_at(CURVE[::-1], 0.01) == pytest.approx(0.4 * math.sqrt(2))


def test_nothing_is_promised_outside_of_the_ladder() -> None:
    assert frontier.bits_at(CURVE, 0.001) is None
    assert frontier.bits_at(CURVE, 0.5) == pytest.approx(0.2)


def test_a_lucky_rung_below_a_worse_one_does_not_count() -> None:
    assert frontier.bits_at([(0.2, 0.001), (0.4, 0.02), (0.8, 0.005)], 0.01) > 0.4


def test_every_loss_must_be_as_small_as_the_peers() -> None:
    curves = {"kl": CURVE, "near": [(b, 2 * y) for b, y in CURVE]}
    peers = {"peer": {"kl": 0.02, "near": 0.02}}
    found = frontier.frontier(curves, peers, {"at": ("peer", 1.0), "half": ("peer", 0.5), "other": ("absent", 1.0)})
    assert found["at"] == (pytest.approx(0.4 * math.sqrt(2)), "peer")
    assert found["half"][0] == pytest.approx(0.8)
    assert "other" not in found


def row(case: str, metric: str, value: float, ratio: float | None = None) -> dict[str, object]:
    return {"case": case, "metric": metric, "value": value, "unit": "", "ratio": ratio}


def test_what_is_measured_anew_takes_the_place_of_kept_rows() -> None:
    old = [row("a", "kl", 1.0), row("b", "kl", 2.0), row("b", "top1", 0.5), row("c", "kl", 3.0)]
    new = [row("b", "kl", 2.5), row("d", "kl", 4.0)]
    assert kept.merged(old, new) == [old[0], new[0], old[3], new[1]]
    assert kept.merged(old, []) == old
    assert kept.values_of([*old, *new])["b"]["kl"] == (2.5, "")


def test_what_is_missing_is_not_compared_with_and_a_ratio_is_kept() -> None:
    found = kept.values_of([row("a", "missing", 1), row("b", "refused", 1), row("c", "perplexity", 7.0, 1.02)])
    assert found == {"c": {"perplexity": (7.0, ""), "perplexity_ratio": (1.02, "x")}}


def test_a_plot_of_rate_and_distortion_has_a_line_a_family(tmp_path: Path) -> None:
    rows = [
        {"case": case, "metric": metric, "value": value}
        for case, bits, kl in (("predictive/lossy@0.5", 0.5, 0.004), ("predictive/lossy@0.25", 0.25, 0.01),
                               ("aqua/2bit", 2.1, 0.02), ("exact", 16.0, 0.0))
        for metric, value in (("bits_per_value", bits), ("kl", kl), ("kl_first64", 2 * kl))
    ]  # fmt: skip
    assert plot.families(rows, "kl") == {"predictive": [(0.25, 0.01), (0.5, 0.004)], "aqua": [(2.1, 0.02)]}
    pytest.importorskip("matplotlib")
    plot.draw(rows, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
