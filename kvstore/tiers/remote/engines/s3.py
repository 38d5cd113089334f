"""Values as objects of an S3 store, through the library obstore."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore import exceptions as s3_errors
from obstore.store import S3Store

from kvstore.errors import (
    ConfigError,
    RemoteError,
    RemoteFull,
    RemoteGarbled,
    RemoteRefused,
    RemoteTooLarge,
    RemoteUnavailable,
)
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engine import RemoteLimits
from kvstore.tiers.remote.engines.counts import Counts
from kvstore.tiers.remote.engines.loop import LoopThread
from kvstore.tiers.remote.engines.url import parse_engine_url
from kvstore.tiers.remote.engines.writing import counted_put
from kvstore.tiers.remote.keys import check_keys, check_prefix, is_key
from kvstore.tiers.remote.values import scatter, too_large

T = TypeVar("T")
_AT_ONCE = 32  # questions about single keys
_PAGE = 1000
_REQUEST_S = 60  # a request that its caller gave up is cancelled; if even that fails, it ends then
_PROBE = "probe/put-if-absent-"
_CLOCK = "probe/clock-"
_REFUSED = (s3_errors.PermissionDeniedError, s3_errors.UnauthenticatedError)
_REFUSED_STATUS = re.compile(r"status code: 40[13]\b")
_BEHIND = re.compile(r"status code: 416\b")  # the value ends before the part that was asked for
_FULL = re.compile(r"status code: 507\b|QuotaExceeded|InsufficientStorage|StorageFull")


class S3Engine:
    """A `RemoteEngine` in a bucket: `s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]`, one object a value. Records are
    put together into parcels of up to 16 blocks, for each call takes long and is paid for.

    Keys of access come from the environment (AWS_ACCESS_KEY_ID and so on), as obstore finds them, or from `settings`.
    Whether the server honours put-if-absent is tried when the engine is opened, and again with the first writes if it
    did not answer; where it does not, a write looks first, and two writers at once may both write. Nothing expires, and
    `touch` does nothing: give the bucket a lifecycle rule. Ages count from when values were written. Needs the extra
    `remote`.

    Args:
        bucket, prefix: where the objects are.
        max_value_bytes, parcel_bytes: see `RemoteLimits`.
        timeout_s: for trying put-if-absent at opening.
        settings: of `obstore.store.S3Store`, for example `access_key_id` and `secret_access_key`.

    Example:
        >>> engine = S3Engine("records", endpoint="http://127.0.0.1:9", skip_signature=True)
        >>> engine.endpoint("kvs1/a"), engine.limits.has_put_if_absent  # no server is there
        ('s3:http://127.0.0.1:9/records', False)
        >>> engine.close()
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        max_value_bytes: int = 1 << 30,
        timeout_s: float = 5.0,
        endpoint: str | None = None,
        parcel_bytes: int = 16 << 20,
        **settings: Any,
    ) -> None:
        options: Any = {"timeout": timedelta(seconds=_REQUEST_S), "allow_http": True}
        retries: Any = {"max_retries": 0}
        if endpoint is not None:
            settings = {"endpoint": endpoint, "region": "us-east-1", **settings}
        try:
            self._store = S3Store(
                bucket, prefix=prefix or None, client_options=options, retry_config=retries, **settings
            )
        except (s3_errors.BaseError, ValueError) as error:
            raise ConfigError(f"s3://{bucket}: {error}") from error
        self._name = f"s3:{endpoint or 'aws'}/{bucket}"
        self._counts = Counts()
        self._loop = LoopThread(f"kvstore-{self._name}")
        self._is_probed = False
        self._ahead_s: float | None = None
        self._probe_key = f"{_PROBE}{uuid.uuid4().hex}"  # one for all probes: each removes what one given up may leave
        self._limits = RemoteLimits(
            max_value_bytes, has_put_if_absent=False, has_ages=True, parallel=64, parcel_bytes=parcel_bytes
        )
        try:
            self._probe(Deadline(timeout_s))
        except RemoteError:
            self._counts.add(probes_failed=1)

    @property
    def limits(self) -> RemoteLimits:
        return self._limits

    def endpoint(self, key: str) -> str:
        return self._name

    def get_into(self, key: str, buffer: memoryview, timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            value = self._run(lambda: self._get(key, buffer.nbytes), Deadline(timeout_s))
            if value is None:
                return None
            size = value.nbytes
            buffer.cast("B")[:size] = value
            self._counts.add(bytes_read=size)
            return size

    def get_parts_into(self, key: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int | None:
        check_keys(key)
        with self._counts.call():
            count = sum(buffer.nbytes for buffer in buffers)
            value = self._run(lambda: self._part(key, offset, count), Deadline(timeout_s))
            if value is None:
                return None
            if value.nbytes > count:
                raise RemoteGarbled(f"{self._name}: {value.nbytes} bytes, where {count} were asked for")
            self._counts.add(bytes_read=value.nbytes)
            return scatter(value, buffers)

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        timeout_s: float,
        ttl_s: float | None = None,
        over: bool = False,
    ) -> bool:
        def write(views: list[memoryview], deadline: Deadline) -> bool:
            if not over and not self._is_probed:
                self._probe(deadline)
            # A copy: after the deadline the library may still read, and the parts are the caller's again.
            return self._run(lambda: self._put(key, b"".join(views), over), deadline)

        return counted_put(self._counts, key, parts, self.limits.max_value_bytes, timeout_s, write)

    def exist(self, keys: Sequence[str], timeout_s: float) -> list[bool]:
        check_keys(*keys)
        with self._counts.call():
            return list(self._run(lambda: self._exist(keys), Deadline(timeout_s)))

    def touch(self, keys: Sequence[str], ttl_s: float, timeout_s: float) -> None:
        check_keys(*keys)

    def ages(self, keys: Sequence[str], timeout_s: float) -> list[float | None]:
        check_keys(*keys)
        with self._counts.call():
            deadline = Deadline(timeout_s)
            if self._ahead_s is None:
                self._ahead_s = self._run(self._difference, deadline)
            now = time.time() - self._ahead_s
            times = self._run(lambda: self._times(keys), deadline)
            return [None if written is None else max(0.0, now - written) for written in times]

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        check_keys(*keys)
        with self._counts.call():
            self._run(lambda: self._delete(keys), Deadline(timeout_s))
            return len(keys)

    def list(self, prefix: str, timeout_s: float) -> Iterator[str]:
        check_prefix(prefix)
        inner, _, _ = prefix.rpartition("/")  # the library lists folders, not beginnings of names
        pages = obstore.list(self._store, prefix=inner or None, chunk_size=_PAGE)
        while True:
            with self._counts.call():
                page = self._run(lambda: _page(pages), Deadline(timeout_s))
            if page is None:
                return
            names = (str(found["path"]) for found in page)
            yield from (name for name in names if name.startswith(prefix) and is_key(name))

    def stats(self) -> Mapping[str, float]:
        return self._counts.values()

    def close(self) -> None:
        self._loop.close()

    # ---- coroutines ----------------------------------------------------------------------------------------------

    async def _get(self, key: str, room: int) -> memoryview | None:
        try:
            found = await obstore.get_async(self._store, key)
        except FileNotFoundError:
            return None
        size = found.meta["size"]
        if size > room:
            raise too_large(size, room)
        value = memoryview(await found.bytes_async())
        if value.nbytes > room:
            raise too_large(value.nbytes, room)
        return value

    async def _part(self, key: str, offset: int, count: int) -> memoryview | None:
        try:
            return memoryview(await obstore.get_range_async(self._store, key, start=offset, length=count))
        except FileNotFoundError:
            return None
        except s3_errors.BaseError as error:
            if _BEHIND.search(str(error)):
                return memoryview(b"")
            raise

    async def _put(self, key: str, value: bytes, over: bool) -> bool:
        mode: Any = "overwrite" if over or not self._limits.has_put_if_absent else "create"
        if mode == "overwrite" and not over and await self._is_there(key):
            return False
        try:
            await obstore.put_async(self._store, key, value, mode=mode, use_multipart=False)
        except (s3_errors.AlreadyExistsError, s3_errors.PreconditionError):
            return False
        return True

    async def _exist(self, keys: Sequence[str]) -> Sequence[bool]:
        return [written is not None for written in await self._times(keys)]

    async def _times(self, keys: Sequence[str]) -> Sequence[float | None]:
        places = asyncio.Semaphore(_AT_ONCE)

        async def ask(key: str) -> float | None:
            async with places:
                return await self._time(key)

        return await asyncio.gather(*map(ask, keys))

    async def _is_there(self, key: str) -> bool:
        return await self._time(key) is not None

    async def _time(self, key: str) -> float | None:
        """When an object was written, in unix seconds by the server's clock; None if there is none."""
        try:
            found = await obstore.head_async(self._store, key)
        except FileNotFoundError:
            return None
        return found["last_modified"].timestamp()

    async def _difference(self) -> float:
        """How far this machine's clock is ahead of the server's, to a second: of an object that is written now."""
        key = f"{_CLOCK}{uuid.uuid4().hex}"
        try:
            await obstore.put_async(self._store, key, b"clock", use_multipart=False)
            written = await self._time(key)
        finally:
            await obstore.delete_async(self._store, key)
        return 0.0 if written is None else time.time() - written

    async def _delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _PAGE):
            await obstore.delete_async(self._store, list(keys[begin : begin + _PAGE]))

    def _probe(self, deadline: Deadline) -> None:
        """Find out whether the server refuses to replace a value."""
        is_honoured = self._run(lambda: self._try_twice(self._probe_key), deadline)
        self._limits = replace(self._limits, has_put_if_absent=is_honoured)
        self._is_probed = True

    async def _try_twice(self, key: str) -> bool:
        try:
            for _ in range(2):
                await obstore.put_async(self._store, key, b"probe", mode="create", use_multipart=False)
        except (s3_errors.AlreadyExistsError, s3_errors.PreconditionError):
            return True
        except s3_errors.NotSupportedError:
            return False
        else:
            return False
        finally:
            await obstore.delete_async(self._store, key)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        try:
            return self._loop.run(work, deadline)
        except (s3_errors.BaseError, OSError, ValueError, asyncio.CancelledError) as error:
            if isinstance(error, RemoteTooLarge):
                raise
            raise _typed(error, self._name) from error


async def _page(pages: Any) -> Sequence[Any] | None:
    return await anext(pages, None)


def _typed(error: BaseException, name: str) -> RemoteError:
    text = " ".join(str(error).split())
    kind: type[RemoteError] = RemoteUnavailable
    if isinstance(error, _REFUSED) or _REFUSED_STATUS.search(text):
        kind = RemoteRefused
    elif _FULL.search(text):
        kind = RemoteFull
    return kind(f"{name}: {text[:300]}")


def open_s3(url: str, **settings: Any) -> S3Engine:
    """Open the engine of an `s3://` URL.

    Args:
        settings: see `S3Engine`.

    Raises:
        ConfigError: something in the URL or the settings is not as it should be.
    """
    form = "s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]; keys are no part of the URL"
    place = parse_engine_url(url, {"endpoint", "region"}, form)
    if place.port is not None:
        raise ConfigError(f"expected {form}")
    return S3Engine(place.host, place.path, **{**place.settings, **settings})
