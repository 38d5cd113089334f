"""How much of what a target is about its inputs reach: lines of functions."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
READS = {
    "record": ("kvstore/core/record.py",),
    "entry": ("kvstore/tiers/disk/entry.py",),
    "session": ("kvstore/core/session_record.py", "kvstore/core/session_note.py"),
    "profile": ("codecs/profile.py", "codecs/profile_head.py"),
    "superblock": ("kvstore/tiers/disk/superblock.py",),
    "catalog": ("kvstore/tiers/disk/catalog.py", "kvstore/tiers/disk/open.py", "kvstore/residency/load.py"),
    "whole_file": ("kvstore/tiers/disk/whole_file.py",),
    "resp": tuple(f"kvstore/tiers/remote/engines/resp/{name}.py" for name in ("replies", "slots")),
    "llama": tuple(f"kvstore/integrations/llama_cpp/{name}.py" for name in ("state", "slot_file", "fields")),
    "gguf": ("kvstore/integrations/llama_cpp/gguf.py", "kvstore/integrations/llama_cpp/fields.py"),
    "events": ("kvstore/events/wire.py",),
    "bundle": ("kvstore/transfer/bundle.py",),
    "shared": ("kvstore/shared/wire.py",),
    "tsc": tuple(f"codecs/tsc/{name}.py" for name in ("codec", "frames", "pages")),
    "archive": ("codecs/tokens/archive.py", "codecs/tokens/text.py"),
    "speculative": tuple(f"codecs/speculative/{name}.py" for name in ("codec", "chunks", "mixture")),
    "zstd": ("codecs/zstd.py",),
}
"""The files that each target is about."""


def lines_reached(
    target: Callable[[bytes], None], inputs: Iterable[Path], files: Iterable[str]
) -> tuple[int, int, list[Path]]:
    """(how many lines of functions in these files the inputs reach, how many there are, the shortest inputs that reach
    as many)."""
    every = {(path, line) for path in files for line in _lines(ROOT / path)}
    wanted = {str((ROOT / path).resolve()): path for path in files}
    names: dict[str, str | None] = {}  # file names as code has them, which may lead through links
    found, needed = set[tuple[str, int]](), list[Path]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in names:
            names[name] = wanted.get(str(Path(name).resolve()))
        file = names[name]
        if file is None:
            return None
        found.add((file, frame.f_lineno))
        return trace

    target(b"")
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        for path in sorted(inputs, key=lambda path: (path.stat().st_size, path.name)):
            before = len(found & every)
            target(path.read_bytes())
            if len(found & every) > before:
                needed.append(path)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return len(found & every), len(every), needed


def _lines(path: Path) -> set[int]:
    found, todo = set[int](), [compile(path.read_text(), str(path), "exec")]
    while todo:
        code = todo.pop()
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]
        if code.co_flags & inspect.CO_OPTIMIZED:  # a function, no class and no module
            found |= {line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}
    return found
