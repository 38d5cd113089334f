"""One attempt to learn: fits the exact predictor to blocks of a store, and measures it on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from kvstore.codecs import Codec, codec_by_name
from kvstore.codecs.group_sections import joined
from kvstore.codecs.predictive.levels.model import LEVELS
from kvstore.codecs.profile import Profile
from kvstore.config import MIB
from kvstore.core.heap import give_back_freed
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import SINKS, KVLayout
from kvstore.learning.seen import BlocksGone, SeenTokens
from kvstore.learning.windows import BlockWindows
from kvstore.read.stored_block import BlockReader, StoredWords, parts_of

Arrays = dict[str, npt.NDArray[Any]]
Sections = dict[str, Arrays]
Progress = Callable[[str, int, int], None]
Windows = tuple[tuple[int, ...], ...]

# So many tokens give a profile that is within two hundredths of the ratio that four times as many give.
MOST_TOKENS = 36_864
LEAST_TOKENS = 8_192  # fewer hardly determine the weights
HELD_OUT = 10  # one block of so many, of the newest, is kept back
# What the sums of one pass over the blocks may take. One layer always fits: it takes 8 bytes times the square of the
# values of K and V, six times. The samples of the tables, and one window, take as much at most.
MOST_BYTES = 256 * MIB
_WINDOW_TOKENS = 1024
_WINDOW_BYTES = 32 * MIB
_TABLE_TOKENS = 2048
_DAMP = 2.0  # see `SeenTokens.of`, where layers before the first of a group see more than the token
_MOST_LOOKED_AT = 8  # times the tokens that are wanted, of records that may be gone or coded against others


@dataclass(frozen=True)
class Sample:
    """Blocks to learn from.

    Attributes:
        groups: records to fit each group of layers to, those of each window; one group without windows.
        held_out: records to measure on; newer ones.
        fitted: how many are fitted to.
    """

    groups: tuple[Windows, ...]
    held_out: tuple[int, ...]

    @property
    def fitted(self) -> int:
        return len({record for windows in self.groups for window in windows for record in window})


@dataclass(frozen=True)
class Trial:
    """What was fitted, and what it is worth.

    Attributes:
        sections: of the profile.
        before, after: payload bytes of the held-out blocks, as the disk tier codes now and with the arrays.
        raw: bytes of these blocks.
        blocks, held_out: how many were fitted to, and measured.
    """

    sections: Sections = field(repr=False)
    before: int
    after: int
    raw: int
    blocks: int
    held_out: int


def choose(reader: BlockReader, below: int, pause: Callable[[], None]) -> Sample | None:
    """Return blocks to learn from, the newest before record `below`; None if there are too few."""
    size, layouts = reader.block_tokens, reader.layouts
    found: list[list[tuple[int, int]]] = [[] for _ in layouts]  # of each group (record, start)
    seen: list[int] = []
    for looked, entry in enumerate(reader.newest_first(below, pause), 1):
        if min(map(len, found)) * size >= MOST_TOKENS or looked * size > _MOST_LOOKED_AT * MOST_TOKENS:
            break
        parts = zip(found, parts_of(reader.layout, entry), strict=True)
        whole = [group for group, (_, lacks) in parts if not lacks and len(group) * size < MOST_TOKENS]
        pause()
        block = reader.read(entry.record) if whole else None
        if block is not None and block.is_finite:
            seen.append(entry.record)
            for group in whole:
                group.append((entry.record, entry.start))
    if min(map(len, found)) * size < LEAST_TOKENS:
        return None
    held_out = tuple(seen[: max(1, min(map(len, found)) // HELD_OUT)])
    fitted = [[block for block in group if block[0] not in held_out] for group in found]
    groups = tuple(
        _windows(group, _blocks_in_window(layout, size)) for group, layout in zip(fitted, layouts, strict=True)
    )
    return Sample(groups, held_out) if all(groups) else None


def run(
    reader: BlockReader,
    identity: ModelIdentity,
    sample: Sample,
    now: Codec,
    pause: Callable[[], None],
    progress: Progress,
) -> Trial:
    """Fit to the sample and measure. `now` is what the disk tier codes with.

    Raises:
        BlocksGone: blocks left meanwhile.
        ValueError, ProfileError: caches of this layout are not predicted.
        What `pause` raises.
    """

    def told(what: str, done: int, total: int) -> None:
        pause()
        progress(what, done, total)

    parts = [_fitted(reader, number, windows, pause, told) for number, windows in enumerate(sample.groups)]
    sections = {name: joined([part[name] for part in parts]) for name in parts[0]}
    if not reader.layout.is_grouped:
        (sections,) = parts
    codec = codec_by_name("predictive", Profile.new(identity, sections))
    before = after = raw = 0
    for number, record in enumerate(sample.held_out):
        told("measuring blocks that were kept back", number, len(sample.held_out))
        block = reader.read(record)
        if block is None:
            continue
        before, after = before + payload_bytes(now, block), after + payload_bytes(codec, block)
        raw += block.view.nbytes
    if not raw:
        raise BlocksGone
    told("measuring blocks that were kept back", len(sample.held_out), len(sample.held_out))
    return Trial(sections, before, after, raw, sample.fitted, len(sample.held_out))


def _fitted(
    reader: BlockReader, number: int, windows: Windows, pause: Callable[[], None], told: Progress
) -> dict[str, Arrays]:
    """The sections of a group of layers."""
    from kvstore.calibration.predictive import fit, levels

    layout, size, read = reader.layouts[number], reader.block_tokens, reader.group(number)
    few = _spread(windows, _table_tokens(layout) // size)
    damp = _DAMP if reader.layout.is_grouped and 0 not in reader.layout.groups[number].layers else 0.0
    seen = SeenTokens.of([record for window in windows for record in window], read, pause, damp)
    dump = BlockWindows.of_blocks(layout, size, windows, read, pause, seen)
    tables = BlockWindows.of_blocks(layout, size, few, read, pause, seen, kept=len(few), hide=True)
    base = fit.fit_in_passes(dump, tables, MOST_BYTES, told)
    give_back_freed()  # else what one step left lies between what the next one makes
    level = levels.fit_in_passes(dump, tables, base, LEVELS[-1], MOST_BYTES, told)
    give_back_freed()
    return {"lossless": base | {"seen_kv": base.pop("token_kv"), "seen_tokens": seen.tokens}, "levels": level}


def payload_bytes(codec: Codec, block: StoredWords) -> int:
    """Return what a codec makes of a block."""
    sizes = codec.encode(block.info, block.view, memoryview(bytearray(codec.bound(block.info))))
    assert sizes is not None  # it fits by the meaning of `bound`
    return sum(sizes)


def _windows(found: Sequence[tuple[int, int]], blocks: int) -> tuple[tuple[int, ...], ...]:
    """Windows of so many blocks. Those that begin a sequence stand at the beginning of a window, for the first tokens
    of sequences are like no others, and no fit looks at the first tokens of a window."""
    first = [record for record, start in found if start < SINKS]
    rest = [record for record, start in found if start >= SINKS]
    windows = []
    while len(rest) >= blocks:
        row = [first.pop()] if first else [rest.pop()]
        row += [rest.pop() for _ in range(blocks - 1)]
        windows.append(tuple(row))
    return tuple(windows)


def _spread(windows: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[int, ...], ...]:
    """About `count` blocks of the windows, evenly spread, as windows of as many blocks."""
    width = len(windows[0])
    rest = [record for window in windows for record in window[1:]]
    rest = rest[:: max(1, len(rest) // max(width, count))]
    rows = [tuple(rest[i : i + width]) for i in range(0, len(rest) - width + 1, width)]
    return tuple(rows) or windows[:: max(1, len(windows) // max(1, count))]


def _blocks_in_window(layout: KVLayout, size: int) -> int:
    tokens = min(_WINDOW_TOKENS, _WINDOW_BYTES // layout.bytes_per_token)
    return max(1, tokens // size)


def _table_tokens(layout: KVLayout) -> int:
    """How many tokens the tables are taken from: their inputs are held as float32."""
    return max(256, min(_TABLE_TOKENS, MOST_BYTES // (2 * layout.bytes_per_token)))
