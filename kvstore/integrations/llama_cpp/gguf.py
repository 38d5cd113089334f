"""Reads the head of a GGUF file: metadata and tensors. The `gguf` package takes seconds for a vocabulary.

Little-endian files of versions 2 and 3. Bytes are not trusted.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvstore.errors import ConfigError, MalformedState
from kvstore.integrations.llama_cpp.fields import Fields

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_PIECE, _PIECES = 64, 16
_LABELS = ("general.", "split.", "tokenizer.")  # say nothing of what the model computes, but "general.architecture"
_WORDS = "tokenizer."
_NOT_WORDS = "tokenizer.chat_template"


@dataclass
class GGUFHead:
    """What the head of a file says.

    Attributes:
        metadata: by key; of an array its items if they are numbers, "" in place of texts.
        tensors: number of dimensions by name.
        computes: SHA-256 over what the model computes with: metadata, names, shapes and types of the tensors, and 16
            pieces of 64 bytes of each, the first and the last included.
        words: SHA-256 over what maps text to tokens.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)
    computes: Any = field(default_factory=hashlib.sha256)
    words: Any = field(default_factory=hashlib.sha256)


def read_head(path: str | os.PathLike[str], into: GGUFHead | None = None) -> GGUFHead:
    """Read the head of a file, and pieces of its tensors.

    Args:
        path: of a GGUF file.
        into: the head of the files before, of a model that is split.

    Raises:
        ConfigError: the file cannot be read, or it is not a GGUF file.
    """
    head = GGUFHead() if into is None else into
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            fields = Fields(data, "file")
            try:
                _read(fields, data, head)
            finally:
                fields.release()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read as a GGUF file: {error}") from error
    return head


def _read(fields: Fields, data: Any, head: GGUFHead) -> None:
    if bytes(fields.take(4)) != b"GGUF":
        raise MalformedState("it does not begin with GGUF")
    version = fields.number("I")
    if version not in (2, 3):
        raise MalformedState(f"version {version} is not known")
    tensors, keys = fields.number("Q"), fields.number("Q")
    for _ in range(keys):
        start = fields.place
        key = _text(fields)
        head.metadata[key] = _value(fields, fields.number("I"))
        if key == "general.architecture" or not key.startswith(_LABELS):
            head.computes.update(data[start : fields.place])
        if key.startswith(_WORDS) and key != _NOT_WORDS:
            head.words.update(data[start : fields.place])
    starts = []
    for _ in range(tensors):
        start = fields.place
        name = _text(fields)
        head.tensors[name] = dimensions = fields.number("I")
        fields.take(8 * dimensions + 4)
        head.computes.update(data[start : fields.place])
        starts.append(fields.number("Q"))
    _sample(data, fields.place, starts, head)


def _sample(data: Any, place: int, starts: list[int], head: GGUFHead) -> None:
    alignment = head.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise MalformedState(f"general.alignment is {alignment!r}")
    begin = -(-place // alignment) * alignment
    ends = [begin + start for start in sorted(starts)] + [len(data)]
    for start, end in pairwise(ends):
        if end < start or end > len(data):
            raise MalformedState(f"a tensor begins at byte {start}, the file has {len(data)}")
        last = max(0, end - start - _PIECE)
        for piece in range(_PIECES):
            at = start + last * piece // (_PIECES - 1)
            head.computes.update(data[at : min(at + _PIECE, end)])


def _text(fields: Fields) -> str:
    return bytes(fields.take(fields.number("Q"))).decode("utf-8", "replace")


def _value(fields: Fields, kind: int) -> Any:
    if kind in _NUMBERS:
        return fields.number(_NUMBERS[kind])
    if kind == _TEXT:
        return _text(fields)
    if kind != _ARRAY:
        raise MalformedState(f"a value of type {kind} is not known")
    of, count = fields.number("I"), fields.number("Q")
    if of in _NUMBERS:
        kind_of = np.dtype(_NUMBERS[of]).newbyteorder("<")
        return np.frombuffer(fields.take(count * kind_of.itemsize), kind_of).tolist()
    if of != _TEXT:
        raise MalformedState(f"an array of values of type {of} is not known")
    for _ in range(count):
        fields.take(fields.number("Q"))
    return ""
