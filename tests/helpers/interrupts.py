"""An exception at the n-th place of a call where an interrupt may come: Ctrl-C, a time limit, a signal's handler.

CPython raises such exceptions after a call, at the beginning of a function and where a loop jumps back, and nowhere
else: a `with` of a lock that C takes, for example, is never interrupted between taking it and the block. `Interrupt`
counts these places in the frames of the package and of what it uses of Python's library, by tracing their bytecodes,
and raises at one of them.
"""

from __future__ import annotations

import contextlib
import dis
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import _base
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvstore

PACKAGE = str(Path(kvstore.__file__).resolve().parent)
ROOTS = tuple(str(path.resolve()) for path in (Path(PACKAGE), Path(PACKAGE) / "trie", Path(PACKAGE) / "codecs"))
LIBRARY = frozenset(str(Path(module.__file__).resolve()) for module in (_base, contextlib, queue, threading))
GUARDS = str(Path(PACKAGE, "core", "guard.py"))  # what asserts the order of locks stands for locks that C takes
_CHECKED = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


class Boom(BaseException):
    """The interrupt."""


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which an interrupt may come, within the same handlers as the one before."""
    table = getattr(code, "co_exceptiontable", b"")
    handlers = list(dis._parse_exception_table(code)) if table else []  # type: ignore[attr-defined]

    def handler(offset: int) -> int:
        return next((entry.target for entry in handlers if entry.start <= offset < entry.end), -1)

    def is_checked(name: str) -> bool:
        return name.startswith(_CHECKED) and not name.endswith("NO_INTERRUPT")

    found, before = set(), None
    for instruction in dis.get_instructions(code):
        after_check = before is not None and is_checked(before.opname)
        if before is not None and after_check and handler(before.offset) == handler(instruction.offset):
            found.add(instruction.offset)
        if not instruction.opname.startswith(("CACHE", "PRECALL", "EXTENDED_ARG")):
            before = instruction
    return frozenset(found)


@cache
def _is_ours(filename: str) -> bool:
    path = str(Path(filename).resolve())
    return (path.startswith(ROOTS) and path != GUARDS) or path in LIBRARY


class Interrupt:
    """Counts the places that a call passes, and raises `Boom` at number `at`; 0 for never.

    Attributes:
        passed: how many there were.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.passed = 0
        self.where = ""

    def run(self, call: Callable[[], Any]) -> Any:
        """Make the call; raises `Boom` if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.passed += 1
            if self.passed == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise Boom(self.where)
        return self._step
