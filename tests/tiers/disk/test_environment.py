"""The LMDB environment: transactions that are cut short, and opening the file anew beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from interrupts import Boom, Interrupt
from threadruns import HANGS_S

from kvstore.tiers.disk.environment import CatalogError, Environment


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(str(tmp_path), 1 << 24, False, [b"words"], (), lambda databases: None)


def test_an_interrupt_of_a_read_leaves_nothing_that_others_wait_for(environment: Environment) -> None:
    """At every place of it, also of Python's library. A writer that makes the file anew waits for all readers."""

    def read() -> None:
        with environment.reading() as txn:
            txn.stat()

    counted = Interrupt()
    counted.run(read)
    assert counted.passed > 10
    for at in range(1, counted.passed + 1):
        interrupt = Interrupt(at)
        with suppress(Boom):
            interrupt.run(read)
        for call in (read, environment.renew):
            other = threading.Thread(target=call, daemon=True)
            other.start()
            other.join(HANGS_S)
            assert not other.is_alive(), interrupt.where
    assert not environment._inside
    environment.close()


@pytest.mark.threads
def test_whoever_reads_while_the_file_is_made_anew_waits(environment: Environment) -> None:
    entered, leave, renewed = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with environment.reading():
            entered.set()
            assert leave.wait(HANGS_S)

    def renew() -> None:
        environment.renew()
        renewed.set()

    first, second, third = (threading.Thread(target=call) for call in (read, renew, read))
    first.start()
    assert entered.wait(HANGS_S)
    second.start()
    while not environment._renewing:
        time.sleep(1e-3)
    entered.clear()
    third.start()
    assert not entered.wait(0.05)  # the file may be closed at any moment
    assert not renewed.is_set()
    leave.set()
    for thread in (first, second, third):
        thread.join(HANGS_S)
    assert renewed.is_set()
    assert entered.is_set()
    environment.close()


def test_a_commit_that_no_reader_sees_yet_is_no_version(environment: Environment) -> None:
    """Who sees a version and reads then reads that one or a later one, also while a commit is being written."""
    committed = threading.Event()

    def commit() -> None:
        for number in range(100):
            with environment.writing() as txn:
                txn.put(b"number", b"%d" % number)
        committed.set()

    writing = threading.Thread(target=commit)
    writing.start()
    while not committed.is_set():
        version = environment.version()
        with environment.reading() as txn:
            assert txn.id() >= version
    writing.join(HANGS_S)
    environment.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_who_may_not_write_the_folder_is_told_what_a_reader_needs() -> None:
    program = (
        "import os, sys, lmdb; from kvstore.tiers.disk.environment import _errors\n"
        "os.setuid(65534)\n"
        "with _errors('open'): lmdb.open(sys.argv[1], readonly=True)"
    )
    with tempfile.TemporaryDirectory() as folder:
        Environment(folder, 1 << 24, False, [b"words"], (), lambda databases: None).close()
        for path in (Path(folder), *Path(folder).iterdir()):
            path.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert "CatalogError: catalog: open: " in done.stderr
    assert "the right to write this folder" in done.stderr


def test_a_file_that_was_removed_is_not_made_anew(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").unlink()
    with pytest.raises(CatalogError, match="was removed"):
        environment.renew()
    assert not (tmp_path / "data.mdb").exists()
    environment.close()
