"""What happens around a fork, a second process and a kill; run by helpers/trials.py, one forked process per case."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import small_stores
from trials import in_child

from kvstore import KVStore
from kvstore.errors import KVStoreError, StoreForked

TOKENS = small_stores.tokens_of(1, 10)
MORE = small_stores.tokens_of(2, 30)


def trial(name: str) -> Any:
    """Runs the case of that name in a fresh directory."""
    with small_stores.scratch() as folder:
        return globals()[name](folder / "store")


def a_forked_child_is_refused_by_every_call(path: Path) -> None:
    store = _opened(path)
    session = store.session("s")
    session.save(TOKENS, small_stores.kv_of(TOKENS))
    calls = {**small_stores.every_call(store, session, MORE), "close": store.close}

    def child() -> list[str]:
        refused = []
        for name, call in calls.items():
            try:
                call()
            except StoreForked:
                refused.append(name)
        return refused

    assert _result(in_child(child)) == list(calls)
    _still_works(store)
    store.close()
    _is_whole(path)


def a_child_that_ends_normally_leaves_the_parent_unharmed(path: Path) -> None:
    store = _with_tokens(path)
    pid = os.fork()
    if pid == 0:
        raise SystemExit(0)  # destructors and exit handlers run, on copies of the parent's objects
    _, status = os.waitpid(pid, 0)
    assert status == 0
    _still_works(store)
    store.close()
    _is_whole(path)


def a_child_may_open_the_store_for_reading(path: Path) -> None:
    store = _with_tokens(path)

    def child() -> int:
        with _opened(path, read_only=True) as reader:
            return small_stores.stored(reader, TOKENS)

    assert _result(in_child(child)) == 10
    _still_works(store)
    store.close()


def closing_frees_the_lock_though_a_forked_child_lives(path: Path) -> None:
    store = _opened(path)
    small_stores.put(store, TOKENS)
    with _sleeping_child():
        store.close()
        _is_whole(path)


def the_lock_dies_with_the_writer_though_its_child_lives(path: Path) -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with _with_tokens(path):
            child = os.fork()
            if child == 0:
                time.sleep(600)
            os.write(write, child.to_bytes(4, "little"))
            time.sleep(600)
    child = int.from_bytes(os.read(read, 4), "little")
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        _is_whole(path)
    finally:
        os.kill(child, signal.SIGKILL)


def a_second_writer_process_is_refused_and_told_who_holds_the_store(path: Path) -> None:
    with _opened(path) as store:
        small_stores.put(store, TOKENS)

        def child() -> str:
            return _refusal(lambda: _opened(path))

        message = _result(in_child(child))
        assert message.startswith("StoreLocked"), message
        assert f"process {os.getpid()} on " in message
        assert "read_only=True" in message
        _still_works(store)
    _is_whole(path)


def a_second_writer_in_the_same_process_is_refused(path: Path) -> None:
    with _opened(path) as store:
        small_stores.put(store, TOKENS)
        for _ in range(3):
            assert _refusal(lambda: _opened(path)).startswith("StoreLocked")
        _still_works(store)
    _is_whole(path)


def a_reader_in_the_process_of_the_writer_is_refused(path: Path) -> None:
    with _opened(path) as store:
        small_stores.put(store, TOKENS)
        store.flush()
        message = _refusal(lambda: _opened(path, read_only=True))
        assert message.startswith("StoreLocked"), message
        _still_works(store)
    _is_whole(path)


def a_writer_in_the_process_of_a_reader_is_refused_and_changes_nothing(path: Path) -> None:
    _fill(path)
    with _opened(path, read_only=True) as reader:
        before = (path / "catalog" / "data.mdb").stat().st_ino
        message = _refusal(lambda: _opened(path))
        assert message.startswith("StoreLocked"), message
        assert (path / "catalog" / "data.mdb").stat().st_ino == before
        assert small_stores.stored(reader, TOKENS) == 10
    _is_whole(path)


def a_second_reader_in_the_same_process_is_refused(path: Path) -> None:
    _fill(path)
    with _opened(path, read_only=True) as reader:
        message = _refusal(lambda: _opened(path, read_only=True))
        assert message.startswith("StoreLocked"), message
        assert small_stores.stored(reader, TOKENS) == 10
    _is_whole(path)


def a_failed_open_leaves_no_lock_behind(path: Path) -> None:
    _fill(path)
    other = small_stores.identity(type(small_stores.LAYOUT)(small_stores.LAYOUT.layers, "float16"))
    assert _refusal(lambda: KVStore(path, other, small_stores.config())).startswith("IdentityMismatch")
    _is_whole(path)


def a_lock_file_full_of_rubbish_locks_nobody_out(path: Path) -> None:
    for text in (b"", b"\xff" * 9000, b"[" * 100_000, b'{"pid": 1e999, "host": []}', b'{"pid": "x"}'):
        _fill(path)
        (path / "writer.lock").write_bytes(text)
        _is_whole(path)
        with _opened(path):
            (path / "writer.lock").write_bytes(text)  # whoever asks now must still be refused
            assert _refusal(lambda: _opened(path)).startswith("StoreLocked")


def a_process_that_never_closes_ends_cleanly(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        store = _with_tokens(path)
        small_stores.put(store, MORE)
        raise SystemExit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"ended with status {status}"
    _is_whole(path)


def readers_follow_what_the_writer_does(path: Path) -> None:
    with KVStore(path, small_stores.IDENTITY, small_stores.config(host=1 << 14)) as store:
        small_stores.put(store, TOKENS)
        store.flush()
        with _reader(path) as ask:
            assert ask(1, 10) == 10
            assert ask(2, 30) == 0
            small_stores.put(store, MORE)
            small_stores.put(store, MORE[:7], b"other")
            store.flush()
            assert ask(2, 30) == 30
            assert ask(2, 7, b"other") == 7
            store.delete(MORE)
            assert ask(2, 30) == 0
            assert ask(2, 7, b"other") == 7


def a_reader_never_sees_wrong_bytes_while_the_writer_evicts(path: Path) -> None:
    with KVStore(
        path, small_stores.IDENTITY, small_stores.config(host=1 << 14, disk=8 * small_stores.SEGMENT)
    ) as store:
        small_stores.put(store, TOKENS, pin=True)
        store.flush()
        with _reader(path) as ask:
            found = 0
            for number in range(10, 130):
                small_stores.put(store, small_stores.tokens_of(number, 30))
                if number % 3 == 0:
                    store.flush()
                found += ask(max(10, number - 12), 30)
                assert ask(1, 10) == 10
            assert found > 0


def a_killed_reader_does_not_bind_space(path: Path) -> None:
    with KVStore(path, small_stores.IDENTITY, small_stores.config(disk=8 * small_stores.SEGMENT)) as store:
        small_stores.put(store, TOKENS)
        store.flush()
        for number in range(10, 60):
            with _reader(path) as ask:
                assert ask(number - 1, 10) in (0, 10)
            for more in range(4):
                small_stores.put(store, small_stores.tokens_of(number * 10 + more, 10))
            store.flush()
        use = small_stores.disk_use(path)
        assert use <= store.config.disk.bytes, f"{use} bytes on disk"


def readers_work_while_no_writer_is_there(path: Path) -> None:
    _fill(path)
    with _reader(path) as ask, _reader(path) as other:
        assert ask(1, 10) == other(1, 10) == 10


def a_writer_opens_while_readers_read(path: Path) -> None:
    _fill(path)
    with _reader(path) as ask:
        assert ask(1, 10) == 10
        with _opened(path) as store:
            small_stores.put(store, MORE)
            store.flush()
            assert ask(2, 30) == 30


def a_read_only_store_refuses_changes(path: Path) -> None:
    _fill(path)
    with _opened(path, read_only=True) as reader:
        session = reader.session("s")
        for call in (
            lambda: small_stores.put(reader, MORE),
            lambda: reader.delete(TOKENS),
            reader.flush,
            lambda: session.save(TOKENS, small_stores.kv_of(TOKENS)),
            lambda: session.fork("t"),
            session.delete,
        ):
            assert _refusal(call).startswith("ReadOnlyStore")
        hit = session.resume()
        assert hit is not None
        assert hit.tokens == 10


# ---- helpers -----------------------------------------------------------------------------------------------------


def _opened(path: Path, read_only: bool = False) -> KVStore:
    return KVStore(path, small_stores.IDENTITY, small_stores.config(), read_only=read_only)


def _with_tokens(path: Path) -> KVStore:
    """A store that is open for writing and has `TOKENS` on disk."""
    store = _opened(path)
    small_stores.put(store, TOKENS)
    store.flush()
    return store


def _fill(path: Path) -> None:
    with _opened(path) as store:
        store.session("s").save(TOKENS, small_stores.kv_of(TOKENS))


def _is_whole(path: Path) -> None:
    with _opened(path) as store:
        assert small_stores.stored(store, TOKENS) == 10
        counters = store.stats()["counters"]
        assert not any(name.startswith(("damaged", "catalog_", "quarantined")) for name in counters), counters


def _still_works(store: KVStore) -> None:
    assert small_stores.stored(store, TOKENS) == 10
    small_stores.put(store, MORE)
    store.flush()
    assert small_stores.stored(store, MORE) == 30


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except KVStoreError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _result(outcome: dict[str, Any]) -> Any:
    assert "result" in outcome, outcome
    return outcome["result"]


@contextmanager
def _sleeping_child() -> Iterator[None]:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def _reader(path: Path) -> Iterator[Callable[..., int]]:
    """A read-only process that answers how many tokens of a sequence it gets; it is killed at the end."""
    (ask_read, ask_write), (say_read, say_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            reader = KVStore(path, small_stores.IDENTITY, small_stores.config(host=0), read_only=True)
            while request := os.read(ask_read, 64):
                number, count, namespace = int.from_bytes(request[:4], "little"), request[4], request[5:]
                os.write(
                    say_write, bytes([small_stores.stored(reader, small_stores.tokens_of(number, count), namespace)])
                )
        except BaseException as error:
            os.write(say_write, b"!" + repr(error).encode()[:500])
        finally:
            os._exit(1)

    def ask(number: int, count: int, namespace: bytes = b"") -> int:
        os.write(ask_write, number.to_bytes(4, "little") + bytes([count]) + namespace)
        answer = os.read(say_read, 600)
        assert len(answer) == 1, answer
        return answer[0]

    try:
        yield ask
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (ask_read, ask_write, say_read, say_write):
            os.close(fd)
