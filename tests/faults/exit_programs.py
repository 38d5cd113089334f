"""Small programs that end in the ways that programs end; `test_exits` runs them. Arguments: the way, then the folder.

Each puts two sequences, of which the first is flushed, and says which sequences must be there afterwards. Without
arguments it makes programs for the asking: it reads lines of "way folder", forks for each, and says how the child
ended. So what takes longest, the imports, is done once.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import exit_stores
import torch
from exit_stores import open_store, put

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.tiers.disk.fs import FileSystem

PATH = ""
BOTH, FLUSHED = "1 2", "1"


def begin() -> KVStore:
    store = open_store(PATH)
    put(store, 1)
    store.flush()
    put(store, 2)
    return store


def written(store: KVStore) -> None:
    """Waits until nothing is queued, as it is a moment after a put."""
    while store.stats()["queue"]["bytes"]:
        time.sleep(0.001)


def say(text: str) -> None:
    print(text, flush=True)


def returns() -> None:
    globals()["kept"] = begin()
    say(BOTH)


def exits() -> None:
    begin()
    say(BOTH)
    sys.exit(3)


def raises() -> None:
    store = begin()
    say(BOTH)
    raise KeyError(store.path)


def os_exit() -> None:
    begin()
    say(FLUSHED)
    os._exit(0)


def os_exit_a_moment_later() -> None:
    written(begin())
    say(BOTH)
    os._exit(0)


def sigterm() -> None:
    written(begin())
    say(BOTH)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def sigterm_handled() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store = begin()
    say(BOTH)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        store.get(exit_stores.tokens(1))


def sigterm_closes_inside_a_call() -> None:
    """A handler that calls the store while it interrupts a call gets an error, where it would wait for itself."""
    signal.signal(signal.SIGTERM, lambda *_: store.close())
    store = begin()
    say(BOTH)

    class Interrupted(list):
        def __iter__(self):  # inside the call
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__iter__()

    store._calls.run(list, Interrupted())


def sigint() -> None:
    store = begin()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without
    say(BOTH)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        store.get(exit_stores.tokens(1))


def atexit_after_opening() -> None:
    store = begin()
    atexit.register(store.close)
    say(BOTH)


def atexit_before_opening() -> None:
    stores: list[KVStore] = []
    atexit.register(lambda: stores[0].close())
    stores.append(begin())
    say(BOTH)


def atexit_puts_and_gets() -> None:
    store = begin()

    def last() -> None:
        put(store, 3)
        assert exit_stores.is_there(store, 1)
        say(f"{BOTH} 3")

    atexit.register(last)


def threads_go_on() -> None:
    """Threads of the program put and get after the main thread has ended."""
    store = begin()

    def work() -> None:
        threading.main_thread().join()
        for number in range(3, 9):
            put(store, number)
            assert exit_stores.is_there(store, 1)
        say(f"{BOTH} 3 4 5 6 7 8")

    threading.Thread(target=work).start()


def daemons_inside() -> None:
    store = begin()

    def work(number: int) -> None:
        while True:
            put(store, number)
            store.get(exit_stores.tokens(number))
            number += 10

    for number in range(10, 14):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    time.sleep(0.05)
    say(BOTH)


def _child(path: str) -> None:
    global PATH
    PATH = path  # a spawned process does not have it
    store = begin()
    globals()["kept"] = store
    thread = threading.Thread(target=lambda: (time.sleep(0.02), put(store, 3)))
    thread.start()


def _in_process(method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=_child, args=(PATH,))
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
    say(f"{BOTH} 3")


def multiprocessing_fork() -> None:
    _in_process("fork")


def multiprocessing_spawn() -> None:
    _in_process("spawn")


def fork_and_exit() -> None:
    """The parent has a store, too; what its child does not own, the child must not end."""
    parents = open_store(PATH + "-parent")
    put(parents, 5)
    pid = os.fork()
    if pid == 0:
        globals()["kept"] = begin()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert exit_stores.is_there(parents, 5)
    say(BOTH)


def execs() -> None:
    begin()
    say(FLUSHED)
    os.execv(sys.executable, [sys.executable, "-c", ""])


def in_a_cycle() -> None:
    cycle: list[object] = [begin()]
    cycle.append(cycle)
    say(BOTH)


def dropped_and_opened_again() -> None:
    """A store that nobody refers to is closed: what it held is there, and its lock is free."""
    cycle: list[object] = [begin()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    store = open_store(PATH)
    assert exit_stores.is_there(store, 2)
    put(store, 3)
    del store
    assert exit_stores.is_there(open_store(PATH), 3)
    say(f"{BOTH} 3")


def closed_by_two_threads() -> None:
    store = begin()
    threads = [threading.Thread(target=store.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.close()
    store.close()
    say(BOTH)


def closed_by_a_thread_meanwhile() -> None:
    store = begin()
    threading.Thread(target=store.close, daemon=True).start()
    say(BOTH)


class _Slow(FileSystem):
    """Takes so long to sync that a signal comes meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fdatasync(self, fd: int) -> None:
        time.sleep(self._seconds)
        super().fdatasync(fd)


def _struck_at_the_end(number: int, times: int = 1) -> None:
    """Is asked to end while it ends already."""
    store = open_store(PATH, fs=_Slow(0.5 * times))
    put(store, 1)
    store.flush()
    put(store, 2)
    globals()["kept"] = store
    mine = os.getpid()
    if os.fork() == 0:
        for _ in range(times):
            time.sleep(0.2)
            os.kill(mine, number)
        os._exit(0)


def sigterm_while_it_ends() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _struck_at_the_end(signal.SIGTERM)
    say(BOTH)


def sigterm_twice_while_it_ends() -> None:
    """The second time it gives up what is not written, in order."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _struck_at_the_end(signal.SIGTERM, times=2)
    say(FLUSHED)


def _struck_child(path: str) -> None:
    global PATH
    PATH = path
    sigterm_while_it_ends()


def sigterm_while_a_process_ends() -> None:
    process = multiprocessing.get_context("fork").Process(target=_struck_child, args=(PATH,))
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode


def daemon_takes_layers() -> None:
    """A thread decodes a lazy result when the program ends."""
    begin()
    layout = KVLayout.uniform(24, 4, 64, "float32")
    identity = ModelIdentity("m", "r", "w", "t", layout)
    config = StoreConfig(host=TierConfig(0), disk=TierConfig(1 << 28, "entropy"), segment_bytes=1 << 26)
    kv = [(torch.randn(4, 1024, 64), torch.randn(4, 1024, 64)) for _ in layout.layers]
    with KVStore(PATH + "-wide", identity, config) as store:
        store.put(range(1024), kv)
        store.flush()
        hits = [store.get(range(1024), lazy=True, gate=False) for _ in range(3)]
    started = threading.Event()

    def take() -> None:
        for hit in hits:
            assert hit is not None
            for _ in hit.layers:
                started.set()

    threading.Thread(target=take, daemon=True).start()
    started.wait()
    say(BOTH)


WAYS: dict[str, tuple[Callable[[], None], int]] = {
    way.__name__: (way, status)
    for way, status in [
        (returns, 0),
        (exits, 3),
        (raises, 1),
        (os_exit, 0),
        (os_exit_a_moment_later, 0),
        (sigterm, -signal.SIGTERM),
        (sigterm_handled, 0),
        (sigterm_closes_inside_a_call, 1),
        (sigint, -signal.SIGINT),
        (atexit_after_opening, 0),
        (atexit_before_opening, 0),
        (atexit_puts_and_gets, 0),
        (threads_go_on, 0),
        (daemons_inside, 0),
        (multiprocessing_fork, 0),
        (multiprocessing_spawn, 0),
        (fork_and_exit, 0),
        (execs, 0),
        (in_a_cycle, 0),
        (dropped_and_opened_again, 0),
        (closed_by_two_threads, 0),
        (closed_by_a_thread_meanwhile, 0),
        (sigterm_while_it_ends, 0),
        (sigterm_twice_while_it_ends, 0),
        (sigterm_while_a_process_ends, 0),
        (daemon_takes_layers, 0),
    ]
}


def serve() -> list[str]:
    """In the parent: [] when there are no more orders. In a child: what it has to do, which must then end by itself."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            way, folder = line.split()
            for descriptor, name in ((1, ".out"), (2, ".err")):
                os.dup2(os.open(folder + name, os.O_WRONLY | os.O_CREAT), descriptor)
            return [way, folder]
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return []


if __name__ == "__main__":
    order = sys.argv[1:] or serve()
    if order:
        PATH = order[1]
        WAYS[order[0]][0]()
