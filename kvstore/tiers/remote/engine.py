"""What the remote tier asks of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RemoteLimits:
    """What an engine can do, found out when it was opened.

    Args:
        max_value_bytes: larger values raise `RemoteTooLarge`.
        exist_batch: this many keys in one call of `exist` cost about one round trip.
        has_put_if_absent: the server itself refuses to replace a value. Otherwise the engine looks first, and two
            writers at once may both write.
        has_ttl: values expire by themselves; otherwise `ttl_s` and `touch` do nothing.
        has_ages: the engine has `ages`, which tells how long ago values were written or touched.
        keeps_use: `touch` makes values younger.
        has_change_feed: the engine has `changes`, which tells of keys that others wrote or removed.
        parallel: more calls at once than this wait for each other.
        parcel_bytes: the engine has `get_parts_into`, and calls cost so much that records are to be put together into
            parcels of about so many bytes; 0: each record is a value of its own.

    Example:
        >>> RemoteLimits(max_value_bytes=512 << 20).has_ttl
        False
    """

    max_value_bytes: int
    exist_batch: int = 64
    has_put_if_absent: bool = True
    has_ttl: bool = False
    has_ages: bool = False
    keeps_use: bool = False
    has_change_feed: bool = False
    parallel: int = 16
    parcel_bytes: int = 0


class RemoteEngine(Protocol):
    """Bytes under keys, on a server. Blocking and thread-safe; meant to be called from several worker threads.

    `timeout_s` bounds the whole call by the clock of this process, whatever the server does: at most 20 ms later the
    call has returned or raised. Nothing is tried a second time.

    Keys are 1 to 512 characters of `A-Z a-z 0-9 . _ - /`, with no empty part between slashes and none that is `.` or
    `..`; others raise ValueError. Every call raises a `RemoteError` (`kvstore/errors.py`) for whatever the server does
    wrong, and nothing else.
    """

    @property
    def limits(self) -> RemoteLimits: ...

    def endpoint(self, key: str) -> str:
        """Return the name of the server that holds `key`, without asking it: what fails together has one name."""
        ...

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        """Read a value into the start of `buffer`, which is writable and contiguous.

        Returns:
            How many bytes the value has, or None if there is none. The bytes are whatever the server sent.

        Raises:
            RemoteTooLarge: the value is larger than the buffer.
            RemoteError: anything else. The buffer then holds anything, and nothing writes into it any more.
        """
        ...

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        """Store the parts, one after the other, as one value; readers see all of it or nothing.

        Args:
            ttl_s: it may expire after so long; None: it stays until the server evicts it.
            over: replace a value that may be there. Readers see all of one of the two, or, where the server cannot do
                that, nothing for a moment.

        Returns:
            False if there is a value under this key already, and not `over`; it stays as it is.

        Raises:
            RemoteTooLarge: the value is larger than `limits.max_value_bytes`. Nothing was sent.
            RemoteFull: the server has no room.
            RemoteError: anything else. The value may be there or not. The parts are not read any more.
        """
        ...

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        """Return for each key whether a value is there. Of a cluster's node that fails the keys are False, and
        counted in `stats()["exist_unknown"]`; `RemoteError` if no node answered."""
        ...

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        """Let values live for at least `ttl_s` from now on; never shortens a life. Missing keys are ignored."""
        ...

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        """Remove values; return how many were there, or how many were asked for where the server does not say."""
        ...

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """Yield the keys that start with `prefix`, in any order; `timeout_s` is for each step.

        A key that is there all the time comes at least once, and may come twice. Objects of others whose names are no
        keys are left out.
        """
        ...

    def stats(self) -> Mapping[str, float]:
        """Return counters since the engine was opened, in no time: `calls`, `failures`, `bytes_read`,
        `bytes_written`, and more of the engine's own."""
        ...

    def close(self) -> None:
        """Give back connections and threads. Calls from now on raise `RemoteUnavailable`. Can be called again."""
        ...


class AgingEngine(RemoteEngine, Protocol):
    """An engine whose server knows how old values are: `limits.has_ages` is True."""

    def ages(self, keys: Sequence[str], timeout_s: float) -> list[float | None]:
        """Return for each key how many seconds ago its value was written, or touched where `limits.keeps_use`; None if
        there is no value. By the server's clock, whatever this machine's says, to about a second."""
        ...


class RangedEngine(RemoteEngine, Protocol):
    """An engine that reads parts of values: `limits.parcel_bytes` is not 0."""

    def get_parts_into(self, key: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int | None:
        """Read the bytes of a value from `offset` on into the buffers, one after the other, in one call.

        Args:
            buffers: writable and contiguous, and at least one byte of them.

        Returns:
            How many bytes were read, fewer than the buffers hold where the value ends before; None if there is no
            value. The bytes are whatever the server sent.

        Raises:
            RemoteError: the call failed. The buffers then hold anything, and nothing writes into them any more.
        """
        ...


class ChangingEngine(RemoteEngine, Protocol):
    """An engine whose server tells of changes: `limits.has_change_feed` is True."""

    def changes(self, prefix: str, callback: Callable[[Sequence[str] | None], None]) -> Callable[[], None]:
        """Be told of keys that start with `prefix` and were written, removed, evicted or have expired, by whomever.

        Which of these it was is not told: ask `exist`. While the connection is lost nothing is told.

        Args:
            callback: gets keys, or None when anything may have changed: everything was removed, or the connection was
                lost and is there again. It runs in a thread of the engine, one call after the other, and should return
                soon; what it raises ends the feed.

        Returns:
            A function that ends it; `close` does so, too.
        """
        ...
