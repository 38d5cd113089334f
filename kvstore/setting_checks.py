"""What every number of the settings must be."""

from __future__ import annotations

from kvstore.errors import ConfigError

MOST_SECONDS = 1 << 30  # decades; locks count no further than some centuries


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
