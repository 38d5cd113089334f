"""However a program ends, it does not abort; what was flushed is there, and what was put a moment before, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import exit_stores
import pytest
import trials
from length import FULL

PROGRAMS = Path(__file__).with_name("exit_programs.py")
WAYS = trials.load(PROGRAMS).WAYS
TIMES = 20 if FULL else 1
SLOW = {"multiprocessing_spawn"}  # imports everything anew

End = Callable[[str, Path], tuple[int, str, str]]
"""Runs one program: (its exit status, what it said, what it complained of)."""


@pytest.fixture(scope="module")
def end() -> Iterator[End]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=trials.environment(),
    ) as server:

        def run(way: str, folder: Path) -> tuple[int, str, str]:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{way} {folder}\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            said, complained = (folder.with_name(folder.name + end).read_text() for end in (".out", ".err"))
            return status, said, complained

        yield run


def alone(way: str, folder: Path) -> tuple[int, str, str]:
    """As `end`, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), way, str(folder)],
        capture_output=True,
        text=True,
        env=trials.environment(),
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


def check(way: str, folder: Path, end: End) -> None:
    status, said, complained = end(way, folder)
    assert "terminate called" not in complained
    assert status == WAYS[way][1], complained[-3000:]
    promised = [int(word) for word in said.split()]
    assert promised, complained[-3000:]
    with exit_stores.open_store(str(folder)) as store:  # its lock is free
        assert store.check(deep=True).problems == ()
        assert [number for number in promised if exit_stores.is_there(store, number)] == promised


@pytest.mark.faults
@pytest.mark.parametrize("way", sorted(WAYS if FULL else set(WAYS) - SLOW))
def test_a_program_that_ends_loses_nothing(way: str, tmp_path: Path, end: End) -> None:
    for number in range(TIMES):
        check(way, tmp_path / str(number), end)


@pytest.mark.faults
@pytest.mark.parametrize("way", sorted(WAYS) if FULL else ["daemons_inside"])
def test_a_program_of_its_own_that_ends_loses_nothing(way: str, tmp_path: Path) -> None:
    check(way, tmp_path / "store", alone)
