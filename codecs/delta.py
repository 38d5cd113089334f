"""What a delta codec is: one that codes blocks against other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.codecs.base import BlockInfo, CodedBlock
from kvstore.codecs.donor.spans import Span
from kvstore.codecs.in_order import InOrder
from kvstore.codecs.view import KVView

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DonorRows:
    """The rows of a donor that a span of a block is coded against. Immutable.

    Attributes:
        span: which rows of the block, and where the donor has the same tokens.
        view: these `span.count` rows of the donor, on the CPU, any strides.

    Example:
        >>> import torch
        >>> from kvstore import KVLayout
        >>> k = v = torch.zeros(2, 64, 16).bfloat16()
        >>> donor = KVView.of_layers(KVLayout.uniform(num_layers=1, heads=2, head_dim=16), [(k, v)])
        >>> DonorRows.of(Span(start=0, count=40, donor=0, donor_start=24, shift=128), donor).view.tokens
        40
    """

    span: Span
    view: KVView

    @classmethod
    def of(cls, span: Span, donor: KVView) -> DonorRows:
        """Take the rows of `span` out of `donor`, the whole decoded block.

        Raises:
            ValueError: the donor has no such rows.
        """
        return cls(span, donor.narrow(span.donor_start, span.count))


class DeltaCodec(Protocol):
    """Codes a block against rows of other blocks, its donors. To decode it, the decoded donors must be at hand.

    This is not a `Codec`, because a `Codec` decodes without donors. Both share one list of numbers (registry.py).
    Stateless and thread-safe.

    Attributes:
        id, name, exact, profile, has_kernels: as in `Codec`.

    Example:
        >>> from kvstore.codecs.registry import delta_by_id, is_delta
        >>> is_delta(3), delta_by_id(3).name
        (True, 'donor')
    """

    id: int
    name: str
    exact: bool
    profile: bytes
    has_kernels: bool = False

    def bound(self, info: BlockInfo) -> int:
        """Return the most payload bytes that `encode` can write for such a block, with any spans."""

    def usual(self, info: BlockInfo) -> int:
        """Return the payload bytes below which coding against donors pays; at most `bound`."""

    def encode(
        self, info: BlockInfo, block: KVView, donors: Sequence[DonorRows], out: memoryview
    ) -> tuple[int, ...] | None:
        """Write the layers of a block into `out`, as `Codec.encode` does.

        Args:
            info, block, out: as for `Codec.encode`.
            donors: at least one; their spans must be disjoint and in rising order.

        Returns:
            The coded bytes of each layer. None if `out` is too small.

        Raises:
            ValueError: the block or the donors cannot be coded.
        """

    def decode(
        self, info: BlockInfo, payload: memoryview, layer_sizes: Sequence[int], donors: Sequence[KVView], out: KVView
    ) -> None:
        """Decode the first `out.tokens` tokens of the block into `out`, as `Codec.decode` does.

        Args:
            info, payload, layer_sizes, out: as for `Codec.decode`.
            donors: the blocks that the spans number, decoded, whole, on the CPU.

        Raises:
            CodecError: the payload is damaged, or a donor is not the one that the block was coded against.
            ValueError: the last dimension of a tensor of `out` is not contiguous.
        """

    def in_order(self, block: CodedBlock, donors: Sequence[KVView], out: KVView) -> InOrder | None:
        """As `Codec.in_order`, with donors as for `decode`."""
        return None

    def codes_on(self, device: torch.device, dtype: str) -> bool:
        """As `Codec.codes_on`. Donors are on the CPU all the same."""
        return False

    @property
    def reads_by_kernels(self) -> bool:
        """As `Codec.reads_by_kernels`."""
        return self.has_kernels

    def reads_on(self, device: torch.device, dtype: str) -> bool:
        """As `Codec.reads_on`."""
        return self.codes_on(device, dtype)

    def kernels_decode(self, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        """As `Codec.kernels_decode`."""
        return False

    def decodes_on(self, device: torch.device, dtype: str, payload: memoryview, layer_sizes: Sequence[int]) -> bool:
        """As `Codec.decodes_on`."""
        return False

    def largest_error(self, info: BlockInfo, payload: memoryview) -> float:
        """Return the largest error of a value in what `encode` wrote; infinity if that is not known."""
