"""Clusters of alike sequences, kept up to date while records come and go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvstore.core.results import ClusterInfo
from kvstore.residency.residency import Residency
from kvstore.trie.semantic import Clusters


@dataclass
class ClusterIndex:
    """Clusters of one radius at a time, made when they are first asked for.

    Thread-safe: `_lock` guards `_clusters`, which has a lock of its own for what is in it.
    """

    residency: Residency
    _clusters: Clusters | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def clusters(self, radius_bits: float, namespace: bytes | None) -> list[ClusterInfo]:
        """Return the clusters, the one with the most members first.

        Args:
            radius_bits: see `KVStore.clusters`. Another radius than last time makes all clusters anew.
            namespace: only of the namespace with this digest; None: of all.

        Raises:
            ValueError: the radius is not above 0.
        """
        found = []
        for cluster in self._of(radius_bits).clusters():
            try:
                paths = [self.residency.index.path(record) for record in cluster.members]
            except KeyError:
                continue  # a member left since
            if namespace is None or paths[0][0] == namespace:
                members = tuple(tokens for _, tokens in paths)
                found.append(ClusterInfo(members[0], members, cluster.radius_bits, cluster.shared_bits))
        return sorted(found, key=lambda cluster: len(cluster.members), reverse=True)

    def _of(self, radius_bits: float) -> Clusters:
        with self._lock:
            if self._clusters is None or self._clusters.radius_bits != radius_bits:
                residency, old = self.residency, self._clusters
                self._clusters = made = Clusters(residency.index, radius_bits)
                if old is not None:
                    residency.unlisten(old.added, old.removed)
                residency.listen(made.added, made.removed)
                made.load()
            self._clusters.refresh()
            return self._clusters
