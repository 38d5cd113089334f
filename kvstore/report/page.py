"""The page: one HTML file that asks for nothing else. Tables and text work without JavaScript; plots need it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources

from kvstore.core.history import Sample
from kvstore.errors import ConfigError
from kvstore.report import sections
from kvstore.report.data import ReportData
from kvstore.report.plots import figures
from kvstore.report.tree import Node
from kvstore.report.words import ratio, share, size, when

Decode = Callable[[Sequence[int]], str]
_MOST_LABEL = 40
# Nothing may be fetched, sent or framed; scripts and styles are those of the page itself.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def render(data: ReportData, decode: Decode | None = None) -> str:
    """Return the page as HTML.

    Args:
        data: what it says.
        decode: turns token ids into text, for the labels of the tree; None to show the ids.

    Raises:
        ConfigError: plotly is not installed.
    """
    library, version = _plotly()
    label = _labels(data, decode)
    parts = [
        ("space", "Where the bytes are", sections.space(data)),
        ("savings", "What each mechanism saves", sections.savings(data)),
        ("history", "Hit rate and latency over time", sections.history(data)),
        ("tree", "Prefix tree", sections.tree(data, label)),
        ("families", "Families of donors", sections.families(data)),
        ("sessions", "Sessions", sections.sessions(data)),
        ("integrity", "Integrity", sections.integrity(data)),
    ]
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in parts)
    body = "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{escape(title)}</h2>{inner}</section>'
        for name, title, inner in parts
    )
    drawn = json.dumps(figures(data, label), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(f"kvstore: {data.path}")}</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<div><h1>{escape(data.path)}</h1>
<p class="dim">{escape(data.model or "a model without a name")}; {when(data.made)}</p></div>
<div class="controls js"><label for="theme">Theme</label>
<select id="theme"><option value="system">system</option><option value="light">light</option>\
<option value="dark">dark</option></select></div>
</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
<p id="failed" class="bad" hidden>The plots cannot be drawn by this browser; the tables say the same.</p>
<noscript><p>The plots need JavaScript; the tables say the same.</p></noscript>
{_summary(data)}
{body}
</main>
<footer><p>Made by <code>kvstore report</code>. Plots are drawn by plotly.js {escape(version)} (MIT licence),
which is part of this file; nothing is fetched.</p></footer>
<script type="application/json" id="figures">{drawn}</script>
<script type="text/plain" id="plotly">{library}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _summary(data: ReportData) -> str:
    saved, recent = data.savings, _together(data.history)
    healthy = data.check.ok and not data.lost
    problems = len(data.check.problems) + len(data.lost)
    rate = recent.hit_rate if recent is not None else None
    rows = [
        ("on disk", size(data.used) + (f" of {size(data.budget)}" if data.budget else ""), ""),
        ("blocks", f"{data.records:,}", ""),
        ("tokens", f"{data.tokens:,}", ""),
        ("smaller than raw sequences", ratio(saved.alone, saved.stored) + (" times" if saved.stored else ""), ""),
        ("hit rate, by tokens", "not known" if rate is None else share(rate, 1), ""),
        ("sessions", f"{data.session_count:,}", ""),
        ("integrity", "no problems" if healthy else f"{problems:,} problems", "good" if healthy else "bad"),
    ]
    cells = "".join(f'<div><dt>{escape(a)}</dt><dd class="{c}">{escape(b)}</dd></div>' for a, b, c in rows)
    return f'<dl class="figures">{cells}</dl>'


def _together(history: Sequence[Sample]) -> Sample | None:
    total: Sample | None = None
    for sample in history:
        total = sample if total is None else total + sample
    return total


def _labels(data: ReportData, decode: Decode | None) -> Callable[[Node], str]:
    namespaces = {number: sections.namespace_name(digest) for number, digest in enumerate(data.namespace_digests)}

    def label(node: Node) -> str:
        if node.kind == "namespace":
            return namespaces[node.namespace]
        if node.kind == "other":
            return f"other ({node.folded:,})"
        text = decode(node.begins) if decode else " ".join(map(str, node.begins))
        text = " ".join(text.split())
        # plotly.js reads some HTML in labels.
        return escape(
            text[:_MOST_LABEL] + ("…" if len(text) > _MOST_LABEL else "") or f"at {node.start:,}", quote=False
        )

    return label


def _plotly() -> tuple[str, str]:
    """plotly.js, packed as base64, and its version."""
    try:
        from plotly.offline import get_plotlyjs, get_plotlyjs_version
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("plotly", "narwhals", "packaging"):
            raise
        raise ConfigError(f"the report needs {error.name.split('.')[0]}; pip install 'kvstore-lm[report]'") from None
    packed = gzip.compress(get_plotlyjs().encode(), 9, mtime=0)
    return base64.b64encode(packed).decode("ascii"), str(get_plotlyjs_version())


def _asset(name: str) -> str:
    return resources.files("kvstore.report").joinpath(name).read_text(encoding="utf-8")
