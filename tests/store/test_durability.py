"""What is promised to be on disk is there after the process died without a word."""

from __future__ import annotations

import errno
from pathlib import Path

import forked
import pytest
from child_writer import PUTS
from kvcases import GatedFS, kv_of, open_store, same_kv, tokens
from threadruns import HANGS_S

from kvstore import TierConfig
from kvstore.config import MIB
from kvstore.tiers.disk.fs import FileSystem


def run_and_die(path: Path, code: str, settings: str = "{}") -> str:
    """Runs code in a process that then ends without closing anything."""
    script = PUTS + code + "\nsys.stdout.flush()\nos._exit(9)\n"
    done = forked.run(script, path, settings)
    assert done.returncode == 9, done.stderr
    return done.stdout.strip()


def whole(store, seed: int, count: int = 20) -> bool:
    hit = store.get(tokens(count, seed))
    return hit is not None and hit.tokens == count and same_kv(hit.layers, kv_of(tokens(count, seed)))


def test_after_flush_everything_is_durable(tmp_path: Path) -> None:
    out = run_and_die(tmp_path, "for seed in range(10): put(20, seed)\nprint(store.flush())")
    assert out == "FlushResult(durable_blocks=30, dropped_blocks=0)"
    with open_store(tmp_path) as store:
        assert all(whole(store, seed) for seed in range(10))


def test_with_durability_put_a_put_is_durable_on_return(tmp_path: Path) -> None:
    out = run_and_die(tmp_path, "print(put(20).new_blocks)", "{'durability': 'put'}")
    assert out == "3"
    with open_store(tmp_path) as store:
        assert whole(store, 0)


def test_with_durability_put_a_saved_session_is_durable_on_return(tmp_path: Path) -> None:
    code = "store.session('chat').save(tokens(20), kv_of(tokens(20)))"
    run_and_die(tmp_path, code, "{'durability': 'put'}")
    with open_store(tmp_path) as store:
        assert [info.id for info in store.sessions()] == ["chat"]
        assert same_kv(store.session("chat").resume().layers, kv_of(tokens(20)))


def test_without_flush_every_put_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    run_and_die(tmp_path, "for seed in range(40): put(20, seed)")
    with open_store(tmp_path) as store:
        assert {store.contains(tokens(20, seed)) for seed in range(40)} <= {0, 20}
        assert all(whole(store, seed) for seed in range(40) if store.contains(tokens(20, seed)))


def test_sessions_and_deletions_are_durable_after_flush(tmp_path: Path) -> None:
    code = """
for name in "abc": store.session(name).save(tokens(20), kv_of(tokens(20)))
store.session("b").delete()
store.session("a").fork("d")
store.flush()
"""
    run_and_die(tmp_path, code)
    with open_store(tmp_path) as store:
        assert sorted(info.id for info in store.sessions()) == ["a", "c", "d"]


def test_a_delete_is_durable_on_return(tmp_path: Path) -> None:
    run_and_die(tmp_path, "put(20)\nput(20, 1)\nstore.flush()\nstore.delete(tokens(20))")
    with open_store(tmp_path) as store:
        assert not store.contains(tokens(20))
        assert whole(store, 1)


def test_pins_and_lifetimes_are_durable_after_flush(tmp_path: Path) -> None:
    settings = "{'disk': TierConfig(8 * 65536, 'raw'), 'host': TierConfig(0)}"
    run_and_die(tmp_path, "put(20)\nstore.flush()\nput(20, pin=True)\nstore.flush()", settings)
    with open_store(tmp_path, disk=TierConfig(8 * 65536, "raw"), host=TierConfig(0)) as store:
        for seed in range(1, 60):
            store.put(tokens(20, seed), kv_of(tokens(20, seed)))
        store.flush()
        assert whole(store, 0)


def test_a_store_is_reopened_many_times_without_growing(tmp_path: Path) -> None:
    for seed in range(12):
        run = open_store(tmp_path)
        run.put(tokens(20, seed), kv_of(tokens(20, seed)))
        run.close()
    with open_store(tmp_path) as store:
        assert all(whole(store, seed) for seed in range(12))
        assert store.stats()["disk"]["segments"] == 3  # 36 records of a page each, 15 to a segment


class FailingSync(FileSystem):
    """A disk whose syncs of data fail while `failing`."""

    failing = False

    def fdatasync(self, fd: int) -> None:
        if self.failing:
            raise OSError(errno.EIO, "injected")
        super().fdatasync(fd)


def test_flush_says_what_could_not_be_made_durable(tmp_path: Path) -> None:
    fs = FailingSync()
    with open_store(tmp_path, fs=fs) as store:
        store.put(tokens(20), kv_of(tokens(20)))
        store.flush()
        fs.failing = True
        store.put(tokens(20, seed=1), kv_of(tokens(20, seed=1)))
        result = store.flush()
        assert (result.durable_blocks, result.dropped_blocks) == (0, 3)
        assert whole(store, 1)  # still in memory
        fs.failing = False
    with open_store(tmp_path) as store:
        assert whole(store, 0)
        assert not store.contains(tokens(20, seed=1))


def test_with_durability_put_a_put_says_what_could_not_be_made_durable(tmp_path: Path) -> None:
    fs = FailingSync()
    with open_store(tmp_path, fs=fs, durability="put") as store:
        assert store.put(tokens(20), kv_of(tokens(20))).dropped_blocks == 0
        fs.failing = True
        assert store.put(tokens(20, seed=1), kv_of(tokens(20, seed=1))).dropped_blocks == 3
        fs.failing = False
        assert store.put(tokens(20, seed=2), kv_of(tokens(20, seed=2))).dropped_blocks == 0


def test_with_durability_put_a_put_in_memory_alone_drops_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, durability="put", disk=TierConfig(0), host=TierConfig(1 * MIB, "raw")) as store:
        assert store.put(tokens(20), kv_of(tokens(20))).dropped_blocks == 0
        assert store.get(tokens(20)).tiers == {"host": 20}


@pytest.mark.parametrize("durability", ["flush", "put"])
def test_nothing_is_visible_to_a_later_open_before_it_was_synced(tmp_path: Path, durability: str) -> None:
    """The catalog is committed after the sync: a process that dies in the sync leaves no trace of the put."""
    code = f"""
import threading
store.close()
fs = GatedFS()
store = open_store(sys.argv[1], fs=fs, durability={durability!r})
put(20)
store.flush()
fs.shut()
threading.Thread(target=put, args=(20, 1), daemon=True).start()
assert fs.waiting.wait(600)
"""
    run_and_die(tmp_path, code)
    with open_store(tmp_path) as store:
        assert whole(store, 0)
        assert store.contains(tokens(20, seed=1)) == 0


def test_the_gate_of_these_tests_really_stops_a_flush(tmp_path: Path) -> None:
    fs = GatedFS()
    with open_store(tmp_path, fs=fs) as store:
        store.put(tokens(3, seed=1), kv_of(tokens(3, seed=1)))
        store.flush()
        fs.shut()
        store.put(tokens(20), kv_of(tokens(20)))
        assert fs.waiting.wait(HANGS_S)
        assert store.stats()["disk"]["records"] == 1
        fs.gate.set()
        store.flush()
        assert store.stats()["disk"]["records"] == 4
