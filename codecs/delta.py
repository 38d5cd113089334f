"""What a codec is that codes blocks against others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.view import KVView


@dataclass(frozen=True)
class DonorRows:
    """Where rows of a block find their tokens, and the `span.count` rows there (`view`, on the CPU, any strides)."""

    span: Span
    view: KVView

    @classmethod
    def of(cls, span: Span, donor: KVView) -> DonorRows:
        """donor: the whole decoded donor block. Raises `ValueError` where it has no such rows."""
        return cls(span, donor.narrow(span.donor_start, span.count))


class DeltaCodec(Protocol):
    """Codes a block against rows of other blocks, its donors, which must be there, decoded, to decode it again.

    Numbers, names, `exact`, `profile`, `bound` and `usual` are as of `Codec`, with which it shares one list of numbers
    (registry.py); it is none itself, for nobody can decode without donors. Stateless and thread-safe.
    """

    id: int
    name: str
    exact: bool
    profile: bytes

    def bound(self, info: BlockInfo) -> int:
        """The most payload bytes that `encode` may write for such a block, with any spans."""

    def usual(self, info: BlockInfo) -> int:
        """What `encode` should take less than, or the donors are not worth reading; at most `bound`."""

    def encode(
        self, info: BlockInfo, block: KVView, donors: Sequence[DonorRows], out: memoryview
    ) -> tuple[int, ...] | None:
        """As `Codec.encode`. donors: spans that rise and are disjoint, at least one.

        Returns None if `out` is too small. Raises `ValueError` for a block or donors that cannot be coded so.
        """

    def decode(
        self,
        info: BlockInfo,
        payload: memoryview,
        layer_sizes: Sequence[int],
        donors: Sequence[KVView],
        out: KVView,
    ) -> None:
        """As `Codec.decode`. donors: the decoded blocks, whole and on the CPU, that the spans number.

        Raises `CodecError` also where a donor is not the one that was coded with.
        """

    def largest_error(self, info: BlockInfo, payload: memoryview) -> float:
        """What no value's error exceeds in what `encode` wrote; infinity where that is not known."""
