"""Settings: defaults, bounds, TOML and environment, unknown keys."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from kvstore import StoreConfig, TierConfig
from kvstore.config import GIB, KIB, MIB
from kvstore.errors import ConfigError


def test_the_defaults_are_bounded() -> None:
    config = StoreConfig()
    assert config.device.bytes == 0
    assert 0 < config.host.bytes <= 1 * GIB
    assert 0 < config.disk.bytes <= 8 * GIB
    assert (config.block_tokens, config.segment_bytes, config.durability) == (64, 64 * MIB, "flush")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        StoreConfig().threads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"host": 5}, "host: expected a TierConfig"),
        ({"host": TierConfig(-1, "raw")}, "host.bytes: expected 0"),
        ({"host": TierConfig(1.5, "raw")}, "host.bytes: expected an integer"),
        ({"host": TierConfig(True, "raw")}, "host.bytes: expected an integer"),
        ({"host": TierConfig(1 << 61, "raw")}, "host.bytes"),
        ({"disk": TierConfig(8 * GIB, "")}, "disk.codec"),
        ({"disk": TierConfig(8 * GIB, 7)}, "disk.codec"),
        ({"device": TierConfig(1, "zstd")}, "device.codec: expected 'auto', 'raw' or 'splitzip', found 'zstd'"),
        ({"device": TierConfig(0, "entropy")}, "device.codec"),
        ({"block_tokens": 0}, "block_tokens: expected 1 to 4096, found 0"),
        ({"block_tokens": 4097}, "block_tokens"),
        ({"segment_bytes": 64 * KIB - 4096}, "segment_bytes"),
        ({"segment_bytes": 64 * KIB + 1}, "segment_bytes: expected a multiple of 4096"),
        ({"segment_bytes": (1 << 32) + 4096}, "segment_bytes"),
        ({"group_bytes": 0}, "group_bytes"),
        ({"write_queue_bytes": 0}, "write_queue_bytes"),
        ({"threads": 0}, "threads"),
        ({"threads": 257}, "threads"),
        ({"put_timeout_s": -1}, "put_timeout_s"),
        ({"put_timeout_s": float("nan")}, "put_timeout_s"),
        ({"put_timeout_s": float("inf")}, "put_timeout_s"),
        ({"put_timeout_s": True}, "put_timeout_s"),
        ({"put_timeout_s": "1"}, "put_timeout_s"),
        ({"profile": "a/profile"}, "profile: expected a Path"),
        ({"durability": "always"}, "durability: expected 'flush' or 'put'"),
        ({"namespaces": [b"a"]}, "namespaces"),
        ({"namespaces": (5,)}, "namespaces"),
        ({"namespaces": ("\ud800",)}, "namespaces"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        StoreConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": TierConfig(0)},
        {"device": TierConfig(1, "splitzip")},
        {"disk": TierConfig(0)},
        {"disk": TierConfig(4 * 64 * KIB, "raw"), "segment_bytes": 64 * KIB},
        {"block_tokens": 1},
        {"block_tokens": 4096},
        {"put_timeout_s": 0},
        {"threads": 256},
        {"namespaces": (b"", b"a")},
        {"profile": Path("p")},
    ],
)
def test_the_limits_themselves_are_accepted(changes: dict[str, Any]) -> None:
    config = StoreConfig(**changes)
    assert all(getattr(config, name) == value for name, value in changes.items())


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="threads"):
        StoreConfig(threads=0)


# ---- TOML --------------------------------------------------------------------------------------------------------


def toml(tmp_path: Path, text: str) -> StoreConfig:
    path = tmp_path / "kvstore.toml"
    path.write_text(text, encoding="utf-8")
    return StoreConfig.from_toml(path)


def test_toml_with_a_table_kvstore(tmp_path: Path) -> None:
    config = toml(
        tmp_path,
        '[other]\nx = 1\n[kvstore]\nthreads = 3\nnamespaces = ["a", "é"]\n'
        '[kvstore.disk]\nbytes = 1073741824\ncodec = "raw"\n',
    )
    assert config == StoreConfig(threads=3, namespaces=(b"a", "é".encode()), disk=TierConfig(GIB, "raw"))


def test_toml_without_the_table_is_read_whole(tmp_path: Path) -> None:
    assert toml(tmp_path, 'durability = "put"\nput_timeout_s = 0.5\n') == StoreConfig(
        durability="put", put_timeout_s=0.5
    )


def test_sizes_may_have_units(tmp_path: Path) -> None:
    config = toml(
        tmp_path,
        "[kvstore]\nsegment_bytes = '1MiB'\n[kvstore.disk]\nbytes = '8GiB'\n[kvstore.host]\nbytes = '1.5 GB'\n"
        "[kvstore.tenants.ann]\nquota_bytes = '64MiB'\n[kvstore.remote]\nurl = 'file:///r'\nqueue_bytes = '8MiB'\n",
    )
    assert (config.disk.bytes, config.host.bytes, config.segment_bytes) == (8 * GIB, 1_500_000_000, 1 << 20)
    assert config.tenants[b"ann"].quota_bytes == 64 << 20
    assert config.remote is not None
    assert config.remote.queue_bytes == 8 << 20
    assert StoreConfig.from_env({"KVSTORE_DISK_BYTES": "50GiB"}).disk == TierConfig(50 * GIB, "auto")


def test_a_tier_of_which_only_the_size_is_said_codes_as_by_default() -> None:
    config = StoreConfig(TierConfig(1 << 20), TierConfig(GIB), TierConfig(8 * GIB))
    assert (config.device.codec, config.disk) == ("raw", StoreConfig().disk)


def test_a_tier_keeps_the_default_of_what_toml_does_not_name(tmp_path: Path) -> None:
    assert toml(tmp_path, "[kvstore.disk]\nbytes = 1073741824\n").disk == TierConfig(GIB, "auto")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[kvstore]\nthread = 3", "thread: unknown setting; known are"),
        ("[kvstore.disk]\nbyte = 3", "disk.byte: unknown setting; known are bytes, codec"),
        ("[kvstore]\ndisk = 3", "disk: expected a table"),
        ("[kvstore]\nnamespaces = 'a'", "namespaces: expected a list"),
        ("[kvstore]\nnamespaces = [1]", "namespaces"),
        ("[kvstore]\nthreads = '3'", "threads: expected an integer"),
        ("kvstore = 3", "expected a table"),
        ("[kvstore", "cannot be read as TOML"),
    ],
)
def test_toml_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        toml(tmp_path, text)


def test_a_toml_file_that_is_missing_or_binary_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        StoreConfig.from_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        StoreConfig.from_toml(tmp_path / "binary.toml")


# ---- environment -------------------------------------------------------------------------------------------------


def test_the_environment_names_every_setting() -> None:
    config = StoreConfig.from_env(
        {
            "KVSTORE_DEVICE_BYTES": "1",
            "KVSTORE_HOST_BYTES": "2",
            "KVSTORE_HOST_CODEC": "zstd",
            "KVSTORE_DISK_BYTES": "1073741824",
            "KVSTORE_DISK_CODEC": "raw",
            "KVSTORE_BLOCK_TOKENS": "16",
            "KVSTORE_SEGMENT_BYTES": "65536",
            "KVSTORE_GROUP_BYTES": "3",
            "KVSTORE_WRITE_QUEUE_BYTES": "4",
            "KVSTORE_PUT_TIMEOUT_S": "0.25",
            "KVSTORE_DURABILITY": "put",
            "KVSTORE_NAMESPACES": "a,b",
            "KVSTORE_THREADS": "5",
            "KVSTORE_PROFILE": "7",
            "PATH": "ignored",
        }
    )
    assert config == StoreConfig(
        device=TierConfig(1, "raw"),
        host=TierConfig(2, "zstd"),
        disk=TierConfig(GIB, "raw"),
        block_tokens=16,
        segment_bytes=65536,
        group_bytes=3,
        write_queue_bytes=4,
        put_timeout_s=0.25,
        durability="put",
        namespaces=(b"a", b"b"),
        threads=5,
        profile=Path("7"),
    )


def test_the_environment_goes_over_a_base() -> None:
    base = StoreConfig(threads=7, block_tokens=32)
    assert StoreConfig.from_env({"KVSTORE_THREADS": "1"}, base=base) == StoreConfig(threads=1, block_tokens=32)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVSTORE_THREADS", "9")
    assert StoreConfig.from_env().threads == 9


def test_variables_of_the_build_are_not_settings() -> None:
    assert StoreConfig.from_env({"KVSTORE_CPU": "scalar", "KVSTORE_SANITIZE": "1"}) == StoreConfig()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"KVSTORE_THREAD": "1"}, "KVSTORE_THREAD: thread: unknown setting"),
        ({"KVSTORE_HOST_BYTES": "8 pages"}, "host.bytes: '8 pages' is no size; write a number with B, kB"),
        ({"KVSTORE_GROUP_BYTES": "0MB"}, "group_bytes: '0MB' is no size"),
        ({"KVSTORE_DISK_SIZE": "1"}, "disk.size: unknown setting"),
        ({"KVSTORE_DISK": "1"}, "disk: expected a table"),
        ({"KVSTORE_DISK": "1", "KVSTORE_DISK_BYTES": "1"}, "disk: expected a table"),
        ({"KVSTORE_DISK_BYTES": "1", "KVSTORE_DISK": "1"}, "disk: expected a table"),
        ({"KVSTORE_THREADS": "many"}, "threads: expected an integer, found 'many'"),
        ({"KVSTORE_HOST_BYTES": "1e9"}, "host.bytes: expected an integer"),
        ({"KVSTORE_PUT_TIMEOUT_S": "nan"}, "put_timeout_s"),
    ],
)
def test_an_environment_that_is_wrong_is_refused_by_name(environ: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        StoreConfig.from_env(environ)
