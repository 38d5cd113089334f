"""A subscriber over real ZMQ knows at any time which blocks a store has, and where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import small_stores as small
import zmq

from kvstore import KVStore
from kvstore.errors import ConfigError
from kvstore.events.publish import EventPublisher, publish
from kvstore.events.wire import AllBlocksCleared, Event, unpacked

TOKENS = small.tokens_of(1, 5 * small.BLOCK + 2)  # and a tail, which is no whole block
HANGS_MS = 60_000


class Router:
    """What a router makes of the events: names of blocks by medium, and their tokens."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.subscribe(b"kv@")
        self._in.connect(publisher.endpoint)
        self._again = self._context.socket(zmq.REQ)
        self._again.connect(publisher.replay)
        self._publisher = publisher
        self.next = 0
        self.has: dict[str, set[object]] = {}
        self.tokens: dict[object, tuple[object, list[int]]] = {}
        self.events: list[Event] = []

    def catch_up(self) -> None:
        """Ask for everything that was sent and not seen: a subscription takes a moment until it holds."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self._publisher.replay)
        dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while dealer.poll(HANGS_MS):
            _, number, message = dealer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                break
            self._apply(int.from_bytes(number, "big"), message)
        dealer.close()

    def receive(self) -> None:
        """Wait for one message of the subscription."""
        assert self._in.poll(HANGS_MS)
        topic, number, message = self._in.recv_multipart()
        assert topic == b"kv@pod@tiny"
        self._apply(int.from_bytes(number, "big"), message)

    def until(self, media: dict[str, int]) -> None:
        """Until it knows of so many blocks of each medium."""
        end = time.monotonic() + HANGS_MS / 1000
        while {medium: len(names) for medium, names in self.has.items() if names} != media:
            assert time.monotonic() < end, (self.has, media)
            self.catch_up()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _apply(self, number: int, message: bytes) -> None:
        if number < self.next:
            return
        assert number == self.next
        self.next += 1
        for event in unpacked(message).events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                self.has.clear()
                self.tokens.clear()
                continue
            names = self.has.setdefault(str(event.medium), set())
            if type(event).__name__ == "BlockRemoved":
                names.difference_update(event.block_hashes)
                continue
            names.update(event.block_hashes)
            parent = event.parent_block_hash
            for i, name in enumerate(event.block_hashes if event.token_ids else ()):
                self.tokens[name] = parent, list(event.token_ids[i * small.BLOCK : (i + 1) * small.BLOCK])
                parent = name

    def sequence(self, last: object) -> list[int]:
        """The tokens of the prefix that ends with a block."""
        found: list[int] = []
        while last is not None:
            last, tokens = self.tokens[last]
            found = tokens + found
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", small.IDENTITY, small.config()) as store:
        yield store


def _published(store: KVStore, **options: object) -> EventPublisher:
    bound = {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "topic": "kv@pod@tiny"}
    return publish(store, **{**bound, **options})  # type: ignore[arg-type]


@contextmanager
def _routed(store: KVStore, **options: object) -> Iterator[Router]:
    """A router that hears what the store publishes."""
    with _published(store, **options) as publisher, closing(Router(publisher)) as router:
        yield router


def _longest(router: Router) -> list[int]:
    return max((router.sequence(name) for name in router.tokens), key=len)


def test_a_router_knows_the_tokens_of_what_is_put(store: KVStore) -> None:
    with _published(store) as publisher, closing(Router(publisher)) as router:
        small.put(store, TOKENS)
        store.flush()
        router.until({"CPU": 5, "STORAGE": 5})
        assert _longest(router) == TOKENS[: 5 * small.BLOCK].tolist()
    assert publisher.stats()["events"] >= 2


def test_messages_come_to_a_subscriber_in_order(store: KVStore) -> None:
    with _routed(store) as router:
        router.catch_up()
        number = 1
        while not router._in.poll(10):  # until the subscription holds
            number += 1
            small.put(store, small.tokens_of(number, small.BLOCK))
            store.flush()
        router.catch_up()
        small.put(store, small.tokens_of(number + 1, small.BLOCK))
        store.flush()
        while {len(names) for names in router.has.values()} != {number}:
            router.receive()


def test_what_is_deleted_is_removed_everywhere(store: KVStore) -> None:
    with _routed(store) as router:
        small.put(store, TOKENS)
        store.flush()
        router.until({"CPU": 5, "STORAGE": 5})
        store.delete(TOKENS)
        router.until({})


def test_what_memory_gives_up_is_still_on_disk(tmp_path: Path) -> None:
    with KVStore(tmp_path / "store", small.IDENTITY, small.config(host=4096)) as store, _routed(store) as router:
        for number in range(1, 9):
            small.put(store, small.tokens_of(number, 4 * small.BLOCK))
            store.flush()
        held = store.stats()["host"]["records"]
        assert 0 < held < 32
        router.until({"CPU": held, "STORAGE": 32})


def test_what_was_there_before_is_told_first(store: KVStore) -> None:
    small.put(store, TOKENS)
    store.flush()
    for _ in range(2):
        with _routed(store) as router:
            router.until({"CPU": 5, "STORAGE": 5})
            assert isinstance(router.events[0], AllBlocksCleared)
            assert _longest(router) == TOKENS[: 5 * small.BLOCK].tolist()


def test_a_store_in_memory_tells_too(tmp_path: Path) -> None:
    with KVStore(tmp_path / "store", small.IDENTITY, small.config(disk=0)) as store:
        small.put(store, TOKENS)
        store.flush()
        with _routed(store) as router:
            router.until({"CPU": 5})
            assert _longest(router) == TOKENS[: 5 * small.BLOCK].tolist()


def test_a_full_queue_is_counted_and_everything_told_anew(store: KVStore) -> None:
    with _routed(store, queue=3) as router:
        for number in range(1, 20):
            small.put(store, small.tokens_of(number, 4 * small.BLOCK))
        store.flush()
        router.until({"CPU": 76, "STORAGE": 76})
        assert store.stats()["counters"]["dropped_events"] > 0
        assert sum(isinstance(event, AllBlocksCleared) for event in router.events) >= 2


def test_blocks_of_a_namespace_say_so(store: KVStore) -> None:
    with _routed(store) as router:
        small.put(store, TOKENS[: small.BLOCK], b"tenant")
        store.flush()
        router.until({"CPU": 1, "STORAGE": 1})
        keys = {str(getattr(event, "extra_keys", None)) for event in router.events[1:]}
        assert len(keys) == 1
        assert "None" not in keys


def test_a_second_publisher_and_a_taken_port_are_refused(store: KVStore, tmp_path: Path) -> None:
    with _published(store) as publisher:
        with pytest.raises(ConfigError, match="has a publisher already"):
            _published(store)
        with (
            KVStore(tmp_path / "other", small.IDENTITY, small.config()) as other,
            pytest.raises(ConfigError, match="cannot be bound"),
        ):
            _published(other, endpoint=publisher.endpoint)
    with _published(store):
        pass  # again, after the first was closed


def test_a_question_that_is_none_is_ignored(store: KVStore) -> None:
    with _published(store) as publisher:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay)
        dealer.send_multipart([b"what"])
        dealer.send_multipart([b"", bytes(20)])
        dealer.send_multipart([b"", (10**6).to_bytes(8, "big")])
        assert dealer.poll(HANGS_MS)
        assert dealer.recv_multipart() == [b"", b"\xff" * 8, b""]
        context.destroy(linger=0)


def test_puts_and_deletes_at_random_end_in_what_the_store_has(store: KVStore) -> None:
    rng = np.random.default_rng(3)
    with _routed(store, queue=50) as router:
        stems = [small.tokens_of(number, 6 * small.BLOCK) for number in range(1, 6)]
        for _ in range(60):
            tokens = stems[rng.integers(5)][: small.BLOCK * rng.integers(1, 7)]
            if rng.random() < 0.7:
                small.put(store, tokens)
            else:
                store.delete(tokens)
        store.flush()
        whole = sum(small.stored(store, stem) // small.BLOCK for stem in stems)
        router.until({"CPU": whole, "STORAGE": whole})
