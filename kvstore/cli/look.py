"""`ls`, `inspect`, `explain` and `stats`: what is stored, and why a get returns what it returns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from kvstore.cli import stores
from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, line, print_json, size, table
from kvstore.core.tokens import Tokens
from kvstore.residency.inventory import SequenceInfo

if TYPE_CHECKING:
    from kvstore.store import KVStore

_FIRST = 8  # tokens of a sequence that are printed
_FIRST_TEXT = 64  # tokens whose text is
_BEFORE = 24  # characters of what parts sequences before they part from the one most like them
_SHORT = 8  # so many tokens that sequences share are printed with what follows


def ls(
    store: stores.Store,
    namespace: stores.Namespace = None,
    limit: Annotated[int, typer.Option(min=0, help="Most sequences to print; 0 for all.")] = 50,
    tokenizer: stores.TokenizerFolder = None,
    as_json: AsJson = False,
) -> None:
    """List stored sequences, the longest first; with --tokenizer the text of each, from where it parts from the one
    most like it in the list, and before that what stands where not all of them are alike any more."""
    with told(as_json), _words(tokenizer) as text_of, stores.reading(store) as opened:
        wanted = stores.namespace_of(namespace)
        found = [s for s in opened.inventory().sequences if wanted is None or s.namespace == wanted]
        listed = found[: limit or None]
        rows = [{**_sequence(each), **text_of(each.tokens)} for each in listed]
        if tokenizer is not None:
            partings, first = _partings([each.tokens for each in listed])
            for row, each, start in zip(rows, listed, partings, strict=True):
                row |= {"parts_at": start, "parts": text_of(each.tokens[start:])["text"]}
                row |= {"differs_at": first, "differs": text_of(each.tokens[first:start])["text"]}
    document = {"store": str(store), "sequences": rows, "count": len(found)}
    if as_json:
        print_json(document)
        return
    columns = ("tokens", "blocks", "bytes", "expires", "pinned", "namespace")
    if rows:
        shown = [[row[name] if name != "bytes" else size(row[name]) for name in columns] for row in rows]
        table(
            (*columns, "begins" if tokenizer is None else "text"),
            [(*cells, _shown_text(row)) for cells, row in zip(shown, rows, strict=True)],
            cut=tokenizer is not None,
        )
    if namespace is not None and not found:
        line(stores.nothing_in(namespace))
    line(f"{len(found)} sequences" + (f", {len(rows)} shown" if len(rows) < len(found) else ""))


@contextmanager
def _words(tokenizer: Path | None) -> Iterator[Callable[[Tokens], dict[str, str]]]:
    """What makes {"text": ...} of the tokens that a sequence begins with; of none, nothing."""
    words = stores.load_tokenizer(tokenizer) if tokenizer is not None else None
    yield lambda tokens: {} if words is None else {"text": str(words.decode(tokens[:_FIRST_TEXT].tolist()))}


def _partings(listed: Sequence[Tokens]) -> tuple[list[int], int]:
    """Where each sequence parts from all others of a list: how many tokens it shares with the one most like it, and of
    what another one continues the last token; and how many tokens all of them share."""
    order = sorted(range(len(listed)), key=lambda i: listed[i].astype(">u4").tobytes())
    found, common = [0] * len(listed), min(map(len, listed), default=0)
    for one, other in itertools.pairwise(order):  # in this order the one most like it is beside it
        a, b = listed[one], listed[other]
        count = min(len(a), len(b))
        differs = np.flatnonzero(a[:count] != b[:count])
        shared = int(differs[0]) if len(differs) else count
        common = min(common, shared)
        for i in (one, other):
            found[i] = max(found[i], min(shared, len(listed[i]) - 1))
    return found, common


def _shown_text(row: dict[str, Any]) -> Any:
    """What the table says of the tokens: text where there is a tokenizer."""
    if "text" not in row:
        return row["begins"]
    if row["parts_at"] <= _SHORT:
        return row["text"]
    begin = "… " if row["differs_at"] else ""
    before = f"{begin}{row['differs'][:_BEFORE]} " if row["differs"].strip() else ""
    return f"{before}… {row['parts']}"


def _sequence(found: SequenceInfo) -> dict[str, Any]:
    expires = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.expires)) if found.expires else None
    return {
        "tokens": len(found.tokens),
        "blocks": found.blocks,
        "bytes": found.bytes,
        "expires": expires,
        "pinned": found.pinned,
        "namespace": stores.namespace_label(found.namespace),
        "begins": found.tokens[:_FIRST].tolist(),
    }


def inspect(
    store: stores.Store,
    top: Annotated[int, typer.Option(min=0, help="How many shared beginnings to print.")] = 5,
    tokenizer: stores.TokenizerFolder = None,
    as_json: AsJson = False,
) -> None:
    """Say whose store it is, its layout, tiers, codecs and sizes, and what its sequences have in common."""
    with told(as_json), _words(tokenizer) as text_of, stores.reading(store) as opened:
        document = _facts(opened, top, text_of)
    if as_json:
        print_json(document)
        return
    identity, disk = document["identity"], document["disk"]
    line(f"{store}: {identity['model'] or 'a model without a name'} {identity['revision']}".rstrip())
    table(("", ""), [(name, identity[name]) for name in ("weights", "tokenizer", "codec_family", "shard")])
    table(("", ""), [(name, document["layout"][name]) for name in document["layout"]], title="layout")
    kept = ("records", "tokens", "bytes", "raw_bytes", "file_bytes", "used_bytes", "catalog_bytes", "segments", "holes")
    table(("", ""), [(k, size(disk[k]) if k.endswith("bytes") else int(disk[k])) for k in kept], title="disk")
    rows = [(name, use["records"], use["tokens"], size(use["bytes"])) for name, use in document["codecs"].items()]
    table(("codec", "records", "tokens", "bytes"), rows, title="codecs")
    spaces = [
        (name, *(size(n) if f == "bytes" else n for f, n in use.items()))
        for name, use in document["namespaces"].items()
    ]
    table(("namespace", "records", "tokens", "bytes", "sessions"), spaces, title="namespaces")
    if document["prefixes"]:
        columns = ("tokens", "sequences", "saved_tokens")
        rows = [(*(p[name] for name in columns), p.get("text", p["begins"])) for p in document["prefixes"]]
        heads = ("shared tokens", "sequences", "saved tokens", "begins")
        table(heads, rows, title="shared beginnings", cut=tokenizer is not None)
    gate = document["gate"]
    if len(gate) > 1:
        table(("", ""), [(name, f"{value:.3g}") for name, value in gate.items()], title="load or recompute")
    line(f"\n{document['sequences']} sequences, {document['sessions']} sessions")


def _facts(store: KVStore, top: int, text_of: Callable[[Tokens], dict[str, str]]) -> dict[str, Any]:
    found, stats, layout = store.inventory(), store.stats(), store.identity.layout
    fields = store.identity.fields()
    del fields["layout"]
    return {
        "store": store.path,
        "identity": fields,
        "layout": {
            "layers": len(layout.layers),
            "dtype": layout.dtype,
            "bytes_per_token": layout.bytes_per_token,
            "kinds": ", ".join(
                sorted({layer.kind for layer in layout.layers} | ({"state"} if layout.states else set()))
            ),
            "block_tokens": store.config.block_tokens,
            "segment_bytes": store.config.segment_bytes,
            "rope": layout.rope,
        },
        "disk": stats["disk"],
        "tiers": {name: stats[name] for name in ("device", "host", "disk")},
        "codecs": {name: asdict(use) for name, use in found.codecs.items()},
        "namespaces": stats["namespaces"],
        "gate": stats["gate"],
        "sequences": len(found.sequences),
        "sessions": stats["sessions"]["sessions"],
        "prefixes": [
            {
                "tokens": len(prefix.tokens),
                "sequences": prefix.sequences,
                "saved_tokens": prefix.saved_tokens,
                "namespace": stores.namespace_label(prefix.namespace),
                "begins": prefix.tokens[:_FIRST].tolist(),
                **text_of(prefix.tokens),
            }
            for prefix in found.prefixes[:top]
        ],
    }


def explain(
    store: stores.Store,
    tokens: stores.TokenList = None,
    tokens_file: stores.TokenFile = None,
    text: stores.PlainText = None,
    tokenizer: stores.TokenizerFolder = None,
    namespace: stores.Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Say why a get of a sequence returns what it returns, block by block."""
    with told(as_json):
        ids = stores.given_tokens(tokens, tokens_file, text, tokenizer)
        with stores.reading(store) as opened:
            found = opened.explain(ids, namespace=stores.namespace_of(namespace) or b"")
    blocks = [{**asdict(block), "reason": block.reason.value} for block in found.blocks]
    if as_json:
        print_json({"asked": found.asked, "tokens": found.tokens, "reason": found.reason.value, "blocks": blocks})
    else:
        line(str(found))


def stats(
    store: stores.Store,
    watch: Annotated[
        float, typer.Option(min=0, max=1e6, help="Look again after so many seconds, until stopped; 0: look once.")
    ] = 0.0,
    count: Annotated[int, typer.Option(min=0, help="With --watch: stop after so many looks; 0: go on.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print sizes, and what opening found. A process's own counters are in its `store.stats()` and metrics."""
    with told(as_json), stores.reading(store) as opened:
        looks, before = 0, None
        while True:
            opened.contains([0])  # a reader takes in what the writer did
            found = opened.stats()
            disk = opened.inventory().codecs
            found["disk"] |= {
                "records": sum(use.records for use in disk.values()),
                "tokens": sum(use.tokens for use in disk.values()),
                "bytes": sum(use.bytes for use in disk.values()),
            }
            looks += 1
            _print_stats(found, before, as_json)
            before = found
            if not watch or looks == count:
                return
            time.sleep(watch)


def _print_stats(found: dict[str, Any], before: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    if before is not None:
        disk, old = found["disk"], before["disk"]
        line(
            f"{time.strftime('%H:%M:%S')}  {disk['records']:,} records ({disk['records'] - old['records']:+,}), "
            f"{disk['tokens']:,} tokens, {size(disk['bytes'])}, {found['sessions']['sessions']:,} sessions"
        )
        return
    rows = [
        (f"{part}.{name}", value)
        for part, values in found.items()
        for name, value in values.items()
        if not isinstance(value, dict)
    ]
    table(("", ""), rows)
