"""A prompt that one process put is a hit in another, by way of a real server, and of a folder."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import remotestores as rs
import small_stores as small
from valkeys import shared_valkey

TOKENS = small.tokens_of(3, 8 * small.BLOCK)
CHILD = """
import sys
import remotestores as rs, small_stores as small
from pathlib import Path
rs.filled(Path(sys.argv[1]), rs.settings(sys.argv[2]), small.tokens_of(3, 8 * small.BLOCK))
print("put")
"""


@pytest.mark.processes
@pytest.mark.parametrize("server", ["folder", "valkey"])
def test_what_another_process_put_is_a_hit(tmp_path: Path, server: str) -> None:
    url = f"folder://{tmp_path}/shared" if server == "folder" else shared_valkey().url
    done = forked.run(CHILD, tmp_path / "a", url)
    assert done.stdout.strip() == "put", done.stderr
    with rs.open_store(tmp_path / "b", rs.settings(url)) as store:
        assert rs.got(store, TOKENS).tiers == {"remote": len(TOKENS)}
    with rs.open_store(tmp_path / "c", rs.settings(url)) as store:  # an empty disk
        assert rs.got(store, TOKENS).tokens == len(TOKENS)
