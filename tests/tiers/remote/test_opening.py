"""URLs and settings that no engine takes."""

from __future__ import annotations

import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.remote.opening import open_engine


@pytest.mark.parametrize(
    "url", ["", "memory:", "memory://x", "folder:x", "folder://host/x", "http://x", "file:///x", "valkey", "resp://x"]
)
def test_urls_of_no_engine(url: str) -> None:
    with pytest.raises(ConfigError):
        open_engine(url)


@pytest.mark.parametrize("url", ["folder:x", "folder:/tmp/x", "folder://rel/path", "folder:", "folder://", "Folder:/x"])
def test_a_folder_is_named_by_an_absolute_path_behind_three_slashes(url: str) -> None:
    with pytest.raises(ConfigError, match="absolute, behind three slashes, such as folder:///mnt") as caught:
        open_engine(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("url", ["memory:x", "valkey://:secret@h", "redis+cluster://:secret@h"])
def test_settings_of_no_engine_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match="no_such_setting") as caught:
        open_engine(url, no_such_setting=1)
    assert "secret" not in str(caught.value)


def test_without_its_library_s3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvstore.tiers.remote.engines.s3", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"kvstore-lm\[remote\]"):
        open_engine("s3://records")
