"""What a tier is, and what it says of a block that it has. Readers ask these, never for a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore.codecs.view import KVView
from kvstore.core.record import RecordHeader
from kvstore.tiers.buffers import Buffer

if TYPE_CHECKING:
    import torch


class SealedSource(Protocol):
    """A whole record in memory."""

    @property
    def header(self) -> RecordHeader: ...

    @property
    def payload(self) -> memoryview: ...


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
        """What the block takes in its tier; of one that must be read, the bytes to read."""

    @property
    def codec_id(self) -> int | None:
        """Number of the record's codec; None if it is not a record."""

    @property
    def donors(self) -> Sequence[int] | None:
        """Numbers of the records that it was coded against when it was found; None if the source does not know."""
        return None

    @property
    def tensors(self) -> TensorSource | None:
        return None

    @property
    def sealed(self) -> SealedSource | None:
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
        """Writes the first `target.tokens` tokens to `target`, on any device, and is done on return.

        Raises `CodecError` for damaged memory; torch may raise `OutOfMemoryError` for that of a device.
        """

    @abstractmethod
    def reaches(self, device: torch.device) -> bool:
        """Whether `copy_to` brings tensors to `device` (a GPU with its index) without the CPU."""

    @abstractmethod
    def fetched(self) -> TensorSource:
        """The same block in host memory."""


S = TypeVar("S")  # what a tier holds
R = TypeVar("R", bound=Source)


class Tier(Protocol[S]):
    """Holds blocks by record number, within a budget. Thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def budget(self) -> int:
        """The most bytes that it may take."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes now."""

    def locate(self, records: Sequence[int]) -> list[S | None]:
        """The source of each record, None where the tier does not have it. The caller releases what it gets."""

    def release(self, sources: Iterable[S]) -> None:
        """Says that the sources that `locate` gave are no longer used: the tier may use their space again."""

    def remove(self, records: Sequence[int]) -> int:
        """Drops the records, without telling anyone; returns how many there were."""

    def stats(self) -> dict[str, int]:
        """Plain numbers: "bytes", "budget", "records", and what else there is to say."""


class StorageTier(Tier[R], Protocol[R]):
    """A tier whose records must be read before they can be decoded."""

    def follows(self, before: R, source: R) -> bool:
        """Whether `source` lies right behind `before`, so that one call reads both."""

    def read(self, sources: Sequence[R], buffers: Sequence[Buffer]) -> None:
        """Reads records that follow each other, each into its buffer of `nbytes`, with one call. Raises `OSError`.

        The caller checks what was read, and still has to release the sources.
        """

    def is_current(self, source: R) -> bool:
        """Whether the record still lies where `locate` found it; else what was read may be another's bytes."""
