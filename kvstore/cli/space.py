"""`gc`, `compact`, `evict` and `erase`: giving space back. They open the store for writing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli import stores
from kvstore.cli.errors import FAILED, OK, leave, told
from kvstore.cli.output import AsJson, line, print_json, size
from kvstore.core.results import EraseResult
from kvstore.core.tokens import Tokens
from kvstore.errors import ConfigError
from kvstore.remote_config import RemoteConfig
from kvstore.setting_checks import parse_size
from kvstore.stored import stored_bytes

if TYPE_CHECKING:
    from kvstore.store import KVStore

Really = Annotated[bool, typer.Option("--yes", help="Do it; without this it is only said what would be done.")]


def gc(store: stores.Store, as_json: AsJson = False) -> None:
    """Remove what has expired or cannot be reached, and the files of empty segments. Evicts nothing."""
    _compact(store, False, as_json)


def compact(store: stores.Store, as_json: AsJson = False) -> None:
    """Do what gc does, and also move records of half empty segments together. Evicts nothing."""
    _compact(store, True, as_json)


def _compact(store: stores.Store, move: bool, as_json: bool) -> None:
    with told(as_json):
        with stores.writing(store) as opened:
            done = opened.compact(move=move)
            found = {k: int(v) for k, v in opened.stats()["counters"].items() if k in _FOUND}
        document = {**asdict(done), **found, "used_bytes": stored_bytes(store)}
    if as_json:
        print_json(document)
        return
    more = "".join(f", {count} {name.replace('_', ' ')}" for name, count in found.items())
    line(
        f"{size(done.freed_bytes)} given back; {done.expired_records} records expired, "
        f"{done.moved_records} moved{more}; the store takes {size(document['used_bytes'])}"
    )


_FOUND = ("unreachable_records", "lost_entries", "damaged_entries", "stale_readers", "catalog_compacted")


def evict(
    store: stores.Store,
    to: Annotated[str, typer.Option(help="What the folder may take, such as 4GiB.")],
    as_json: AsJson = False,
) -> None:
    """Evict the least recently used sequences until the store takes no more than a size; pins stay."""
    with told(as_json):
        budget, before = parse_size(to), stored_bytes(store)
        try:
            with stores.writing(store, budget) as opened:
                evicted = int(opened.stats()["counters"].get("disk_evicted_records", 0))
                records = len(opened)
        except ConfigError as error:  # of a setting that nobody gave here
            raise ConfigError(str(error).replace("disk.bytes: ", "--to: ")) from error
        document = {"before": before, "after": stored_bytes(store), "evicted_records": evicted, "records": records}
    if as_json:
        print_json(document)
        return
    line(f"{evicted} records evicted, {records} left; {size(before)} before, {size(document['after'])} now")


def erase(
    store: stores.Store,
    tokens: stores.TokenList = None,
    tokens_file: stores.TokenFile = None,
    text: stores.PlainText = None,
    tokenizer: stores.TokenizerFolder = None,
    session: Annotated[str | None, typer.Option(help="A session, with its cache.")] = None,
    whole_namespace: Annotated[bool, typer.Option("--whole-namespace", help="All of --namespace.")] = False,
    namespace: stores.Namespace = None,
    remote: Annotated[str | None, typer.Option(help="Also there: a remote tier's URL, as of RemoteConfig.")] = None,
    key: Annotated[Path | None, typer.Option(help="The file of the fleet key, if its values are sealed.")] = None,
    yes: Really = False,
    as_json: AsJson = False,
) -> None:
    """Remove a sequence, a session or a namespace, and overwrite it in every file of the store.

    With --remote also from the remote tier; without, what was written there stays until its time is over.
    """
    with told(as_json):
        if key is not None and remote is None:
            raise ValueError("--key: is of a remote tier; name that with --remote")
        shared = None if remote is None else _shared(remote, key)
        named = tokens is not None or tokens_file is not None or text is not None
        if sum((named, session is not None, whole_namespace)) != 1:
            raise ValueError("name one of a sequence (--tokens, --tokens-file, --text), --session, --whole-namespace")
        if whole_namespace and namespace is None:
            raise ValueError("--whole-namespace: name it with --namespace; an empty text is the one without a name")
        ids = stores.given_tokens(tokens, tokens_file, text, tokenizer) if named else None
        space = stores.namespace_of(namespace) or b""
        if yes:
            with stores.writing(store, remote=shared) as opened:
                nothing = whole_namespace and not _there(opened, ids, session, space)
                done = _erase(opened, ids, session, space)
        else:
            with stores.reading(store) as opened:
                there = _there(opened, ids, session, space)
                nothing = whole_namespace and not there
    if not yes:
        if as_json:
            print_json({"erased": False, "blocks": there, "hint": "repeat with --yes to erase"})
        else:
            text = f"{there} blocks and what continues them would be erased; repeat with --yes"
            line(stores.nothing_in(namespace or "") if nothing else text)
        return
    code = FAILED if done.remote_left else OK
    if as_json:
        print_json({"erased": True, **asdict(done), "exit_code": code})
    else:
        text = f"{done.removed_blocks} blocks erased; {done.kept_blocks} stay, for others share or pin them"
        line(stores.nothing_in(namespace or "") if nothing else text)
        if remote is not None:
            line(f"{done.remote_blocks} values removed from the remote tier")
        if done.remote_left:
            line(f"{done.remote_left} values may still be there, for it did not answer; erase again")
    leave(code)


def _shared(url: str, key: Path | None) -> RemoteConfig:
    return RemoteConfig(url, upload="eviction", promote="second", key=key, settings={"make": False})


def _erase(opened: KVStore, ids: Tokens | None, session: str | None, space: bytes) -> EraseResult:
    if session is not None:
        return opened.session(session, namespace=space).delete(blocks=True, erase=True)
    if ids is None:
        return opened.delete_namespace(space, erase=True)
    return opened.delete(ids, namespace=space, erase=True)


def _there(opened: KVStore, ids: Tokens | None, session: str | None, space: bytes) -> int:
    if session is not None:
        ids = opened.session(session, namespace=space).tokens
    if ids is not None:
        return -(-opened.contains(ids, namespace=space) // opened.config.block_tokens) if len(ids) else 0
    digest = space or stores.namespace_of("")
    blocks = sum(each.blocks for each in opened.inventory().sequences if each.namespace == digest)
    return blocks or sum(each.namespace == digest for each in opened.sessions())
