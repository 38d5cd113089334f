"""The page: whole HTML, nothing of it is fetched, nothing of a store is taken for HTML, and it stays small."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reportcases import Page, table_of
from small_stores import config, identity, kv_of, put, stored, tokens_of
from typer.testing import CliRunner

from kvstore import KVStore
from kvstore.cli import app
from kvstore.core.history import Sample
from kvstore.report import ReportData, collect, render
from kvstore.report.tree import PrefixTree

NASTY = "</script><script>alert(1)</script><b onclick='x'>&amp;"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    with KVStore(tmp_path_factory.mktemp("store"), identity(), config(host=0)) as store:
        for number in range(1, 5):
            put(store, tokens_of(number, 20))
            stored(store, tokens_of(number, 16))
        store.session(NASTY).save(tokens_of(1, 20), kv_of(tokens_of(1, 20)))
        store.flush()
        return collect(store)


def test_it_is_whole_and_fetches_nothing(data: ReportData) -> None:
    html = render(data)
    page = Page(html)
    assert page.problems == []
    assert set(page.fetched) <= {"data:,"} | {f"#{name}" for name in page.ids}
    assert len(page.ids) == len(set(page.ids))
    assert page.headings[0] == 1
    assert all(after - before <= 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert "default-src 'none'" in html
    assert not re.search(r"@import|url\(", html)
    assert len(html) < 2_500_000


def test_every_plot_has_a_place_a_name_and_a_table(data: ReportData) -> None:
    html = render(data)
    drawn = json.loads(re.findall(r'id="figures">(.*?)</script>', html)[0])
    places = re.findall(r'<div class="plot" id="([\w-]+)" role="img" aria-label="[^"]*table[^"]*">', html)
    assert set(drawn) <= set(places)
    assert {"plot-space", "plot-savings", "plot-tree", "plot-hits", "plot-latency"} <= set(drawn)
    tree = drawn["plot-tree"]["data"][0]
    assert len(tree["ids"]) == len(tree["parents"]) == len(tree["labels"]) == len(tree["values"])
    assert all(len(shade) == len(tree["ids"]) for shade in drawn["plot-tree"]["shades"].values())
    assert set(tree["parents"]) - {""} <= set(tree["ids"])


def test_the_text_says_the_numbers(data: ReportData) -> None:
    text = Page(render(data)).text
    for words in (f"{data.records:,}", "No problems.", "no record was read", "Table of samples", "raw"):
        assert words in text


@pytest.mark.parametrize("decode", [None, lambda ids: NASTY])
def test_nothing_of_a_store_is_html(data: ReportData, decode: object) -> None:
    evil = replace(data, path=NASTY, model=NASTY, facts=((NASTY, NASTY),), lost=(NASTY,))
    html = render(evil, decode)  # type: ignore[arg-type]
    page = Page(html)
    assert page.problems == []
    assert page.tags.count("script") == 3
    assert "b" not in page.tags
    assert "alert(1)" in page.text
    for figure in json.loads(re.findall(r'id="figures">(.*?)</script>', html)[0]).values():
        assert "<script" not in json.dumps(figure["data"])


def test_a_store_without_a_history_says_so(data: ReportData) -> None:
    text = Page(render(replace(data, history=(), budget=0))).text
    assert "The store has no history yet." in text
    assert "The budget is not known" in text


def test_a_sample_without_gets_draws(data: ReportData) -> None:
    silent = replace(data.history[-1], counts={})
    assert Page(render(replace(data, history=(silent, Sample(0.0, 1.0, 1.0, {}, {}, silent.timings))))).problems == []


def test_it_stays_small_with_many_blocks(data: ReportData) -> None:
    many = replace(data, nodes=tuple(PrefixTree(table_of(100_000, 0)).nodes()), history=data.history * 96)
    assert len(render(many)) < 3_000_000


def test_without_plotly_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(tmp_path / "store", identity(), config()):
        pass
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "store"), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 1
    assert done.stderr == "error: the report needs plotly; pip install 'kvstore-lm[report]'\n"
    assert not (tmp_path / "page.html").exists()
