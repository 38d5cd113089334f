"""Settings of the remote tier: from Python, a file, the environment; what does not fit is told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import RemoteConfig, StoreConfig
from kvstore.errors import ConfigError

URL = "valkey://cache:6379"


def test_a_file_the_environment_and_python_say_the_same(tmp_path: Path) -> None:
    want = RemoteConfig(URL, deadline_s=0.5, upload="put", read_only=True, erase=False, key=tmp_path / "key")
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[kvstore.remote]\nurl = "{URL}"\ndeadline_s = 0.5\nupload = "put"\nread_only = true\nerase = false\n'
        f'key = "{want.key}"\n'
    )
    names = {"URL": URL, "DEADLINE_S": "0.5", "UPLOAD": "put", "READ_ONLY": "1", "ERASE": "0"}
    names["KEY"] = str(want.key)
    assert StoreConfig.from_toml(file).remote == want
    assert StoreConfig.from_env({f"KVSTORE_REMOTE_{name}": value for name, value in names.items()}).remote == want


def test_the_environment_changes_what_a_file_said() -> None:
    base = StoreConfig(remote=RemoteConfig(URL, deadline_s=0.5))
    changed = StoreConfig.from_env({"KVSTORE_REMOTE_UPLOAD": "eviction"}, base=base).remote
    assert changed == RemoteConfig(URL, deadline_s=0.5, upload="eviction")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"url": 7}, "url"),
        ({"url": "cache"}, "url"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"upload": "always"}, "upload"),
        ({"promote": "third"}, "promote"),
        ({"read_only": 1}, "read_only"),
        ({"erase": "no"}, "erase"),
        ({"follow": 1}, "follow"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"in_flight": 1000}, "in_flight"),
        ({"key": 7}, "key"),
        ({"settings": []}, "settings"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^remote\.{name}"):
        StoreConfig.from_mapping({"remote": {"url": URL, **settings}})


def test_a_table_without_a_url_is_refused() -> None:
    for bad in ({}, "valkey://cache", 7):
        with pytest.raises(ConfigError, match=r"^remote"):
            StoreConfig.from_mapping({"remote": bad})


def test_a_key_is_not_shown() -> None:
    assert "kkkk" not in repr(StoreConfig(remote=RemoteConfig(URL, key=b"k" * 32)))
