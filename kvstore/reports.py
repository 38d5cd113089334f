"""What a store says of itself: sizes, contents, why a get ends where it ends, and whether all of it agrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvstore.config import StoreConfig
from kvstore.core.arguments import check_integer
from kvstore.core.explanation import Explanation
from kvstore.core.history import Sample
from kvstore.core.identity import ModelIdentity
from kvstore.core.keys import namespace_bytes, namespace_digest
from kvstore.core.results import ClusterInfo, RequestReport, SessionInfo
from kvstore.core.session_record import session_key
from kvstore.core.tokens import as_tokens
from kvstore.gate.gate import Gate
from kvstore.open import Engine
from kvstore.read.lookup import Lookup
from kvstore.residency.block_table import BlockTable, block_table_of
from kvstore.residency.check import CheckReport
from kvstore.residency.inventory import Inventory, inventory_of
from kvstore.residency.lifecycle import CallGuard

# About a paragraph by a model's probabilities, sixteen tokens where nothing is known of them.
_RADIUS_BITS = 256.0


class StoreReports:
    """The part of `KVStore` that changes nothing and returns no caches. Thread-safe, as `KVStore` is.

    Attributes:
        last_request: what the last call reused, of a model that the store is attached to or of `generate` with this
            store; None before the first. With several threads, of whichever ended last: give `attach` a callback to
            have them all.
    """

    last_request: RequestReport | None = None
    config: StoreConfig
    identity: ModelIdentity
    _calls: CallGuard
    _engine: Engine
    _lookup: Lookup

    def __len__(self) -> int:
        """Return how many blocks are stored.

        Example:
            >>> len(store)
            1
        """
        return int(self._calls.run(self._engine.residency.index.stats)["records"])

    def __bool__(self) -> bool:
        """A store is true, also while it is empty."""
        return True

    def __contains__(self, tokens: Any) -> bool:
        """Return whether all of a sequence is stored, in the namespace b"". Counts as no use.

        Example:
            >>> [11, 12, 13] in store, [11, 12, 99] in store
            (True, False)
        """
        self._calls.check()
        ids, digest = as_tokens(tokens), self._digest(b"")
        return self._calls.run(self._lookup.depth, digest, ids) == len(ids)

    @property
    def gate(self) -> Gate:
        """What decides between loading and computing; tell it what computing takes (docs/gate.md).

        Example:
            >>> store.gate.observe_prefill(2048, 3.2)
            >>> round(store.gate.prefill_seconds(1024), 1)
            1.6
        """
        return self._engine.gate

    def explain(self, tokens: Any, *, namespace: str | bytes = b"", start: int | None = None) -> Explanation:
        """Say why a get of these tokens returns what it returns, block by block; `print` shows a table.

        Reads no payload, and nothing counts as used. Of the blocks that left since the store was opened, the last
        16,384 are known by their reason. The answer counts other namespaces that have the block: it is for whoever
        runs the store. Caches of another identity cannot be in it: opening it as another raises `IdentityMismatch`.

        Args:
            tokens, namespace: as of `put`.
            start: what a get has just returned, in tokens. Only the blocks from there on are looked at, and the remote
                tier is not asked again.

        Returns:
            An `Explanation`. Damage to a payload shows once a get has met it.

        Raises:
            ValueError: bad tokens, namespace or start.
        """
        self._calls.check()
        ids, digest = as_tokens(tokens), self._digest(namespace)
        check_integer("start", start, 0, len(ids))
        return self._calls.run(self._engine.explainer.explain, digest, ids, start)

    def clusters(self, radius_bits: float = _RADIUS_BITS, *, namespace: str | bytes | None = None) -> list[ClusterInfo]:
        """Return groups of stored sequences that are alike, the largest group first.

        The first call with a radius looks at all sequences; from then on the groups are kept up to date.

        Args:
            radius_bits: how far a sequence may be from the most probable one of its group, in bits of what the two do
                not have in common, by the probabilities of the trie (docs/semantic.md).
            namespace: only sequences of this one; default is all.

        Raises:
            ValueError: the radius is not above 0, or the namespace is malformed.

        Example:
            >>> [len(cluster.members) for cluster in store.clusters()]
            [1]
        """
        self._calls.check()
        digest = None if namespace is None else self._digest(namespace)
        return self._calls.run(self._engine.own.run, self._engine.clusters.clusters, float(radius_bits), digest)

    def sessions(self, *, stored: bool = False) -> list[SessionInfo]:
        """Return all saved sessions, the last used first.

        Args:
            stored: also say how much of each is stored. Takes time in proportion to the tokens of all sessions;
                otherwise to their number.

        Example:
            >>> saved = store.session("alice").save([11, 12, 13], kv, metadata={"user": "ann"})
            >>> [(session.id, session.tokens, session.metadata) for session in store.sessions()]
            [('alice', 3, {'user': 'ann'})]
            >>> store.sessions(stored=True)[0].stored_tokens
            3
        """
        self._calls.check()
        return self._calls.run(self._sessions, stored)

    def _sessions(self, stored: bool) -> list[SessionInfo]:
        engine = self._engine
        rows = engine.sessions.all(self.identity.layout.bytes_per_token)
        rows.sort(key=lambda row: row.last_use, reverse=True)
        if not stored:
            return rows
        self._lookup.refresh()
        return [self._with_stored(row) for row in rows]

    def _with_stored(self, row: SessionInfo) -> SessionInfo:
        record = self._engine.sessions.get(session_key(row.namespace, row.id))
        if record is None:
            return replace(row, stored_tokens=0, stored_bytes=0)
        tokens = self._lookup.depth(row.namespace, record.tokens)
        return replace(row, stored_tokens=tokens, stored_bytes=self._lookup.nbytes(row.namespace, record.tokens))

    def inventory(self) -> Inventory:
        """Return every stored sequence, and what its blocks take. Reads no payload, and nothing counts as used.

        Takes time in proportion to the number of blocks; other calls go on.

        Example:
            >>> [sequence.tokens.tolist() for sequence in store.inventory().sequences]
            [[11, 12, 13]]
        """
        self._calls.check()
        return self._calls.run(self._inventory)

    def _inventory(self) -> Inventory:
        self._lookup.refresh()
        return inventory_of(self._engine.residency, self._lookup.layout.is_grouped, self._lookup.depth)

    def blocks(self) -> BlockTable:
        """Return a row for every block on disk: place, size, codec, donors, uses. Reads no payload, nothing counts as
        used.

        Raises:
            DiskError: the catalog cannot be read.

        Example:
            >>> flushed, table = store.flush(), store.blocks()
            >>> table.rows["count"].tolist(), table.labels.tolist()
            ([3], ['entropy'])
        """
        self._calls.check()
        return self._calls.run(self._blocks)

    def _blocks(self) -> BlockTable:
        self._lookup.refresh()
        return block_table_of(self._engine.residency)

    def stats(self) -> dict[str, Any]:
        """Return sizes and counters as plain numbers.

        Returns:
            "index", "families", "content", "queue", "sessions", "buffers", one entry for each tier, "namespaces", and
            "counters", which only grow; ARCHITECTURE.md says what each counts. Every drop, fallback and damaged entry
            is counted. "namespaces" has records, tokens, bytes and sessions by name, or by digest:HEX where the
            settings do not name one; of more than 64 the smallest are together under "(others)".

        Example:
            >>> store.stats()["counters"]["put_tokens"]
            3
        """
        return self._calls.run(self._engine.stats)

    def history(self) -> tuple[Sample, ...]:
        """Return what the store was asked for over time, and how long that took, the oldest sample first.

        Whoever has the store open for writing takes a sample about every minute in which somebody gets or puts, and at
        the end; older samples are joined, so that there are never more than 96. Kept in the catalog (31 KB at most),
        over any number of opens; a store without a disk has the sample that is under way alone.

        Raises:
            DiskError: the catalog cannot be read.

        Example:
            >>> found = store.get([11, 12, 13, 14])
            >>> store.history()[-1].hit_rate
            0.75
        """
        return self._calls.run(self._engine.history)

    def check(self, deep: bool = False) -> CheckReport:
        """Compare everything that the store says of itself: index, tiers, catalog, segments, families, pins, sessions.

        Repairs nothing. Other calls go on; a put or delete waits while one look is taken, and what is only under way is
        looked at again before it is reported.

        Args:
            deep: also read every record on disk and verify its checksums, keys and tokens. Takes time in proportion to
                the bytes on disk; otherwise to the number of records.

        Returns:
            What was found; `problems` is empty if all is well.

        Example:
            >>> store.check(deep=True).problems
            ()
        """
        return self._calls.run(self._engine.checker(self._calls).check, deep)

    def _digest(self, namespace: str | bytes) -> bytes:
        digest = namespace_digest(namespace)
        accepted = self.config.namespaces
        known = not accepted or namespace_bytes(namespace) in accepted or digest in map(namespace_digest, accepted)
        if not known:
            raise ValueError(f"namespace: {namespace!r} is not one of the configured namespaces")
        return digest
