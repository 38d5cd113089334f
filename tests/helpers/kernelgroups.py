"""Runs groups of checks of an interpreted*.py script, each in a forked process: the script is imported once for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import interpreter
from trials import in_child

HANGS_S = 3600.0  # whoever runs the script has a shorter limit


def run(groups: Mapping[str, Callable[[], None]]) -> None:
    """Runs those that `sys.argv` names, and prints each name that did not fail; ends the program with what the first
    that fails says."""
    interpreter.replace_once()
    for name in sys.argv[1:]:
        found = in_child(groups[name], HANGS_S)
        if "result" not in found:
            sys.exit(f"{name}: {found.get('error') or found}")
        print(name)
