"""What every number of the settings must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import ConfigError

MOST_SECONDS = 1 << 30  # decades; locks count no further than some centuries
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{name}i": 1024**power for power, name in enumerate("kmgt", 1)}


def check_seconds(name: str, value: object, above: bool = False) -> None:
    """Raise `ConfigError` for what is no number of seconds. above: 0 is none, either."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: expected seconds, found {value!r}")
    if not 0 <= value <= MOST_SECONDS or (above and not value):
        found = value if isinstance(value, float) or value.bit_length() < 99 else "a number of many digits"
        raise ConfigError(f"{name}: expected {'more than ' * above}0 to {MOST_SECONDS} seconds, found {found!r}")


def check_whole(name: str, value: object, low: int, high: int, multiple: int = 1) -> None:
    """Raise `ConfigError` for what is no integer from `low` to `high`, or no multiple."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: expected an integer, found {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name}: expected {low} to {high}, found {value}")
    if value % multiple:
        raise ConfigError(f"{name}: expected a multiple of {multiple}, found {value}")


def parse_size(text: str) -> int:
    """Read a number of bytes such as 4GiB, 500MB or 1048576. Raises `ValueError`.

    Example:
        >>> parse_size("4GiB"), parse_size("1.5 kB")
        (4294967296, 1500)
    """
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789. ").strip()
    try:
        found = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size; write a number with B, kB, MB, GB, KiB, MiB, GiB or TiB") from None
    if found <= 0:
        raise ValueError(f"{text!r} is no size; write a number above 0")
    return found


def sizes_read(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return settings as read from a file or the environment, with the text of sizes ("8GiB") as their bytes.

    Args:
        table: names and values; those whose name ends in `bytes` are sizes.
        where: what stands before the names in an error.

    Raises:
        ConfigError: a text is no size.
    """
    found = dict(table)
    for name, value in table.items():
        if isinstance(value, str) and name.endswith("bytes"):
            try:
                found[name] = parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{where}{name}: {error}") from None
    return found
