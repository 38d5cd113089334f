"""One writer process, any number of readers, forks: who is refused, and that nobody is harmed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import small_stores
import trials
from once import once

from kvstore import KVStore
from kvstore.errors import StoreClosed

CASES = Path(__file__).parents[1] / "faults" / "lock_trials.py"
NAMES = [
    "a_forked_child_is_refused_by_every_call",
    "a_child_that_ends_normally_leaves_the_parent_unharmed",
    "a_child_may_open_the_store_for_reading",
    "closing_frees_the_lock_though_a_forked_child_lives",
    "the_lock_dies_with_the_writer_though_its_child_lives",
    "a_second_writer_process_is_refused_and_told_who_holds_the_store",
    "a_second_writer_in_the_same_process_is_refused",
    "a_reader_in_the_process_of_the_writer_is_refused",
    "a_writer_in_the_process_of_a_reader_is_refused_and_changes_nothing",
    "a_second_reader_in_the_same_process_is_refused",
    "a_failed_open_leaves_no_lock_behind",
    "a_lock_file_full_of_rubbish_locks_nobody_out",
    "a_process_that_never_closes_ends_cleanly",
    "readers_follow_what_the_writer_does",
    "a_reader_never_sees_wrong_bytes_while_the_writer_evicts",
    "a_killed_reader_does_not_bind_space",
    "readers_work_while_no_writer_is_there",
    "a_writer_opens_while_readers_read",
    "a_read_only_store_refuses_changes",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """All cases in one worker process: importing torch takes longer than they do."""

    def make(folder: Path) -> None:
        rows = trials.run(CASES, "trial", [{"name": name} for name in NAMES])
        found = {row["case"]["name"]: trials.failures([row]) for row in rows}
        (folder / "found.json").write_text(json.dumps(found))

    found: dict[str, list[str]] = json.loads((once(tmp_path_factory, "locking", make) / "found.json").read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_locking(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == []


@pytest.mark.parametrize("turn", range(10))
def test_calls_under_way_while_the_store_is_closed_finish_or_raise_store_closed(tmp_path: Path, turn: int) -> None:
    store = KVStore(tmp_path, small_stores.IDENTITY, small_stores.config(host=1 << 14))
    sequences = [small_stores.tokens_of(n, 40) for n in range(8)]
    for tokens in sequences:
        small_stores.put(store, tokens)
    store.flush()
    started, wrong = threading.Barrier(5), []

    def work(number: int) -> None:
        started.wait()
        try:
            for i in range(1000):
                which = (i + number) % 8
                if number == 3:
                    small_stores.put(store, small_stores.tokens_of(100 + i, 10))
                elif number == 2:
                    store.prefetch(sequences[which])
                else:
                    small_stores.stored(store, sequences[which])
        except StoreClosed:
            return
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    threading.Event().wait(0.002 * turn)
    store.close()
    for thread in threads:
        thread.join()
    assert wrong == []
