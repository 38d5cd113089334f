"""Fits the model of differences to members of a store and their donors, and measures it on other members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.calibration.donor.differences import DifferenceDump, Numbers, alike, fit_differences, sizes_of
from kvstore.calibration.dump import Bits, Floats
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.donor.groups.model import model_of_section
from kvstore.learning.members import Member, MemberReader
from kvstore.learning.seen import BlocksGone

Arrays = dict[str, npt.NDArray[Any]]
Progress = Callable[[str, int, int], None]
MOST_ROWS = 16_384
LEAST_ROWS = 3_072  # from fewer a model of values, which the store has anyway, is as good
LEAST_GAIN = 0.01  # of the bytes of members that were kept back
_HELD_OUT = 10  # one member of so many, of the newest, is kept back
_SHARE = 0.75  # of a block's rows that are taken of a member; those with fewer are passed over
_WINDOW_MEMBERS = 8
_TABLE_WINDOWS = 6
_MOST_LOOKED_AT = 8  # times the members that are wanted


@dataclass(frozen=True)
class MemberSample:
    """Members to learn from: those of each window, and newer ones to measure on."""

    windows: tuple[tuple[int, ...], ...]
    held_out: tuple[int, ...]
    rows: int  # of each


@dataclass(frozen=True)
class DifferenceTrial:
    """What was fitted, and what it is worth.

    Attributes:
        arrays: the profile's section "donor".
        before, after: payload bytes of the members that were kept back, as they are coded now and with the arrays.
    """

    arrays: Arrays = field(repr=False)
    before: int
    after: int

    def pays(self, nbytes: int, budget: int) -> bool:
        """Whether members get smaller by more than a little, and by the share that `nbytes` more have of the disk."""
        return 1 - self.after / self.before >= LEAST_GAIN + nbytes / budget


@dataclass(frozen=True)
class DifferenceWindows(DifferenceDump):
    """Windows that are read when they are asked for: the rows of some members, one behind the other.

    Attributes:
        members: record numbers, those of each window.
        rows: of each member.
        read: gives one; None if it left.
        pause: called before every step of the work.
        sizes: see `alike`.
        kept: how many windows stay in memory.
    """

    members: tuple[tuple[int, ...], ...] = ()
    rows: int = 0
    read: Callable[[int], Member | None] = lambda record: None
    pause: Callable[[], None] = lambda: None
    sizes: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    kept: int = 1
    _cache: dict[int, list[tuple[Bits, Bits]]] = field(default_factory=dict, repr=False, compare=False)

    def tokens(self, window: int) -> npt.NDArray[np.int64]:
        """Nothing depends on them."""
        return np.zeros(self.length, np.int64)

    def layer(self, layer: int, window: int) -> tuple[Bits, Bits]:
        self.pause()
        if window not in self._cache:
            while len(self._cache) >= self.kept:
                del self._cache[next(iter(self._cache))]
            numbers = []
            for record in self.members[window]:
                self.pause()
                numbers.append(_rows(self.read(record), self.rows))
            self._cache[window] = alike(self.layout, _joined(numbers), self.sizes)
        return self._cache[window][layer]


def choose(members: MemberReader, below: int, pause: Callable[[], None]) -> MemberSample | None:
    """Return members to learn from, the newest before record `below`; None if there are too few."""
    rows = int(_SHARE * members.reader.block_tokens)
    most, found = MOST_ROWS // rows, list[int]()
    for looked, record in enumerate(members.newest_first(below, pause), 1):
        if len(found) >= most or looked > _MOST_LOOKED_AT * most:
            break
        pause()
        member = members.read(record)
        if member is not None and member.rows >= rows:
            found.append(record)
    count = max(1, len(found) // _HELD_OUT)
    held_out, rest = tuple(found[:count]), found[count:]
    whole = len(rest) // _WINDOW_MEMBERS
    if whole * _WINDOW_MEMBERS * rows < LEAST_ROWS:
        return None
    # Neighbours go to different windows, so that a few windows show all kinds.
    windows = tuple(tuple(rest[first : whole * _WINDOW_MEMBERS : whole]) for first in range(whole))
    return MemberSample(windows, held_out, rows)


def learn(
    members: MemberReader,
    sample: MemberSample,
    now: DonorCodec,
    most_bytes: int,
    pause: Callable[[], None],
    progress: Progress,
) -> DifferenceTrial:
    """Fit to the sample and measure. `now` is what members are coded with.

    Raises:
        BlocksGone: members left meanwhile.
        What `pause` raises.
    """

    def told(what: str, done: int, total: int) -> None:
        pause()
        progress(f"differences: {what}", done, total)

    layout = members.reader.layout
    sizes = sizes_of(_joined([_rows(members.read(record), sample.rows) for record in sample.windows[0]]))

    def dump(windows: tuple[tuple[int, ...], ...], kept: int) -> DifferenceWindows:
        length = _WINDOW_MEMBERS * sample.rows
        return DifferenceWindows(
            *(Path(), layout, len(windows), length),
            members=windows,
            rows=sample.rows,
            read=members.read,
            pause=pause,
            sizes=sizes,
            kept=kept,
        )

    few = sample.windows[:: max(1, len(sample.windows) // _TABLE_WINDOWS)][:_TABLE_WINDOWS]
    arrays = fit_differences(dump(sample.windows, 1), dump(few, len(few)), most_bytes, told)
    before = after = 0
    model = model_of_section(layout, arrays)
    learned = DonorCodec(now.plain, groups=lambda: model)
    for record in sample.held_out:
        pause()
        member = members.read(record)
        if member is not None:
            before, after = before + payload_bytes(now, member), after + payload_bytes(learned, member)
    if not before:
        raise BlocksGone
    return DifferenceTrial(arrays, before, after)


def payload_bytes(codec: DonorCodec, member: Member) -> int:
    """Return what a codec makes of a member."""
    info = member.block.info
    sizes = codec.encode(info, member.block.view, member.donor_rows(), memoryview(bytearray(codec.bound(info))))
    assert sizes is not None  # it fits by the meaning of `bound`
    return sum(sizes)


def _rows(member: Member | None, count: int) -> Numbers:
    if member is None or member.rows < count:
        raise BlocksGone
    return [(k[:count], v[:count]) for k, v in member.differences()]


def _joined(parts: list[Numbers]) -> Numbers:
    return [
        (np.concatenate([k for k, _ in same]), np.concatenate([v for _, v in same]))
        for same in zip(*parts, strict=True)
    ]
