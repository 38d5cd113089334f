"""Folders that hang, fail, fill up, come late, or have no links."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from remotecases import LONG_S, get, opened, put
from threadruns import HANGS_S

from kvstore.errors import (
    ConfigError,
    RemoteError,
    RemoteFull,
    RemoteGarbled,
    RemoteRefused,
    RemoteTimeout,
    RemoteUnavailable,
)
from kvstore.tiers.disk.fs import FileSystem
from kvstore.tiers.remote.opening import open_engine

SOON_S = 0.1


class HangingFileSystem(FileSystem):
    """A file server that does not answer before `goes_on` is set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.done = threading.Semaphore(0)  # calls that came to their end after all

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.goes_on.wait(HANGS_S)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.goes_on.wait(HANGS_S)
        return super().pwritev(fd, buffers, offset)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.done.release()


class FailingFileSystem(FileSystem):
    def __init__(self, number: int) -> None:
        self.number = 0
        self._later = number

    def fails(self) -> None:
        self.number = self._later

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().pwritev(fd, buffers, offset)


class LinklessFileSystem(FileSystem):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_calls_to_a_file_server_that_hangs_are_late_and_leave_the_callers_memory_alone(tmp_path: Path) -> None:
    fs = HangingFileSystem()
    with opened(f"folder://{tmp_path}", fs=fs) as engine:
        put(engine, "kvs1/a", b"value")
        while fs.done.acquire(blocking=False):
            pass
        fs.goes_on.clear()
        buffer, part = bytearray(5), bytearray(b"first")
        with pytest.raises(RemoteTimeout):
            engine.get_into("kvs1/a", memoryview(buffer), SOON_S)
        with pytest.raises(RemoteTimeout):
            engine.put("kvs1/b", [memoryview(part)], SOON_S)
        part[:] = b"other"
        fs.goes_on.set()
        assert fs.done.acquire(timeout=HANGS_S)  # the temporary file of the write that was given up
        assert buffer == bytes(5)
        assert engine.exist(["kvs1/a", "kvs1/b"], LONG_S) == [True, False]
        assert _files(tmp_path) == {"a"}


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, RemoteFull),
        (errno.EDQUOT, RemoteFull),
        (errno.EACCES, RemoteRefused),
        (errno.EIO, RemoteUnavailable),
        (errno.ESTALE, RemoteUnavailable),
    ],
)
def test_writes_that_fail_leave_nothing_behind(tmp_path: Path, number: int, error: type[RemoteError]) -> None:
    fs = FailingFileSystem(number)
    with opened(f"folder://{tmp_path}", fs=fs) as engine:
        fs.fails()
        with pytest.raises(error):
            put(engine, "kvs1/a", b"a")
        assert not _files(tmp_path)
        fs.number = 0
        assert put(engine, "kvs1/a", b"a")


def test_without_links_values_are_renamed(tmp_path: Path) -> None:
    with opened(f"folder://{tmp_path}", fs=LinklessFileSystem()) as engine:
        assert not engine.limits.has_put_if_absent
        assert put(engine, "kvs1/a", b"a")
        assert not put(engine, "kvs1/a", b"b")
        assert get(engine, "kvs1/a") == b"a"
        assert _files(tmp_path) == {"a"}


def test_a_folder_that_cannot_be_made_yet_is_made_with_a_later_write(tmp_path: Path) -> None:
    (tmp_path / "mount").write_text("not a folder")
    with opened(f"folder://{tmp_path}/mount/records") as engine:
        with pytest.raises(RemoteError):
            put(engine, "kvs1/a", b"a")
        assert get(engine, "kvs1/a") is None
        (tmp_path / "mount").unlink()
        assert put(engine, "kvs1/a", b"a")
        assert engine.limits.has_put_if_absent


def test_a_folder_that_had_to_be_made_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with opened(f"folder://{tmp_path}/mount/kv") as engine:
            put(engine, "kvs1/a", b"a")
    (record,) = [each for each in caplog.records if each.name == "kvstore.remote_folder_made"]
    assert record.levelname == "WARNING"
    assert f"{tmp_path}/mount/kv: there was no such folder" in record.getMessage()


def test_a_folder_that_is_only_looked_at_must_be_there_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for name in ("typo", "a%20file"):
        with pytest.raises(ConfigError, match="there is no such folder"):
            open_engine(f"folder://{tmp_path}/{name}", make=False)
    (tmp_path / "mount").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mount")
    with opened(f"folder://{tmp_path}/link", make=False) as engine:
        assert list(engine.list("kvs1/", LONG_S)) == []
        assert not any((tmp_path / "mount").iterdir())
        assert put(engine, "kvs1/a", b"a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a file", "link", "mount"]


def test_links_are_not_followed_and_files_of_others_are_not_listed(tmp_path: Path) -> None:
    with opened(f"folder://{tmp_path}") as engine:
        put(engine, "kvs1/a", b"a")
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "kvs1/~b").mkdir()
        (tmp_path / "kvs1/~b/b").symlink_to(tmp_path / "secret")
        (tmp_path / "kvs1/~a/other").write_text("x")
        (tmp_path / "kvs1/~a/a b").write_text("x")
        with pytest.raises(RemoteGarbled):
            get(engine, "kvs1/b")
        assert set(engine.list("kvs1/", LONG_S)) == {"kvs1/a", "kvs1/b"}
        assert engine.exist(["kvs1/b"], LONG_S) == [False]
