"""Locks that know who holds them."""

from __future__ import annotations

import threading

import pytest

from kvstore.core.guard import DISK, PUT, RESIDENCY, Guard


def test_whoever_holds_it_passes_and_nobody_else_does() -> None:
    guard = Guard(RESIDENCY)
    with pytest.raises(AssertionError, match="is not held"):
        guard.check_held()
    with guard, guard:
        guard.check_held()
        failed: list[str] = []

        def other() -> None:
            try:
                guard.check_held()
            except AssertionError as error:
                failed.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert failed == ["the lock of residency is not held"]


def test_the_order_is_asserted() -> None:
    put, disk, residency = Guard(PUT), Guard(DISK), Guard(RESIDENCY)
    with put, disk, residency, put:
        pass
    with residency, pytest.raises(AssertionError, match="the disk's lock was asked for while the lock of residency"):
        disk.__enter__()


def test_in_production_nothing_is_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "enforced", False)
    guard, disk = Guard(RESIDENCY), Guard(DISK)
    guard.check_held()
    with guard, disk:
        pass
