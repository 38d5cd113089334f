"""The plots, as what plotly.js draws: plain dictionaries. Colours are names, which the page resolves for its theme."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvstore.metrics import Metric
from kvstore.report.data import ReportData
from kvstore.report.tree import Node
from kvstore.report.words import share, size
from kvstore.timing import Timing

Figure = dict[str, Any]
Label = Callable[[Node], str]
_MOST_FAMILIES = 10
_TIERS = (
    ("device", Metric.GET_HIT_TOKENS_DEVICE),
    ("queue", Metric.GET_HIT_TOKENS_QUEUE),
    ("host", Metric.GET_HIT_TOKENS_HOST),
    ("disk", Metric.GET_HIT_TOKENS_DISK),
    ("donors", Metric.GET_HIT_TOKENS_DONORS),
    ("other", Metric.GET_HIT_TOKENS_OTHER),
)


def figures(data: ReportData, label: Label) -> dict[str, Figure]:
    """Return the plots by the id of the element that they are drawn into; those without anything to show are left out.

    Args:
        data: of the page.
        label: what a node of the tree is called.
    """
    found = {"plot-space": _space(data), "plot-tree": _tree(data, label)} if data.records else {}
    if data.savings.alone:
        found["plot-savings"] = _savings(data)
    if data.families:
        found["plot-families"] = _families(data)
    if data.history:
        found |= {"plot-hits": _hits(data), "plot-latency": _latency(data)}
    return found


def _space(data: ReportData) -> Figure:
    parts = [part for part in data.space if part.bytes][::-1]
    free = data.budget - data.used
    names, sizes = [part.name for part in parts], [part.bytes for part in parts]
    if free > 0:
        names, sizes = ["free of the budget", *names], [free, *sizes]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": sizes,
        "text": [size(nbytes) for nbytes in sizes],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": ["--quiet" if name.startswith("free") else "--c1" for name in names]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    return {"data": [bar], "layout": _room_for_text(sizes), "height": 300}


def _room_for_text(sizes: list[int]) -> Figure:
    """The layout of bars that lie, with their sizes behind them."""
    axis = {"visible": False, "range": [0, 1.35 * max([1, *sizes])]}
    return {"xaxis": axis, "yaxis": {"automargin": True, "showgrid": False}}


def _savings(data: ReportData) -> Figure:
    saved = data.savings
    sizes = [saved.stored, saved.coded, saved.shared, saved.alone]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": ["on disk, with donors", "coded", "each block once", "each sequence alone"],
        "x": sizes,
        "text": [size(nbytes) for nbytes in sizes],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": ["--c1", "--c2", "--c2", "--quiet"]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    return {"data": [bar], "layout": _room_for_text(sizes), "height": 220}


def _over_time(data: ReportData) -> tuple[list[int], list[str], Figure]:
    """Numbers of the samples, when each ended, and an axis of them: each takes the same room, however long it is."""
    times = [_at(sample.end) for sample in data.history]
    some = sorted({len(times) // 6, len(times) // 2, len(times) - 1 - len(times) // 6})
    axis = {"tickvals": some, "ticktext": [times[i] for i in some], "tickangle": 0}
    return list(range(len(times))), times, {**axis, "range": [-0.6, len(times) - 0.4]}


def _hits(data: ReportData) -> Figure:
    numbers, times, axis = _over_time(data)
    lines = []
    for color, (name, metric) in enumerate(_TIERS, start=1):
        tokens = [sample.counts.get(metric, 0) for sample in data.history]
        asked = [sample.counts.get(Metric.GET_TOKENS, 0) for sample in data.history]
        if any(tokens):
            rates = [100 * got / all_ if all_ else None for got, all_ in zip(tokens, asked, strict=True)]
            lines.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": numbers,
                    "customdata": times,
                    "y": rates,
                    "marker": {"color": f"--c{color}"},
                    "hovertemplate": f"%{{customdata}}<br>{name}: %{{y:.1f}} %<extra></extra>",
                }
            )
    layout = {
        "barmode": "stack",
        "bargap": 0.1,
        "xaxis": axis,
        "yaxis": {"range": [0, 100], "ticksuffix": " %", "title": {"text": "of the tokens asked for"}},
        "showlegend": True,
    }
    return {"data": lines, "layout": layout, "height": 320}


def _latency(data: ReportData) -> Figure:
    numbers, times, axis = _over_time(data)
    lines = []
    wanted = ((Timing.GET, 0.5), (Timing.GET, 0.95), (Timing.GET, 0.99), (Timing.PUT, 0.5), (Timing.PUT, 0.99))
    for color, (timing, quantile) in enumerate(wanted, start=1):
        found = [each.timings[timing].quantile(quantile) if timing in each.timings else None for each in data.history]
        if any(found):
            name = f"{timing.value} p{100 * quantile:.0f}"
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": numbers,
                    "customdata": times,
                    "y": [None if value is None else 1000 * value for value in found],
                    "line": {"color": f"--c{color}", "dash": "solid" if timing is Timing.GET else "dot"},
                    "hovertemplate": f"%{{customdata}}<br>{name}: %{{y:.3g}} ms<extra></extra>",
                }
            )
    layout = {
        "xaxis": axis,
        "yaxis": {"type": "log", "ticksuffix": " ms", "dtick": 1, "exponentformat": "none"},
        "showlegend": True,
    }
    return {"data": lines, "layout": layout, "height": 320}


def _tree(data: ReportData, label: Label) -> Figure:
    whole = sum(node.bytes for node in data.nodes if node.parent < 0)
    nodes = data.nodes
    texts = [
        f"{node.all_tokens:,} tokens, {size(node.bytes)} ({share(node.bytes, whole)})<br>"
        f"{node.sequences:,} sequences<br>uses {node.uses:,}"
        + (f"<br>probability {100 * node.probability:.1f} %" if node.probability is not None else "")
        + (f"<br>{node.folded:,} more below" if node.folded else "")
        for node in nodes
    ]
    icicle = {
        "type": "icicle",
        "ids": ["all", *(f"n{node.id}" for node in nodes)],
        "parents": ["", *("all" if node.parent < 0 else f"n{node.parent}" for node in nodes)],
        "labels": ["all", *map(label, nodes)],
        "values": [whole, *(node.bytes for node in nodes)],
        "branchvalues": "total",
        "sort": False,
        "tiling": {"orientation": "v", "pad": 1},
        "pathbar": {"visible": True, "thickness": 24},
        "maxdepth": 8,
        "hovertext": [f"{data.records:,} blocks", *texts],
        "hovertemplate": "<b>%{label}</b><br>%{hovertext}<extra></extra>",
        "textposition": "middle left",
    }
    shades = {
        "uses": [None, *(node.uses for node in nodes)],
        "probability": [None, *(node.probability for node in nodes)],
    }
    layout = {"uniformtext": {"minsize": 10, "mode": "hide"}}
    return {"data": [icicle], "layout": layout, "height": 520, "shades": shades}


def _families(data: ReportData) -> Figure:
    shown = data.families[:_MOST_FAMILIES]
    names = [f"block {family.donor}" for family in shown][::-1]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": sizes[::-1],
            "text": [size(nbytes) for nbytes in sizes[::-1]],
            "textposition": "outside",
            "marker": {"color": color},
            "hovertemplate": f"%{{y}}, {name}: %{{text}}<extra></extra>",
        }
        for name, color, sizes in (
            ("as stored", "--c2", [family.bytes for family in shown]),
            ("raw", "--quiet", [family.raw_bytes for family in shown]),
        )
    ]
    layout = {**_room_for_text([family.raw_bytes for family in shown]), "barmode": "group", "showlegend": True}
    return {"data": bars, "layout": layout, "height": 120 + 40 * len(names)}


def _at(moment: float) -> str:
    return time.strftime("%b %d %H:%M", time.gmtime(min(moment, 253402300799.0)))
