"""What a tier is, and what it says of a block that it has. Readers ask these, never for a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from kvstore.codecs.view import KVView
from kvstore.core.record import RecordHeader
from kvstore.tiers.buffers import Buffer

if TYPE_CHECKING:
    import torch


class SealedSource(Protocol):
    """A whole record in memory."""

    @property
    def header(self) -> RecordHeader:
        """The checked header."""

    @property
    def payload(self) -> memoryview:
        """The coded layers; a view, not a copy."""


class Source(Protocol):
    """One block where one tier has it. Immutable, and good until it is released, even if the tier drops the block.

    A block comes from `tensors`, or from the record in `sealed`; if both are None, its tier reads the record first
    (`StorageTier.read`). A dataclass that inherits from this answers with properties: a field cannot replace one.
    """

    @property
    def tier(self) -> str:
        """Name of the tier; a block that waits to be written is in "queue"."""

    @property
    def nbytes(self) -> int:
        """Bytes that the block takes in its tier. For a block that must be read: the bytes to read."""

    @property
    def codec_id(self) -> int | None:
        """Number of the record's codec; None if it is not a record."""

    @property
    def donors(self) -> Sequence[int] | None:
        """Numbers of the records that it was coded against; None if the source does not know."""
        return None

    @property
    def has_layer_sums(self) -> bool:
        """Whether each layer of the record is known to have a checksum of its own."""
        return False

    @property
    def tensors(self) -> TensorSource | None:
        """The source itself if it has tensors; None if it has not."""
        return None

    @property
    def sealed(self) -> SealedSource | None:
        """The whole record if it is in memory; None if it is not."""
        return None


class TensorSource(Source, ABC):
    """Base of the sources that have tensors, as they are or coded in a way of their own."""

    @property
    def codec_id(self) -> int | None:
        return None

    @property
    def tensors(self) -> TensorSource | None:
        return self

    @abstractmethod
    def copy_to(self, target: KVView) -> None:
        """Write the first `target.tokens` tokens to `target`, on any device. Done on return.

        Raises:
            CodecError: the memory is damaged.
            torch.OutOfMemoryError: a device has too little memory to decode in.
        """

    @abstractmethod
    def reaches(self, device: torch.device) -> bool:
        """Return whether `copy_to` brings tensors to `device` (a GPU with its index) without the CPU."""

    @abstractmethod
    def fetched(self) -> TensorSource:
        """Return the same block in host memory."""


S = TypeVar("S")  # what a tier holds
R = TypeVar("R", bound=Source)
R_contra = TypeVar("R_contra", bound=Source, contravariant=True)


class Tier(Protocol[S]):
    """Holds blocks by record number, within a budget. Thread-safe."""

    @property
    def name(self) -> str:
        """What metrics and hits call the tier."""

    @property
    def budget(self) -> int:
        """The most bytes that it may take."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes now."""

    def locate(self, records: Sequence[int]) -> list[S | None]:
        """Return the source of each record; None if the tier does not have it. The caller must `release` them."""

    def release(self, sources: Iterable[S]) -> None:
        """Give back sources of `locate`, so that the tier may use their space again."""

    def remove(self, records: Sequence[int]) -> int:
        """Drop the records, without a callback; return how many of them the tier had."""

    def stats(self) -> Mapping[str, float]:
        """Return plain numbers: "bytes", "budget", "records", and others of the tier's own."""


class Part(NamedTuple):
    """Whole pages of a record: those from byte `begin` on that `memory` takes."""

    source: Any
    begin: int
    memory: memoryview


class ReadsAhead(Protocol[R_contra]):
    """Reads of a tier that are under way while something else is done. Thread-safe. What is under way ends before the
    memory goes that it fills, also where nobody waits for it."""

    def begin(self, sources: Sequence[R_contra], buffers: Sequence[Buffer]) -> int:
        """Begin what `StorageTier.read` does; return a number to wait for it with. Raises: OSError."""

    def begin_parts(self, parts: Sequence[Part], kept: object) -> Sequence[int]:
        """Begin to read parts of records; return numbers to wait for all of them with.

        Args:
            parts: their memory is mutated.
            kept: what owns that.

        Raises:
            OSError: they could not all be begun; the others go on.
        """

    def settle(self, number: int) -> None:
        """Wait until a read has ended, and with it, mostly, those that were begun before; `wait` says how it ended."""

    def wait(self, number: int) -> None:
        """Wait until a read has ended, once for each. Raises: OSError, as `StorageTier.read`."""


class StorageTier(Tier[R], Protocol[R]):
    """A tier whose records must be read before they can be decoded."""

    def holds(self, record: int) -> bool:
        """Return whether the tier has the record, and will give it to `locate`. False if it cannot be asked now."""

    def lacks(self, record: int) -> bool | None:
        """Return whether the tier does not have the record. None if it cannot be asked now."""

    def follows(self, before: R, source: R) -> bool:
        """Return whether `source` lies right behind `before`, so that one call reads both."""

    def read(self, sources: Sequence[R], buffers: Sequence[Buffer]) -> None:
        """Read records that follow each other with one call.

        The caller checks what was read, and still has to release the sources.

        Args:
            sources: records of which each `follows` the one before.
            buffers: one for each record, mutated. Of its `nbytes`, or shorter: then the record's beginning is read.

        Raises:
            OSError: the storage cannot be read.
        """

    def reads_ahead(self) -> ReadsAhead[R] | None:
        """Return what begins reads before their bytes are waited for; None if the tier cannot do that now."""

    def reads_parts(self) -> ReadsAhead[R] | None:
        """Return what begins reads of parts, of records that stay in their place until they are released.

        None if the tier cannot do that now, or others may move its records.
        """

    def is_current(self, source: R) -> bool:
        """Return whether the record still lies where `locate` found it. If not, another record may have been read."""
