"""A publisher of block events, as vLLM has one: ZMQ PUB, and a ROUTER that sends again what a subscriber missed.

Needs the extra `kvstore-lm[events]`; nothing else imports this module. See docs/fleet.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

try:
    import zmq
except ModuleNotFoundError as error:
    what = "kvstore.events.publish needs pyzmq; pip install 'kvstore-lm[events]'"
    raise ModuleNotFoundError(what, name=error.name) from None

from kvstore.core.waiting import Flag
from kvstore.errors import ConfigError
from kvstore.events.watch import BlockWatch
from kvstore.events.wire import Batch, Event, packed
from kvstore.store import KVStore

_END = (-1).to_bytes(8, "big", signed=True)
_MOST_IN_BATCH = 1024
_WAIT_S = 0.05
_ENDS_S = 5.0


class EventPublisher:
    """Tells routers which blocks a store has. Thread-safe; made by `publish`.

    Frames of a message: topic, a number that rises by one, in 8 bytes big-endian, and the batch (`wire.packed`). A
    subscriber that misses numbers asks at `replay` for what is in the buffer from a number on: `[b"", number]`; the
    answer are messages `[b"", number, batch]`, the last with the number -1 and no batch.

    Attributes:
        endpoint: where subscribers connect, with the port that was found.
        replay: where they ask again; "" for nowhere.
    """

    def __init__(
        self, store: KVStore, endpoint: str, replay: str, topic: str, buffer_batches: int, queue: int, high_water: int
    ) -> None:
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._next = 0
        self._events = 0
        self._over = Flag()
        self._context = zmq.Context()
        self._replays: zmq.Socket[bytes] | None = None
        try:
            self._out = self._bound(zmq.PUB, endpoint, high_water)
            self.endpoint, self.replay = self._out.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), ""
            if replay:
                self._replays = self._bound(zmq.ROUTER, replay, high_water)
                self.replay = self._replays.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"events: {endpoint} or {replay} cannot be bound: {error}") from error
        self._watch = BlockWatch(store._residency, queue)
        self._watch.begin()
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Return how many batches and events were sent. What was dropped is `dropped_events` of the store."""
        return {"batches": self._next, "events": self._events}

    def close(self) -> None:
        """Send what is known, and end. Idempotent. The store can be closed before or after."""
        if not self._over.is_set():
            self._watch.end()
            self._over.set()
            self._watch.news.set()
        self._thread.join(_ENDS_S)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bound(self, kind: int, endpoint: str, high_water: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(high_water)
        socket.linger = 1000
        socket.bind(endpoint)
        return socket

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._watch.news.wait(_WAIT_S)
                self._send(self._watch.take())
                self._answer()
            self._send(self._watch.take())
        finally:
            self._out.close()
            if self._replays is not None:
                self._replays.close()
            self._context.term()

    def _send(self, events: Sequence[Event]) -> None:
        for start in range(0, len(events), _MOST_IN_BATCH):
            part = events[start : start + _MOST_IN_BATCH]
            message = packed(Batch(time.time(), part))
            self._out.send_multipart([self._topic, self._next.to_bytes(8, "big"), message])
            self._buffer.append((self._next, message))
            self._next += 1
            self._events += len(part)

    def _answer(self) -> None:
        """Send again what is asked for."""
        while self._replays is not None and self._replays.poll(0):
            frames = self._replays.recv_multipart()
            if len(frames) != 3 or len(frames[2]) > 8:
                continue  # no question
            begin = int.from_bytes(frames[2], "big")
            for number, message in self._buffer:
                if number >= begin:
                    self._replays.send_multipart([frames[0], b"", number.to_bytes(8, "big"), message])
            self._replays.send_multipart([frames[0], b"", _END, b""])


def publish(
    store: KVStore,
    endpoint: str = "tcp://127.0.0.1:5557",
    *,
    replay: str = "",
    topic: str = "",
    buffer_batches: int = 10_000,
    queue: int = 100_000,
    high_water: int = 100_000,
) -> EventPublisher:
    """Tell routers from now on which blocks of a store are where; first, what it has now.

    Args:
        store: an open store, not read-only.
        endpoint: where subscribers connect: "tcp://*:5557"; port 0 for any.
        replay: where they ask for what they missed; "" for nowhere.
        topic: of all messages; llm-d wants "kv@POD@MODEL".
        buffer_batches: so many messages can be asked for again.
        queue: so many changes may wait. More are dropped and counted (`dropped_events`), and then everything is told
            anew after an `AllBlocksCleared`.
        high_water: so many messages wait for a slow subscriber; then it misses some.

    Returns:
        The publisher. Close it when the store is closed.

    Raises:
        ConfigError: an address cannot be used, or another publisher is at work.

    Example:
        >>> publisher = publish(store, "tcp://*:5557", replay="tcp://*:5558", topic="kv@pod-1@llama")  # doctest: +SKIP
    """
    if store._residency.host.told is not None:
        raise ConfigError("events: this store has a publisher already; close it first")
    return EventPublisher(store, endpoint, replay, topic, buffer_batches, queue, high_water)
