"""The sections of the page: what each plot shows, in words and tables."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kvstore.core.keys import namespace_digest
from kvstore.metrics import Metric
from kvstore.report.data import MOST_FAMILIES, MOST_SESSIONS, ReportData
from kvstore.report.tree import Node
from kvstore.report.words import details, ratio, seconds, share, size, table, when
from kvstore.timing import Timing

_MOST_ROWS = 60


def namespace_name(digest: bytes) -> str:
    """Return the beginning of the digest of a namespace; words for the namespace without a name."""
    return "no namespace" if digest == namespace_digest(b"") else f"digest:{digest.hex()[:12]}…"


def space(data: ReportData) -> str:
    """Bytes by part, codec, namespace and segment."""
    whole = max(data.budget, data.used)
    parts = [(part.name, size(part.bytes), share(part.bytes, whole), part.what) for part in data.space]
    if data.budget:
        free = data.budget - data.used
        parts.append(("free of the budget", size(max(0, free)), share(max(0, free), whole), "not written yet"))
    codecs = [
        (
            row.label + (" (against others)" if row.is_member else ""),
            row.blocks,
            row.tokens,
            size(row.raw_bytes),
            size(row.bytes),
            ratio(row.raw_bytes, row.bytes),
        )
        for row in data.codecs
    ]
    names = [
        (_short(namespace_name(row.digest)), row.sequences, row.blocks, row.tokens, size(row.bytes))
        for row in data.namespaces[:_MOST_ROWS]
    ]
    tenths = [f"{10 * i} to {10 * (i + 1)} %" if i < 10 else "full" for i in range(11)]
    fills = [(name, count) for name, count in zip(tenths, data.segments, strict=True) if count]
    note = "" if data.budget else "The budget is not known: the store has no history yet."
    return (
        f"<p>{escape(f'{size(data.used)} in the folder of the store. {note}')}</p>"
        + _plot("plot-space", "Bytes by part; the first table has the same numbers")
        + table("Parts of the folder", ("part", "bytes", "share", "what it is"), parts)
        + table("Codecs", ("codec", "blocks", "tokens", "raw", "on disk", "ratio"), codecs)
        + table("Namespaces", ("namespace", "sequences", "blocks", "tokens", "on disk"), names)
        + table("Segments", ("live share of the file", "segments"), fills)
        + _tiers(data)
    )


def _tiers(data: ReportData) -> str:
    if not data.history:
        return "<p>What the device and the host tier held is not known: the store has no history yet.</p>"
    last = data.history[-1]
    rows = [(tier, size(last.sizes.get(f"{tier}_bytes", 0))) for tier in ("device", "host", "disk")]
    return table("Tiers", ("tier", "bytes"), rows, f"as the writer had them at {when(last.end)}")


def savings(data: ReportData) -> str:
    """From raw sequences to what is on disk, step by step."""
    saved = data.savings
    steps = [
        ("raw, each sequence alone", size(saved.alone), "", "", "as if nothing were shared or coded"),
        _step("shared prefixes", saved.alone, saved.shared, "each block is kept once, whoever begins with it"),
        _step("codecs", saved.shared, saved.coded, "as blocks that stand alone are coded"),
        _step("donors", saved.coded, saved.stored, "blocks coded as their difference from others"),
        ("on disk", size(saved.stored), "", ratio(saved.alone, saved.stored), "all of it; whole pages"),
    ]
    estimate = (
        "What donors save is an estimate: their members are taken to be coded as well alone as the other blocks are. "
        if data.members
        else ""
    )
    words = f"What is on disk now. {estimate}{_time_saved(data)}"
    return (
        f"<p>{escape(words)}</p>"
        + _plot("plot-savings", "Bytes after each mechanism; the table has the same numbers")
        + table("Savings", ("mechanism", "left", "saved", "times smaller", "how"), steps)
    )


def _time_saved(data: ReportData) -> str:
    saved = sum(sample.counts.get(Metric.GET_SAVED_S, 0) for sample in data.history)
    if not saved:
        return "How much sooner gets were than computing is not known: the store has not seen the model compute."
    return f"Gets took about {saved:,} s less than computing the same, by what the store has seen of that."


def _step(name: str, before: int, after: int, how: str) -> tuple[str, str, str, str, str]:
    return name, size(after), size(before - after), ratio(before, after), how


def history(data: ReportData) -> str:
    """Samples of what was asked for."""
    if not data.history:
        return (
            "<p>The store has no history yet. Whoever has it open for writing notes about every minute, and at "
            "the end, what was asked for and how long it took.</p>"
        )
    rows = []
    for sample in reversed(data.history):
        get, put = sample.timings[Timing.GET], sample.timings[Timing.PUT]
        asked = sample.counts.get(Metric.GET_TOKENS, 0)
        rows.append(
            (
                when(sample.end),
                f"{sample.seconds:,.0f} s",
                get.total,
                share(sample.hit_tokens, asked),
                seconds(get.quantile(0.5)),
                seconds(get.quantile(0.99)),
                put.total,
                seconds(put.quantile(0.5)),
                sample.counts.get(Metric.DISK_EVICTED_RECORDS, 0),
            )
        )
    columns = ("until", "open", "gets", "hit rate", "get p50", "get p99", "puts", "put p50", "evicted")
    words = (
        "Each sample covers about a minute in which the store was used; old ones are joined. The hit rate is the share "
        "of the tokens asked for that the store had. Times are read off a histogram, so they are near and not exact; a "
        "put returns before it is on disk."
    )
    return (
        f"<p>{escape(words)}</p><div class='two'>"
        + _plot("plot-hits", "Hit rate over time by tier; the table has the sums", "Hit rate by tier, UTC")
        + _plot("plot-latency", "Latency of gets and puts over time; the table has the numbers", "Latency, UTC")
        + "</div>"
        + details("Table of samples", table("Samples", columns, rows, "the newest first"))
    )


def tree(data: ReportData, label: Callable[[Node], str]) -> str:
    """The prefix tree, as few nodes."""
    largest = sorted((node for node in data.nodes if node.kind == "run"), key=lambda node: -node.bytes)[:_MOST_ROWS]
    rows = [
        (
            _plain(label(node)),
            node.start,
            node.tokens,
            node.sequences,
            size(node.bytes),
            node.uses,
            "–" if node.probability is None else share(node.probability, 1),
        )
        for node in largest
    ]
    columns = ("begins", "at token", "tokens", "sequences behind", "bytes", "uses", "probability")
    folded = sum(node.folded for node in data.nodes)
    words = (
        "The width is what a prefix and everything behind it takes on disk. Click one to zoom in. Uses are puts and "
        "gets; they are noted when the writer closes the store. Probability is the chance that a sequence which came "
        "so far goes on here: what was seen, mixed with what the model gave the tokens."
    )
    controls = (
        '<div class="controls js"><label for="shade">Colour</label><select id="shade"><option>uses</option>'
        '<option>probability</option></select><button type="button" id="whole">Whole tree</button></div>'
    )
    more = f" {folded:,} smaller branches are folded." if folded else ""
    return (
        f"<p>{escape(words + more)}</p>{controls if data.records else ''}"
        + _plot("plot-tree", "Prefix tree by bytes; the table has its largest nodes")
        + details(
            f"Table of the {len(rows):,} largest nodes",
            table("Prefixes", columns, rows, "with all that is behind them"),
        )
    )


def families(data: ReportData) -> str:
    """Donors and what is coded against them."""
    if not data.members:
        return "<p>No block is coded against another one.</p>"
    rows = [
        (f"block {f.donor}", f.start, f.members, size(f.raw_bytes), size(f.bytes), ratio(f.raw_bytes, f.bytes))
        for f in data.families
    ]
    columns = ("donor", "at token", "members", "raw", "on disk", "ratio")
    words = (
        f"{data.members:,} blocks are coded as their difference from {data.donors:,} others. A member may need several "
        "donors and stands with each of them here."
    )
    note = f"the {MOST_FAMILIES} with the most members" if data.donors > MOST_FAMILIES else ""
    return (
        f"<p>{escape(words)}</p>"
        + _plot("plot-families", "Members of each donor, raw and as stored; the table has the same numbers")
        + details("Table of donors", table("Donors", columns, rows, note))
    )


def sessions(data: ReportData) -> str:
    """Sequences with a name."""
    if not data.session_count:
        return "<p>No session is saved.</p>"
    rows = [
        (_short(each.id), each.tokens, size(each.bytes), when(each.last_use), _short(namespace_name(each.namespace)))
        for each in data.sessions
    ]
    columns = ("session", "tokens", "raw cache", "last use", "namespace")
    note = f"the last {MOST_SESSIONS} used" if data.session_count > MOST_SESSIONS else ""
    words = f"{data.session_count:,} sessions, which take {size(data.session_bytes)} in the catalog."
    made = table("Saved sessions", columns, rows, note)
    return f"<p>{escape(words)}</p>" + (made if len(rows) <= 12 else details(f"Table of {len(rows):,} sessions", made))


def integrity(data: ReportData) -> str:
    """What `check` found, and what opening left out."""
    found = [*data.check.problems, *(f"{each}, found by opening" for each in data.lost)]
    verified = data.check.verified_records
    how = (
        f"Every record was read: {verified:,} of {data.check.disk_records:,} are whole."
        if data.deep
        else "Index, catalog, segments and sessions were compared; no record was read (--deep does that)."
    )
    listed = "".join(f"<li>{escape(each)}</li>" for each in found[:_MOST_ROWS])
    more = (
        f"<p>{len(found) - _MOST_ROWS:,} more: see <code>kvstore verify</code>.</p>" if len(found) > _MOST_ROWS else ""
    )
    verdict = '<p class="good">No problems.</p>' if not found else f'<ul class="bad">{listed}</ul>{more}'
    return f"<p>{escape(how)}</p>{verdict}" + details(
        "Identity and layout", table("Store", ("what", "value"), data.facts)
    )


def _plot(name: str, alternative: str, title: str = "") -> str:
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div>{head}<div class="plot" id="{name}" role="img" aria-label="{escape(alternative)}"></div></div>'


def _short(text: str) -> str:
    return text if len(text) <= 48 else text[:47] + "…"


def _plain(label: str) -> str:
    return label.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
