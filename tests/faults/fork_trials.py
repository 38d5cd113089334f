"""A program with busy threads that forks; each child opens a store anew, its parent's for reading or one of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import exit_stores

HANGS_S = 600.0


def child(number: int, path: str) -> None:
    if number % 2:
        with exit_stores.open_store(path, read_only=True) as store:
            assert exit_stores.is_there(store, 1)
    else:
        with exit_stores.open_store(f"{path}-{number}") as store:
            exit_stores.put(store, 1)
            assert exit_stores.is_there(store, 1)
    if number % 3 == 0:
        os._exit(0)
    # Otherwise it ends as any program does, with copies of the parent's objects.


def ends_well(pid: int) -> bool:
    end = time.monotonic() + HANGS_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main(path: str, forks: int) -> None:
    store = exit_stores.open_store(path)
    exit_stores.put(store, 1)
    store.flush()
    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            exit_stores.put(store, number)
            store.flush()
            assert exit_stores.is_there(store, 1)
            number += 10

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10, 13)]
    for thread in threads:
        thread.start()
    for number in range(forks):
        pid = os.fork()
        if pid == 0:
            return child(number, path)
        print("well" if ends_well(pid) else "not well", flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
