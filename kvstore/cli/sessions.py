"""`sessions ls`, `show`, `fork` and `rm`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvstore.cli import stores
from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, line, print_json, size, table
from kvstore.core.keys import namespace_digest
from kvstore.core.results import SessionInfo

app = typer.Typer(no_args_is_help=True, help="Sequences with a name: list, show, fork and forget them.")
Name = Annotated[str, typer.Argument(help="Name of the session.", show_default=False)]


@app.command("ls")
def list_sessions(store: stores.Store, as_json: AsJson = False) -> None:
    """List all sessions, the last used first."""
    with told(as_json), stores.reading(store) as opened:
        found = opened.sessions(stored=True)
    rows = [_row(each) for each in found]
    if as_json:
        print_json({"sessions": rows})
        return
    if found:
        columns = ("session", "tokens", "stored", "bytes", "created", "last use", "resumes", "expires", "namespace")
        shown = [
            (s.id, s.tokens, s.stored_tokens, size(s.stored_bytes or 0), _when(s.created), _when(s.last_use), s.hits)
            for s in found
        ]
        ends = [(_when(s.expires), stores.namespace_label(s.namespace)) for s in found]
        table(columns, [(*row, *end) for row, end in zip(shown, ends, strict=True)])
    line(f"{len(rows)} sessions")


@app.command()
def show(
    store: stores.Store,
    name: Name,
    namespace: stores.Namespace = None,
    tokenizer: stores.TokenizerFolder = None,
    as_json: AsJson = False,
) -> None:
    """Say how much of a session's cache is stored; with --tokenizer also its text."""
    with told(as_json), stores.reading(store) as opened:
        space = stores.namespace_of(namespace) or b""
        tokens = opened.session(name, namespace=space).tokens
        if not len(tokens):
            raise stores.no_session(name)
        found = opened.explain(tokens, namespace=space)
        info = next(
            each
            for each in opened.sessions(stored=True)
            if (each.id, each.namespace) == (name, namespace_digest(space))
        )
        text = stores.load_tokenizer(tokenizer).decode(tokens.tolist()) if tokenizer else None
    document: dict[str, Any] = {
        **_row(info),
        "tokens": len(tokens),
        "stored_tokens": found.tokens,
        "why": found.why,
        "ids": tokens.tolist(),
    }
    if text is not None:
        document["text"] = text
    if as_json:
        print_json(document)
        return
    line(f"{name}: {len(tokens)} tokens. {found.why}")
    facts = {
        "created": _when(info.created),
        "last use": _when(info.last_use),
        "resumes": info.hits,
        "expires": _when(info.expires),
        "pinned": info.pinned,
        "bytes stored": size(info.stored_bytes or 0),
        "metadata": json.dumps(info.metadata, default=str) if info.metadata else "",
    }
    table(("", ""), [(fact, value) for fact, value in facts.items() if value != ""])
    line(text if text is not None else " ".join(map(str, tokens[:64].tolist())) + (" ..." if len(tokens) > 64 else ""))


@app.command()
def fork(
    store: stores.Store,
    name: Name,
    new: Annotated[str, typer.Argument(help="Name of the new session; one with that name is replaced.")],
    namespace: stores.Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Make another session that starts from the same tokens."""
    with told(as_json), stores.writing(store) as opened:
        session = opened.session(name, namespace=stores.namespace_of(namespace) or b"")
        if not session.exists:
            raise stores.no_session(name)
        tokens = len(session.fork(new).tokens)
    if as_json:
        print_json({"id": new, "tokens": tokens})
    else:
        line(f"{new}: {tokens} tokens, as {name}")


@app.command()
def rm(
    store: stores.Store,
    name: Name,
    namespace: stores.Namespace = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Also remove its cache, as far as nobody shares it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forget a session. `kvstore erase --session` also overwrites it."""
    with told(as_json), stores.writing(store) as opened:
        if not opened.session(name, namespace=stores.namespace_of(namespace) or b"").delete(blocks=blocks):
            raise stores.no_session(name)
    if as_json:
        print_json({"id": name, "removed": True})
    else:
        line(f"{name}: forgotten")


def _row(found: SessionInfo) -> dict[str, Any]:
    return {**asdict(found), "namespace": stores.namespace_label(found.namespace)}


def _when(seconds: float) -> str:
    return "" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
