"""The estimates of the gate beside the store, for the next process (FORMAT.md, "Estimates"). Never trusted.

They are of one machine. A file of another one, or one that is damaged, is as good as none: all is measured again.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvstore.gate.curve import Observation
from kvstore.metrics import Metric, Metrics
from kvstore.tiers.disk.fs import FileSystem, is_passing, read_file, write_file

NAME = "gate.json"
_VERSION = 1
LIMIT = 1 << 16
"""The most bytes of the file."""
_MOST_NAMES, _MOST_NAME, _MOST_ROWS = 32, 64, 320
_LEAST, _MOST = 1e-12, 1e18


@dataclass(frozen=True)
class Estimates:
    """What was seen. Immutable; an observation is features, the first of them 1, and seconds.

    Attributes:
        prefill: by device: seconds of all passes, longest sequence, passes, and seconds of short ones.
        reads: by tier.
        rates: by codec: seconds, raw bytes.
        rest: by device.
    """

    prefill: Mapping[str, tuple[float, int, Sequence[Observation], Sequence[float]]]
    reads: Mapping[str, Sequence[Observation]]
    rates: Mapping[str, tuple[float, float]]
    rest: Mapping[str, Sequence[Observation]]


def machine() -> str:
    """Return what stands for this machine: the hash of its name, kind and processors."""
    return xxhash.xxh3_64_hexdigest(f"{platform.node()} {platform.machine()} {os.cpu_count()}".encode())


def write(fs: FileSystem, path: str, estimates: Estimates, metrics: Metrics) -> None:
    """Replace the estimates of the store at `path`. A disk that refuses is counted; nothing depends on the file."""
    document = {
        "version": _VERSION,
        "machine": machine(),
        "prefill": {
            kind: [seen, reach, _rows(passes), list(short)]
            for kind, (seen, reach, passes, short) in estimates.prefill.items()
        },
        "reads": {tier: _rows(seen) for tier, seen in estimates.reads.items()},
        "rates": {codec: list(seen) for codec, seen in estimates.rates.items()},
        "rest": {kind: _rows(seen) for kind, seen in estimates.rest.items()},
    }
    body = json.dumps(document, sort_keys=True).encode() + b"\n"
    try:
        write_file(fs, os.path.join(path, NAME), body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n")
    except OSError as error:
        metrics.add(Metric.DISK_WRITE_ERRORS, because=error)


def read(fs: FileSystem, path: str, metrics: Metrics) -> Estimates | None:
    """Return the estimates of the store at `path`; None if there are none of this machine. Damage is counted."""
    try:
        return _parse(read_file(fs, os.path.join(path, NAME), LIMIT))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if not (isinstance(error, OSError) and is_passing(error)):
            metrics.add(Metric.DAMAGED_ESTIMATES, because=error)
        return None


def _rows(observations: Sequence[Observation]) -> list[list[float]]:
    return [[*features[1:], seconds] for features, seconds in observations]


def _parse(data: bytes) -> Estimates | None:
    body, _, check = data.rstrip(b"\n").partition(b"\n")
    if xxhash.xxh3_128_hexdigest(body + b"\n").encode() != check:
        raise ValueError("the checksum differs")
    document = json.loads(body)
    if document["version"] != _VERSION or document["machine"] != machine():
        return None
    return Estimates(
        {
            name: (_number(seen), int(_number(reach)), _observations(passes, 3), _numbers(short))
            for name, (seen, reach, passes, short) in _named(document["prefill"])
        },
        {name: _observations(rows, 2) for name, rows in _named(document["reads"])},
        {name: (_number(seconds), _number(nbytes)) for name, (seconds, nbytes) in _named(document["rates"])},
        {name: _observations(rows, 2) for name, rows in _named(document["rest"])},
    )


def _named(table: Any) -> list[tuple[str, Any]]:
    found = list(table.items())
    if len(found) > _MOST_NAMES or any(len(name) > _MOST_NAME for name, _ in found):
        raise ValueError("there are more names, or longer ones, than estimates have")
    return found


def _observations(rows: Any, width: int) -> list[Observation]:
    if not isinstance(rows, list) or not 1 <= len(rows) <= _MOST_ROWS:
        raise ValueError(f"expected 1 to {_MOST_ROWS} observations")
    if any(len(row) != width for row in rows):
        raise ValueError(f"expected observations of {width} numbers")
    return [((1.0, *map(_number, row[:-1])), _number(row[-1])) for row in rows]


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list) or len(values) > _MOST_ROWS:
        raise ValueError(f"expected at most {_MOST_ROWS} numbers")
    return [_number(value) for value in values]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number, found {value!r}")
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"a number is out of range: {value!r}")
    return float(value)
