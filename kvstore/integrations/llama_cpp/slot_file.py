"""Files of sequences, as llama.cpp writes them: magic, version, count of tokens, tokens, state.

Servers pack their tokens since version 4: -1, 1, their count, the tokens, and how many images there are.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.layout import KVLayers, KVLayout
from kvstore.core.tokens import Tokens
from kvstore.errors import IdentityMismatch, MalformedState, UnsupportedCache
from kvstore.integrations.llama_cpp.fields import Fields
from kvstore.integrations.llama_cpp.form import VERSIONS, StateForm
from kvstore.integrations.llama_cpp.state import Bytes, build_state

MAGIC = 0x67677371
_PACKED = (-1, 1)


class SlotFile(NamedTuple):
    """A file of a sequence.

    Attributes:
        tokens: uint32 `[n]`.
        packed: whether a server packed them.
        streams: how many streams the context has.
        state: what `parse_state` reads; not looked at.
    """

    tokens: Tokens
    packed: bool
    streams: int
    state: memoryview


def read_slot_file(data: Any, version: int) -> SlotFile:
    """Read the head of a file.

    Args:
        data: bytes-like; referenced by the result.
        version: that the file must have.

    Raises:
        MalformedState: it is no such file.
        IdentityMismatch: it has another version.
        UnsupportedCache: the sequence has images or sound.
    """
    fields = Fields(data, "slot file")
    magic, found, count = (fields.number("I") for _ in range(3))
    if magic != MAGIC:
        raise MalformedState(f"slot file: expected the magic {MAGIC:#x}, found {magic:#x}")
    if found != version:
        raise IdentityMismatch(wrong_version(found, version))
    tokens = np.frombuffer(fields.take(4 * count), "<i4")
    packed = tokens[:1] == _PACKED[0]
    if packed.any():
        tokens = _unpacked(tokens)
    if (tokens < 0).any():
        raise UnsupportedCache("slot file: negative token ids stand for images or sound, and cannot be stored")
    state = fields.take(fields.left)
    return SlotFile(tokens.astype(np.uint32), bool(packed.any()), Fields(state, "state").number("I"), state)


def _unpacked(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    if len(tokens) < 4 or tokens[1] != _PACKED[1]:
        raise MalformedState("slot file: the server packed its tokens in a way that is not known")
    count = int(tokens[2])
    if not 0 <= count <= len(tokens) - 4:
        raise MalformedState(f"slot file: {count} tokens are named, {len(tokens) - 4} are there")
    if count != len(tokens) - 4 or tokens[-1]:
        raise UnsupportedCache("slot file: the sequence has images or sound, and cannot be stored")
    return tokens[3:-1]


def wrong_version(found: int, wanted: int) -> str:
    """Return what to say of a library whose states have another version than the identity of the store."""
    if found in VERSIONS:
        what = f"make the identity with state_version={found}, for another store"
    else:
        what = "this version of kvstore does not know them"
    return f"llama.cpp writes states of version {found}, the identity of the store says {wanted}; {what}"


def build_slot_file(
    tokens: Tokens, layers: KVLayers, form: StateForm, layout: KVLayout, *, streams: int = 1, packed: bool = False
) -> Bytes:
    """Make a file of a sequence of at least one token. The arguments are those of `build_state`, `SlotFile`."""
    plain = np.asarray(tokens, np.uint32).view(np.int32)
    written = np.concatenate([[*_PACKED, len(plain)], plain, [0]]).astype("<i4") if packed else plain
    head = struct.pack("<3I", MAGIC, form.version, len(written)) + written.tobytes()
    return build_state(layers, len(plain), form, layout, streams=streams, head=head)
