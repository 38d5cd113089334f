"""What holds for a coder in C++, whatever it codes: how much room it needs, and that threads may share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def needs_exactly(size: int, code: Callable[..., Any], fall_back: Any) -> None:
    """An exact mode codes a block where there is room for `size` bytes and its limit is beyond them.

    code: of where the bytes go and, if given, the limit. fall_back: what it returns where the limit is reached.
    """
    for room in (0, 1, 50, 500, size // 2, size - 1):
        assert code(bytearray(room)) is None
        assert code(bytearray(room), room) == fall_back
    assert isinstance(code(bytearray(size)), tuple)
    assert isinstance(code(bytearray(size), size + 1), tuple)
    assert code(bytearray(size), size) == fall_back


def threads_agree(code: Callable[[Any], Any], blocks: Sequence[Any], times: int) -> None:
    """Four threads write of every block what one alone writes."""
    want = [code(block) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(code, list(blocks) * times))
    assert found == want * times


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    """This thread's processor takes subnormal numbers for zeros; skips the test where it cannot."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
