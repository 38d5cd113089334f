"""What the disk tier may take: everything in the folder of a store counts, as the file system has it allocated.

    segments + catalog + superblock, locks, profiles and folders <= disk.bytes

The segments get what the rest leaves. So the rest is measured before a group is written, and what the catalog may grow
by with the next commits is set aside.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from kvstore.config import KIB, MIN_SEGMENT_BYTES, PAGE_BYTES, StoreConfig
from kvstore.core.layout import KVLayout
from kvstore.core.record import padded, payload_offset
from kvstore.errors import ConfigError
from kvstore.tiers.disk.fs import FileSystem, lacks_descriptors
from kvstore.tiers.disk.reclaim import live_limit

# One is filled, one is in reserve, one is emptied.
LEAST_SEGMENTS = 3
# What an empty store takes beside its segments, and the first commits.
BESIDE_BYTES = 256 * KIB
# With fewer segments more of the budget is dead: the reserve, and what died in the others. Measured with sequences that
# are used again by Zipf's law, share of the budget that lives: 4 segments 45 %, 16: 78 %, 64: 85 %, 128: 89 %.
_SEGMENTS = 128
# Fewer records in a segment waste its end.
_RECORDS_IN_SEGMENT = 8
# The rest is where others write, and what makes recycling cheap.
_MOST_RESERVED = 0.75
# Pages that any commit writes anew: roots, branches and the list of free pages of LMDB.
_ANY_COMMIT = 12
# Records that leave or move with a group, beside those that come.
_OTHERS = 64


def fitted(config: StoreConfig, layout: KVLayout) -> StoreConfig:
    """Return the settings for a new store, with segments that are small enough for its budget.

    Raises:
        ConfigError: the budget is too small.
    """
    record = largest_record(config, layout)
    smallest = max(MIN_SEGMENT_BYTES, PAGE_BYTES + record)
    room = (config.disk.bytes - BESIDE_BYTES) // LEAST_SEGMENTS
    # Whole records behind the first page: what is left of a segment behind the last one is never written.
    wanted = PAGE_BYTES + max(_RECORDS_IN_SEGMENT, config.disk.bytes // _SEGMENTS // record) * record
    wanted = max(smallest, min(config.segment_bytes, wanted, room)) // PAGE_BYTES * PAGE_BYTES
    return checked(replace(config, segment_bytes=min(config.segment_bytes, wanted)))


def largest_record(config: StoreConfig, layout: KVLayout) -> int:
    """Return what a block takes on disk if coding does not make it smaller; without its states."""
    tokens = config.block_tokens
    return padded(payload_offset(len(layout.layers), tokens, has_sums=True) + tokens * layout.bytes_per_token)


def checked(config: StoreConfig, why: str = "") -> StoreConfig:
    """Return the settings.

    Args:
        config: with the segments that the store has, or is to have.
        why: what the error begins with.

    Raises:
        ConfigError: the budget has no room for the segments that any store needs.
    """
    least = LEAST_SEGMENTS * config.segment_bytes + BESIDE_BYTES
    if config.disk.bytes < least:
        raise ConfigError(
            f"{why}disk.bytes: {config.disk.bytes} is below {LEAST_SEGMENTS} segments of {config.segment_bytes} bytes "
            f"and {BESIDE_BYTES} bytes for what stands beside them; set it to {least} or more"
        )
    return config


def check_reservations(config: StoreConfig) -> None:
    """Raise `ConfigError` if tenants reserve more of the disk than others can leave them at any time.

    Args:
        config: with the segments that the store has, or is to have.
    """
    reserved = sum(tenant.reserved_bytes for tenant in config.tenants.values())
    segments = max(LEAST_SEGMENTS, (config.disk.bytes - BESIDE_BYTES) // config.segment_bytes)
    most = int(live_limit(segments, config.segment_bytes) * _MOST_RESERVED)
    if reserved > most:
        raise ConfigError(
            f"tenants: reserved_bytes: {reserved} in all, and at most {most} can be, for disk.bytes is "
            f"{config.disk.bytes}; raise that, or reserve less"
        )


@dataclass(frozen=True)
class DiskBudget:
    """Measures a store on disk. Immutable; every call asks the file system.

    Attributes:
        fs: the file system.
        path: of the store.
        catalog_file: the file that grows with every commit.
        config: the settings of the store.
    """

    fs: FileSystem
    path: str
    catalog_file: str
    config: StoreConfig

    def most_segments(self, records: int = 0, beside: int = 0) -> int:
        """Return how many segments fit, the one in reserve included, when so many new records are to be committed, and
        so many bytes written beside the segments; at least those that any store needs."""
        rest = self.beside_bytes() + beside + self._growth(records)
        return max(LEAST_SEGMENTS, (self.config.disk.bytes - rest) // self.config.segment_bytes)

    @property
    def usual_segments(self) -> int:
        """How many segments fit beside a small catalog; does not change while the store is open."""
        return max(LEAST_SEGMENTS, (self.config.disk.bytes - BESIDE_BYTES) // self.config.segment_bytes)

    def fits(self, segments: int, beside: int = 0) -> bool:
        """Return whether so many segments are within the budget now, with nothing set aside but `beside` bytes."""
        taken = segments * self.config.segment_bytes + self.beside_bytes() + beside
        return segments <= LEAST_SEGMENTS or taken <= self.config.disk.bytes

    def beside_bytes(self) -> int:
        """Return what everything but the segments takes.

        Raises:
            OSError: no descriptor is left to list a folder with.
        """
        total, todo = 0, [self.path]
        while todo:
            folder = todo.pop()
            total += self.fs.allocated(folder)
            if os.path.basename(folder) == "segments":
                continue
            try:
                for name in self.fs.names(folder):
                    path = os.path.join(folder, name)
                    if self.fs.kind(path) == "a folder":
                        todo.append(path)
                    else:
                        total += self.fs.allocated(path)
            except OSError as error:  # for example, it is gone meanwhile
                if lacks_descriptors(error):
                    raise
        return total

    def _growth(self, records: int) -> int:
        """What the catalog may grow by a commit of so many new records: LMDB writes every page that changes to another
        place, and uses the old one again two commits later."""
        catalog = self.fs.allocated(self.catalog_file)
        entries = 2 * records * (128 + 4 * self.config.block_tokens)
        return _ANY_COMMIT * PAGE_BYTES + min(2 * (records + _OTHERS) * PAGE_BYTES, catalog) + entries
