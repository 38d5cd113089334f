"""`sessions ls`, `show`, `fork` and `rm`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvstore.cli import stores
from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, line, print_json, size, table

app = typer.Typer(no_args_is_help=True, help="Sequences with a name: list, show, fork and forget them.")
Name = Annotated[str, typer.Argument(help="Name of the session.", show_default=False)]


@app.command("ls")
def list_sessions(store: stores.Store, as_json: AsJson = False) -> None:
    """List all sessions, the last used first."""
    with told(as_json), stores.reading(store) as opened:
        rows = [{**asdict(each), "namespace": stores.namespace_label(each.namespace)} for each in opened.sessions()]
    if as_json:
        print_json({"sessions": rows})
        return
    if rows:
        shown = [(r["id"], r["tokens"], size(r["bytes"]), _when(r["last_use"]), r["namespace"]) for r in rows]
        table(("session", "tokens", "raw bytes", "last use", "namespace"), shown)
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
            raise ValueError(f"session {name!r} does not exist; `kvstore sessions ls` lists them")
        found = opened.explain(tokens, namespace=space)
        text = stores.load_tokenizer(tokenizer).decode(tokens.tolist()) if tokenizer else None
    document: dict[str, Any] = {
        "id": name,
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
            raise ValueError(f"session {name!r} does not exist; `kvstore sessions ls` lists them")
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
            raise ValueError(f"session {name!r} does not exist; `kvstore sessions ls` lists them")
    if as_json:
        print_json({"id": name, "removed": True})
    else:
        line(f"{name}: forgotten")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
