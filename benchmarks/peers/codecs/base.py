"""Other ways to make the same bytes smaller, behind one interface: lossless, one thread, each library's own defaults.

A peer codes one tensor a call, K or V of one layer of a window. What its library cannot write into given memory, it
returns in memory of its own.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class CodecPeer(Protocol):
    """values: bits of bfloat16, `[n]` uint8, contiguous, an even number of bytes."""

    mutates_input: bool
    """Whether `encode` destroys its argument: it then gets a copy, which is not timed."""

    def encode(self, values: Bytes) -> Any:
        """The coded tensor, as a buffer."""

    def decode(self, coded: Any, out: Bytes) -> Any:
        """The tensor, in `out` (of its size, mutated) or in a buffer of the library's own."""


# Name of the peer -> library; the peer is `make()` of codec_NAME.py.
LIBRARIES = {"zipnn": "zipnn", "pcodec": "pcodec", "blosc2-zstd": "blosc2", "zstandard": "zstandard", "lz4": "lz4"}


def codec_peer(name: str) -> CodecPeer | None:
    """The peer of this name, None where its library is not installed. Raises `KeyError` for an unknown name."""
    if find_spec(LIBRARIES[name]) is None:
        return None
    peer: CodecPeer = import_module(f"benchmarks.peers.codecs.{name.replace('-', '_')}").make()
    return peer
