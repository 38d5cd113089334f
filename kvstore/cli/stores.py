"""How commands open a store: by its folder alone. What only looks opens it for reading, beside its writer.

Here and in the commands, what brings torch along is imported when a command runs: help and the completion of a shell
would wait two seconds for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.config import StoreConfig
from kvstore.core.keys import NamespaceDigest, namespace_digest
from kvstore.core.tokens import Tokens, as_tokens
from kvstore.remote_config import RemoteConfig
from kvstore.stored import stored_identity
from kvstore.transfer.settings import READING, writing_config

if TYPE_CHECKING:
    from kvstore.store import KVStore

Store = Annotated[Path, typer.Argument(help="Folder of the store.", metavar="STORE", show_default=False)]
Namespace = Annotated[
    str | None, typer.Option(help="Name of the namespace, or digest:HEX as `inspect` prints it.", show_default=False)
]
TokenList = Annotated[str | None, typer.Option("--tokens", help="Token ids, separated by commas.")]
TokenFile = Annotated[Path | None, typer.Option("--tokens-file", help="File of token ids, of commas or spaces.")]
PlainText = Annotated[str | None, typer.Option("--text", help="Text; needs --tokenizer.")]
TokenizerFolder = Annotated[Path | None, typer.Option("--tokenizer", help="Folder of the model's tokenizer.")]


@contextmanager
def reading(path: Path) -> Iterator[KVStore]:
    """An open store that is only read; its writer may go on."""
    from kvstore.store import KVStore

    with KVStore(path, stored_identity(path), READING, read_only=True) as store:
        yield store


@contextmanager
def writing(path: Path, disk_bytes: int | None = None, remote: RemoteConfig | None = None) -> Iterator[KVStore]:
    """An open store that may be changed.

    Args:
        path: of the store.
        disk_bytes: its budget; None for one that evicts nothing.
        remote: its remote tier, if the command is to change that, too.
    """
    from kvstore.store import KVStore

    identity = stored_identity(path)
    config = replace(writing_config(str(path)), remote=remote)
    if disk_bytes is not None:
        config = replace(config, disk=replace(config.disk, bytes=disk_bytes))
    with KVStore(path, identity, config) as store:
        yield store


def config_from(path: Path | None) -> StoreConfig:
    """Return the settings of a TOML file; the defaults if there is none. Raises `ConfigError`."""
    return StoreConfig() if path is None else StoreConfig.from_toml(path)


def namespace_of(text: str | None) -> bytes | None:
    """Return the namespace that an option names, None for none. Raises `ValueError`."""
    if text is None:
        return None
    if not text.startswith("digest:"):
        return NamespaceDigest(namespace_digest(text))
    digits = text.removeprefix("digest:")
    if not re.fullmatch("[0-9a-fA-F]{64}", digits):
        raise ValueError(f"namespace: a digest has 64 hexadecimal digits, found {digits!r}; `kvstore ls` prints it")
    return NamespaceDigest(bytes.fromhex(digits))


def namespace_label(digest: bytes) -> str:
    """Return what `--namespace` takes for a digest; "" for the namespace without a name."""
    return "" if digest == namespace_digest(b"") else f"digest:{digest.hex()}"


def nothing_in(namespace: str) -> str:
    """Say that a namespace holds nothing."""
    name = f"the namespace {namespace!r}" if namespace else "the namespace without a name"
    return f"the store has nothing in {name}; `kvstore inspect` lists the namespaces it has"


def given_tokens(tokens: str | None, file: Path | None, text: str | None, tokenizer: Path | None) -> Tokens:
    """Return the token ids that one of the options gives. Raises `ValueError`, `OSError`."""
    if sum(each is not None for each in (tokens, file, text)) != 1:
        raise ValueError("name the sequence with one of --tokens, --tokens-file or --text")
    if text is not None:
        if tokenizer is None:
            raise ValueError("--text: needs --tokenizer, the folder of the model's tokenizer")
        return as_tokens(load_tokenizer(tokenizer)(text).input_ids)
    return parse_tokens(tokens or "" if file is None else text_of(file))


def parse_tokens(text: str) -> Tokens:
    """Return the token ids in a text. Raises `ValueError`."""
    for word in (words := text.replace(",", " ").split()):
        if not re.fullmatch("[0-9]{1,10}", word):
            raise ValueError(f"tokens: expected numbers of 0 to 2^32 - 1 with commas or spaces, found {word[:40]!r}")
    return as_tokens([int(word) for word in words])


def text_of(path: Path) -> str:
    """Return what a text file holds. Raises `OSError`, `ValueError`."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from error


def load_tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    """Return the tokenizer in a folder. Raises `ValueError`."""
    try:
        from transformers import AutoTokenizer  # type: ignore[attr-defined]
    except ModuleNotFoundError:
        raise ValueError("a tokenizer needs transformers; pip install 'kvstore-lm[transformers]'") from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no tokenizer can be loaded ({str(error).splitlines()[0]})") from error


def no_session(name: str) -> ValueError:
    """Return the error for a session that is not there."""
    return ValueError(
        f"session {name!r} does not exist here; `kvstore sessions ls` lists all of them, and one of a namespace needs "
        "--namespace"
    )
