"""URLs of engines that take their settings in the query."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.remote.engines.s3 import open_s3
from kvstore.tiers.remote.engines.url import EngineURL, parse_engine_url

FORM = "x://HOST"


def test_all_parts() -> None:
    found = parse_engine_url("x://Host:7/a/b%20c/?one=1&two=&one=2", {"one", "two"}, FORM)
    assert found == EngineURL("host", 7, "a/b c", {"one": "2", "two": ""})


def test_a_host_alone() -> None:
    assert parse_engine_url("x://host", (), FORM) == EngineURL("host", None, "", {})


@pytest.mark.parametrize(
    "url",
    [
        "x://",
        "x:///path",
        "x://host?other=1",
        "x://me@host",
        "x://host#part",
        "x://host:99999",
        "x://host:a",
        "x://[::1",
    ],
)
def test_what_is_not_as_it_should_be_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="expected x://HOST"):
        parse_engine_url(url, {"one"}, FORM)


def test_a_bucket_has_no_port() -> None:
    with pytest.raises(ConfigError, match="expected s3://BUCKET"):
        open_s3("s3://bucket:9000/prefix")
