"""One attempt to learn: fits the exact predictor to blocks of a store, and measures it on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from kvstore.codecs import Codec
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.predictive.levels.model import LEVELS
from kvstore.codecs.profile import Profile
from kvstore.config import MIB
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import SINKS, KVLayout
from kvstore.learning.seen import BlocksGone, SeenTokens
from kvstore.learning.windows import BlockWindows
from kvstore.read.stored_block import BlockReader, StoredWords

Arrays = dict[str, npt.NDArray[Any]]
Sections = dict[str, Arrays]
Progress = Callable[[str, int, int], None]

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
_MOST_LOOKED_AT = 8  # times the tokens that are wanted, of records that may be gone or coded against others


@dataclass(frozen=True)
class Sample:
    """Blocks to learn from.

    Attributes:
        windows: records to fit to, those of each window.
        held_out: records to measure on; newer ones.
        blocks: how many there are.
    """

    windows: tuple[tuple[int, ...], ...]
    held_out: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return sum(map(len, self.windows)) + len(self.held_out)


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
    size, layout = reader.block_tokens, reader.layout
    found: list[tuple[int, int]] = []  # (record, start)
    for looked, entry in enumerate(reader.newest_first(below, pause), 1):
        if len(found) * size >= MOST_TOKENS or looked * size > _MOST_LOOKED_AT * MOST_TOKENS:
            break
        pause()
        block = reader.read(entry.record)
        if block is not None and block.is_finite:
            found.append((entry.record, entry.start))
    if len(found) * size < LEAST_TOKENS:
        return None
    count = max(1, len(found) // HELD_OUT)
    held_out = tuple(record for record, _ in found[:count])
    windows = _windows(found[count:], _blocks_in_window(layout, size))
    return Sample(windows, held_out) if windows else None


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
    from kvstore.calibration.predictive import fit, levels

    def told(what: str, done: int, total: int) -> None:
        pause()
        progress(what, done, total)

    layout, size = reader.layout, reader.block_tokens
    few = _spread(sample.windows, _table_tokens(layout) // size)
    seen = SeenTokens.of([record for window in sample.windows for record in window], reader.read, pause)
    dump = BlockWindows.of_blocks(layout, size, sample.windows, reader.read, pause, seen)
    tables = BlockWindows.of_blocks(layout, size, few, reader.read, pause, seen, kept=len(few), hide=True)
    base = fit.fit_in_passes(dump, tables, MOST_BYTES, told)
    level = levels.fit_in_passes(dump, tables, base, LEVELS[-1], MOST_BYTES, told)
    base |= {"seen_kv": base.pop("token_kv"), "seen_tokens": seen.tokens}
    sections = {"lossless": base, "levels": level}
    codec = PredictiveCodec.from_profile(Profile.new(identity, sections))
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
    return Trial(sections, before, after, raw, sum(map(len, sample.windows)), len(sample.held_out))


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
