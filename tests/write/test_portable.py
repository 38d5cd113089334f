"""A record that is on its way to the remote tier keeps its memory, whatever else is read meanwhile."""

from __future__ import annotations

from pathlib import Path

import remotestores as rs
import small_stores as small

from kvstore.core.keys import namespace_digest


def test_its_bytes_stay_while_others_take_buffers(tmp_path: Path) -> None:
    with rs.open_store(tmp_path / "a", rs.settings(f"memory:{tmp_path.name}"), host=0) as store:
        small.put(store, small.tokens_of(1, small.BLOCK))
        store.flush(remote=True)
        engine = store._engine
        assert engine.remote is not None
        assert engine.remote.uploader is not None
        root = engine.getter.lookup.root(namespace_digest(b""))
        found = engine.remote.uploader._portable(1, root)
        assert found is not None
        before = bytes(found.record.data)
        taken = [engine.pool.take(len(before)) for _ in range(64)]
        for buffer in taken:
            buffer.view[:] = b"\xff" * len(before)
        assert bytes(found.record.data) == before
